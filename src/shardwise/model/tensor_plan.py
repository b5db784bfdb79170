"""Which modules of a model tensor parallelism splits, and how: transformers' own plan where a model has one.

A column module makes a part of its output features on each rank, a row module reads a part of its input features and
its partial outputs are summed (Megatron-LM, arXiv 1909.08053, section 3). What lies between them - heads, the
inner activations of an MLP - exists in parts only, so every pair begins and ends inside one module, the *region*.
Stacked experts are a region by themselves: what the router gives them enters it, and the router stays outside, whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.model.facts import EXPERTS, TensorSplit

# Kinds of `base_model_tp_plan` that are understood here.
PUBLISHED = {
    "colwise": TensorSplit("column"),
    "rowwise": TensorSplit("row"),
    "replicated_with_grad_allreduce": TensorSplit("partial"),
    "moe_tp_experts": TensorSplit("experts"),
}
# How transformers' plans speak of the parameters of experts, where these are stacked as `facts.EXPERTS` says.
STACKED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
ROUTED = ["hidden_states", "top_k_index", "top_k_weights"]  # arguments of their forward
# Families whose experts are split: those that tests hold against one process.
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "dots1")
UNGROUPED = ("eager", "batched_mm")  # transformers' implementations that take rows of any size
# Modules beside experts that score them for each position by itself.
ROUTERS = ("gate", "shared_expert_gate")
# Names of projections of keys or values alone, with or without a plan of transformers'.
KEY_VALUE = ("k_proj", "v_proj", "key", "value")
COLUMN, ROW = PUBLISHED["colwise"], PUBLISHED["rowwise"]
SEPARATE = {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "out_proj": ROW}
GATED = {"gate_proj": COLUMN, "up_proj": COLUMN, "down_proj": ROW}
FUSED = "query_key_value"


def _in(parent: str, rules: Mapping[str, TensorSplit]) -> dict[str, TensorSplit]:
    return {f"{parent}.{name}": split for name, split in rules.items()}


ENCODER = (
    _in("encoder.layer.*.attention.self", {"query": COLUMN, "key": COLUMN, "value": COLUMN})
    | _in("encoder.layer.*", {"attention.output.dense": ROW, "intermediate.dense": COLUMN, "output.dense": ROW})
)  # fmt: skip
INTERLEAVED = (  # one projection of [heads, (query, key, value), head size]
    _in("h.*.self_attention", {FUSED: COLUMN, "dense": ROW})
    | _in("h.*.mlp", {"dense_h_to_4h": COLUMN, "dense_4h_to_h": ROW})
)  # fmt: skip
T5_ATTENTION = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW, "relative_attention_bias": COLUMN}
T5_STACK = (
    _in("block.*.layer.*.SelfAttention", T5_ATTENTION)
    | _in("block.*.layer.*.EncDecAttention", T5_ATTENTION)
    | _in("block.*.layer.*.DenseReluDense", {"wi": COLUMN, "wi_0": COLUMN, "wi_1": COLUMN, "wo": ROW})
    | _in("block.*.layer.*.DenseReluDense", {"dropout": TensorSplit("inner")})
)  # fmt: skip
# Of models for which transformers has no plan, or one that leaves something whole.
OWN: dict[str, dict[str, TensorSplit]] = {
    "gpt2": _in("h.*.attn", {"c_attn": TensorSplit("column", sections=3), "c_proj": ROW})
    | _in("h.*.mlp", {"c_fc": COLUMN, "c_proj": ROW}),
    "gptj": _in("h.*.attn", SEPARATE) | _in("h.*.mlp", {"fc_in": COLUMN, "fc_out": ROW}),
    "gpt_neo": _in("h.*.attn.attention", SEPARATE) | _in("h.*.mlp", {"c_fc": COLUMN, "c_proj": ROW}),
    "opt": _in("decoder.layers.*.self_attn", SEPARATE)
    | _in("decoder.layers.*", {"fc1": TensorSplit("column", alone=True), "fc2": ROW}),
    "bert": ENCODER,
    "roberta": ENCODER,
    "bloom": INTERLEAVED,
    "falcon": INTERLEAVED,
    "t5": _in("encoder", T5_STACK) | _in("decoder", T5_STACK),
    "qwen2_moe": _in("layers.*.self_attn", {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW})
    | _in("layers.*.mlp", {**GATED, "experts": TensorSplit("experts")})
    | _in("layers.*.mlp.shared_expert", GATED),
}


def tensor_plan(model: nn.Module) -> tuple[dict[str, TensorSplit], str]:
    """Module name -> how it is split, or nothing and the reason why this model cannot be."""
    if not isinstance(model, PreTrainedModel):
        return {}, "a module of model.factory says nothing about which of its layers belong together"
    family = str(model.config.model_type)
    published = _published(model)
    if not published and family not in OWN:
        return {}, f"there is no plan for {family} yet"
    strange = sorted(set(published.values()) - PUBLISHED.keys())
    if strange and family not in OWN:
        return {}, f"transformers' plan for {family} asks for {', '.join(strange)}, which is not built yet"
    if family == "bloom" and model.config.slow_but_exact and model.config.pretraining_tp > 1:
        return {}, "slow_but_exact of bloom adds up slices of whole weights"
    if family == "codegen":  # transformers 5.24 has a plan, right for degrees that divide 4
        return {}, "codegen lays out queries, values and keys in four parts, which other degrees would cut across"
    rules = OWN.get(family) or {name: PUBLISHED[kind] for name, kind in published.items()}
    splits = _matched(model, rules)
    if family == "falcon":
        splits = _of_falcon(model.config, splits)
    if not splits:
        return {}, f"transformers' plan for {family} names no module of this model"
    beside = _beside(model, splits)
    if beside:
        return {}, f"{beside[0]!r} of {family} sees parts of activations, and its plan does not name it"
    experts = [name for name, split in splits.items() if split.kind == "experts"]
    if experts and family not in EXPERT_FAMILIES:
        return {}, f"experts are split in {', '.join(EXPERT_FAMILIES)} alone, and those of {family} are not built yet"
    other = [name for name in experts if not _stacked(model, name)]
    if other:
        return {}, f"{other[0]!r} of {family} is no pair of stacks of gate and up and of down projections"
    return splits, ""


def vocabulary_parameters(model: Any, head: str | None) -> tuple[str, ...]:
    """Names of the parameters of input embeddings and head whose rows ranks can share; none where one is not plain."""
    if head is None or not isinstance(model, PreTrainedModel):
        return ()
    table, projection = model.get_input_embeddings(), model.get_submodule(head)
    plain = type(table) is nn.Embedding and type(projection) is nn.Linear and table.max_norm is None
    if not plain or table.weight.shape != projection.weight.shape:
        return ()
    wanted = {id(parameter) for parameter in (*table.parameters(), *projection.parameters())}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in wanted)


def sequence_refusal(
    shapes: Mapping[str, tuple[int, ...]], blocks: Sequence[str], splits: Mapping[str, TensorSplit], chain: bool
) -> str:
    """Why the ranks cannot each keep a part of the sequence between regions, or nothing.

    What stands there has to work on every position by itself, as norms, dropout and residuals do. Of the parameters of
    blocks that no split names these have one dim; a convolution or a recurrence over positions has more.
    """
    if not splits:
        return "there is no plan of what is split"
    if not chain:
        return "its blocks are not one chain in which each works on the output of the one before"
    parents = [name.rpartition(".")[0] for name, split in splits.items() if split.kind == "experts"]
    routers = [f"{parent}.{leaf}" for parent in parents for leaf in ROUTERS]
    known, inside = (tuple(f"{name}." for name in names) for names in ([*splits, *routers], blocks))
    others = [name for name in shapes if name.startswith(inside) and not name.startswith(known)]
    wide = [name for name in others if len(shapes[name]) > 1]
    return f"{wide[0]!r} of a block is not split, and may work across positions" if wide else ""


def region_of(name: str, split: TensorSplit) -> str:
    """The module at which a column module's region begins: its parent, or itself where the parent is whole."""
    return name if split.alone else name.rpartition(".")[0]


