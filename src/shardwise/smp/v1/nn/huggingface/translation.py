"""Names and forms of weights: transformers' of six families, and `smp.nn`'s; bit-equal in both directions.

A family is a table of prefixes and leaves. A leaf is renamed, transposed (GPT-2's Conv1D keeps weights [in, out]), or
cut into query, key and value, which GPT-2 stores side by side and GPT-NeoX head by head. What no row names (a masked
language model's head, say) keeps its name. Tensors move from one dict to the other, so that none is there twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1.session import state

QKV, POSITIONS = ("query", "key", "value"), "position_embedding"


@dataclass(frozen=True)
class WeightNames:
    """Names of one family's weights.

    Attributes:
        name: transformers' model_type.
        block: prefix of a block there, `{}` being its number.
        target: prefix of a block here.
        leaves: module in a block there -> module in a block here; `qkv` for a fused projection.
        others: prefix there -> prefix here, outside of blocks.
        transposed: weights are kept [in, out].
        by_head: the fused projection is [heads, 3, head size].
        qkv_bias: whether queries, keys and values have biases; None: either.
        ignored: buffers of older versions, which hold no weights.
    """

    name: str
    block: str
    leaves: dict[str, str]
    others: dict[str, str] = field(default_factory=dict)
    target: str = "transformer.seq_layers.{}"
    transposed: bool = False
    by_head: bool = False
    qkv_bias: bool | None = None
    ignored: str = r"\.(attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias|rotary_emb\.inv_freq)$"


SEPARATE = {f"{letter}_proj": f"attention.{name}" for letter, name in zip("qkv", QKV)}
MLP = {"c_fc": "output.dense1", "c_proj": "output.dense2"}
GPT_OTHERS = {"transformer.wte": "word_embedding", "transformer.wpe": POSITIONS,
              "transformer.ln_f": "layernorm", "lm_head": "lm_head"}  # fmt: skip


def _encoder(name: str) -> WeightNames:
    leaves = {f"attention.self.{part}": f"attention.{part}" for part in QKV} | {
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.layernorm",
    }
    return WeightNames(name, f"{name}.encoder.layer.{{}}", leaves, target=f"{name}.encoder.seq_layers.{{}}")


FAMILIES = {
    family.name: family
    for family in (
        WeightNames(
            "gpt2",
            "transformer.h.{}",
            {"ln_1": "attention.pre_layernorm", "attn.c_attn": "qkv", "attn.c_proj": "attention.dense",
             "ln_2": "output.pre_layernorm"} | {f"mlp.{old}": new for old, new in MLP.items()},
            GPT_OTHERS, transposed=True, qkv_bias=True,
        ),
        WeightNames(
            "gptj",
            "transformer.h.{}",
            {"ln_1": "attention.pre_layernorm", "attn.out_proj": "attention.dense", "mlp.fc_in": "output.dense1",
             "mlp.fc_out": "output.dense2"} | {f"attn.{old}": new for old, new in SEPARATE.items()},
            {old: new for old, new in GPT_OTHERS.items() if new != POSITIONS}, qkv_bias=False,
        ),
        WeightNames(
            "gpt_neo",
            "transformer.h.{}",
            {"ln_1": "attention.pre_layernorm", "attn.attention.out_proj": "attention.dense",
             "ln_2": "output.pre_layernorm"}
            | {f"attn.attention.{old}": new for old, new in SEPARATE.items()}
            | {f"mlp.{old}": new for old, new in MLP.items()},
            GPT_OTHERS, qkv_bias=False,
            ignored=r"\.attn\.attention\.(bias|masked_bias)$",
        ),
        WeightNames(
            "gpt_neox",
            "gpt_neox.layers.{}",
            {"input_layernorm": "attention.pre_layernorm", "attention.query_key_value": "qkv",
             "attention.dense": "attention.dense", "post_attention_layernorm": "output.pre_layernorm",
             "mlp.dense_h_to_4h": "output.dense1", "mlp.dense_4h_to_h": "output.dense2"},
            {"gpt_neox.embed_in": "word_embedding", "gpt_neox.final_layer_norm": "layernorm", "lm_head": "lm_head",
             "embed_out": "lm_head"},
            by_head=True,
        ),
        _encoder("bert"),
        _encoder("roberta"),
    )
}  # fmt: skip


# GPT-2 of transformers with registered layers in the place of its blocks: the names around them stay.
FAMILIES["gpt2_blocks"] = replace(FAMILIES["gpt2"], name="gpt2_blocks", target="transformer.h.{}", others={})


def to_smp(weights: Any, name: str, heads: int | None = None) -> dict[str, Tensor]:
    """Return transformers' state dict of the family `name` as `smp.nn`'s; emptied meanwhile, where it can be.

    Args:
        weights: by transformers' names.
        name: the family's model_type.
        heads: attention heads; of use for GPT-NeoX alone. Unset: those of the script's model.

    Raises:
        SMPValidationError: it is not of this family.
    """
    family = FAMILIES[name]
    pattern = _pattern(family.block)
    _check(family, weights, pattern, "transformers")
    translated: dict[str, Tensor] = {}
    for key, value in _drained(weights):
        if re.search(family.ignored, key):
            continue
        match = pattern.match(key)
        if match is None:
            translated[_renamed(key, family.others)] = value
            continue
        module, _, leaf = key[match.end() :].rpartition(".")
        prefix, target = family.target.format(match[1]), family.leaves.get(module)
        if target is None:
            translated[key] = value
        elif target == "qkv":
            parts = _cut(value, family, heads)
            translated |= {f"{prefix}.attention.{part}.{leaf}": tensor for part, tensor in zip(QKV, parts)}
        else:
            turned = value.t().contiguous() if family.transposed and value.dim() == 2 else value
            translated[f"{prefix}.{target}.{leaf}"] = turned
    return translated


def to_hf(weights: Any, name: str, heads: int | None = None) -> dict[str, Tensor]:
    """Return `smp.nn`'s state dict as transformers', the way back of `to_smp`.

    Raises:
        SMPValidationError: it is not of the family `name`.
    """
    family = FAMILIES[name]
    pattern = _pattern(family.target)
    _check(family, weights, pattern, "smp.nn")
    back = {new: old for old, new in family.leaves.items()}
    others = {new: old for old, new in reversed(list(family.others.items()))}
    translated: dict[str, Tensor] = {}
    waiting: dict[str, dict[str, Tensor]] = {}
    for key, value in _drained(weights):
        match = pattern.match(key)
        if match is None:
            translated[_renamed(key, others)] = value
            continue
        module, _, leaf = key[match.end() :].rpartition(".")
        prefix, part = family.block.format(match[1]), module.rpartition(".")[2]
        if "qkv" in back and part in QKV:
            fused = f"{prefix}.{back['qkv']}.{leaf}"
            parts = waiting.setdefault(fused, {})
            parts[part] = value
            if len(parts) == len(QKV):
                translated[fused] = _join([parts[name] for name in QKV], family, heads)
                del waiting[fused]
        elif module in back:
            turned = value.t().contiguous() if family.transposed and value.dim() == 2 else value
            translated[f"{prefix}.{back[module]}.{leaf}"] = turned
        else:
            translated[key] = value
    return translated


def _pattern(block: str) -> re.Pattern[str]:
    return re.compile(re.escape(block).replace(r"\{\}", r"(\d+)") + r"\.")


def _check(family: WeightNames, weights: Any, pattern: re.Pattern[str], whose: str) -> None:
    """Raise SMPValidationError unless the blocks hold what the family's do: several share the names around them."""
    in_blocks = [key[match.end() :] for key in weights if (match := pattern.match(key))]
    is_ours = whose == "smp.nn"
    why = _difference(family, in_blocks, is_ours) if in_blocks else ""
    if not in_blocks:
        why = f"none is called like {family.block.format(0)}... or {family.target.format(0)}..."
    elif not why and is_ours and "word_embedding.weight" in weights:
        has_positions = POSITIONS in (key.rpartition(".")[0] for key in weights)
        wants_positions = POSITIONS in family.others.values()
        why = "" if has_positions == wants_positions else f"they have {'a' if has_positions else 'no'} {POSITIONS}"
    if why:
        raise SMPValidationError(
            f"these are not {whose}'s weights of {family.name}: {why}; use the function of their own family"
        )