def _beside(model: nn.Module, splits: Mapping[str, TensorSplit]) -> list[str]:
    """Parameters inside of a region that no split accounts for: their gradients would be wrong without a word."""
    regions = tuple({f"{region_of(name, split)}." for name, split in splits.items() if split.kind == "column"})
    known = tuple(f"{name}." for name in splits)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if name.startswith(regions) and not name.startswith(known)]


def _stacked(model: nn.Module, name: str) -> bool:
    """Whether experts hold the two stacks that `facts.EXPERTS` splits, in those shapes, and take what routers give."""
    module = model.get_submodule(name)
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
    if shapes.keys() != EXPERTS.keys() or any(len(shape) != 3 for shape in shapes.values()):
        return False
    (experts, fused, hidden), down = shapes["gate_up_proj"], shapes["down_proj"]
    plain = getattr(module, "is_concatenated", True) and not getattr(module, "has_post_expert_norm", False)
    return bool(plain) and down == (experts, hidden, fused // 2) and is_routed(module)


def is_routed(module: nn.Module) -> bool:
    """Whether a module computes experts: it takes what a router of transformers' gives."""
    return list(inspect.signature(module.forward).parameters) == ROUTED


def _published(model: PreTrainedModel) -> dict[str, str]:
    """Transformers' plan without the input embeddings, which `vocabulary_parameters` splits in its place.

    Transformers 5.17 names them in the configuration of every tied model, others too where the module has another name.
    The parameters of stacked experts are left out too, since a split of the experts says how those are cut.
    """
    plan: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    table = model.get_input_embeddings()
    experts = [rule for rule, kind in plan.items() if PUBLISHED.get(kind) == TensorSplit("experts")]
    of_stacks = {(f"{rule}.{leaf}", kind) for rule in experts for leaf, kind in STACKED.items()}
    return {
        rule: kind
        for rule, kind in plan.items()
        if (rule, kind) not in of_stacks
        and (kind != "embedding_rowwise" or any(part is not table for _, part in _named_by(model, rule)))
    }


def _named_by(model: PreTrainedModel, rule: str) -> list[tuple[str, nn.Module]]:
    """The modules that a rule such as `layers.*.mlp.up_proj` of the base model names."""
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    pattern = re.compile(re.escape(base + rule).replace(r"\*", r"\d+"))
    return [(name, part) for name, part in model.named_modules() if pattern.fullmatch(name)]


def _matched(model: PreTrainedModel, rules: Mapping[str, TensorSplit]) -> dict[str, TensorSplit]:
    splits: dict[str, TensorSplit] = {}
    for rule, split in rules.items():
        split = replace(split, key_value=split.kind == "column" and rule.rpartition(".")[2] in KEY_VALUE)
        splits |= {name: _of(part, split) for name, part in _named_by(model, rule)}
    return splits


def _of_falcon(config: Any, splits: dict[str, TensorSplit]) -> dict[str, TensorSplit]:
    """One key and one value head serve all queries (multi-query), or all of a group of the new decoder's."""
    if not (config.new_decoder_architecture or config.multi_query):
        return splits
    shared = config.hidden_size // config.num_attention_heads
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    fused = {name: replace(splits[name], shared=shared, groups=groups) for name in splits if name.endswith(FUSED)}
    return splits | fused


def _of(module: Any, split: TensorSplit) -> TensorSplit:
    """With the `dim` of the module's weight; a Conv1D holds it transposed, and so does a table of features."""
    if split.kind == "experts":
        chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
        return replace(split, grouped=chosen not in UNGROUPED)
    outputs = 1 if isinstance(module, (Conv1D, nn.Embedding)) else 0
    return replace(split, dim=1 - outputs if split.kind == "row" else outputs)