def _difference(family: WeightNames, in_blocks: list[str], is_ours: bool) -> str:
    """Return what tells names in blocks, ours or transformers', from the family's; empty where nothing does."""
    fused = [f"attention.{part}" for part in QKV]
    ours = {name for new in family.leaves.values() for name in (fused if new == "qkv" else [new])}
    wanted, present = ours if is_ours else set(family.leaves), {name.rpartition(".")[0] for name in in_blocks}
    query = next(old for old, new in family.leaves.items() if new in ("qkv", fused[0])) if not is_ours else fused[0]
    biased = f"{query}.bias" in in_blocks
    if missing := wanted - present:
        return f"no block has {', '.join(sorted(missing))}"
    if is_ours and (unknown := present - wanted):
        return f"blocks have {', '.join(sorted(unknown))} too"
    return "" if family.qkv_bias in (None, biased) else f"queries have {'a' if biased else 'no'} bias"


def _drained(weights: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield items of a dict, each taken out of it, so that no weight is there twice."""
    for key in list(weights):
        if isinstance(weights[key], Tensor):
            yield key, weights.pop(key) if isinstance(weights, MutableMapping) else weights[key]


def _renamed(key: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def _cut(fused: Tensor, family: WeightNames, heads: int | None) -> list[Tensor]:
    if family.by_head:
        split = fused.unflatten(0, (_heads(heads), 3, -1))
        return [split[:, index].flatten(0, 1).contiguous() for index in range(3)]
    turned = fused.t() if family.transposed and fused.dim() == 2 else fused
    return [part.contiguous() for part in turned.chunk(3)]


def _join(parts: list[Tensor], family: WeightNames, heads: int | None) -> Tensor:
    if family.by_head:
        count = _heads(heads)
        return torch.stack([part.unflatten(0, (count, -1)) for part in parts], 1).flatten(0, 2)
    fused = torch.cat(parts)
    return fused.t().contiguous() if family.transposed and fused.dim() == 2 else fused


def _heads(given: int | None) -> int:
    """GPT-NeoX's fused projection does not say how many heads it has."""
    module = None if state.weights is None else state.weights.module
    heads = given or getattr(module, "num_attention_heads", None)
    if heads is None:
        raise SMPValidationError("GPT-NeoX's weights do not say how many heads there are; give heads=")
    return int(heads)
