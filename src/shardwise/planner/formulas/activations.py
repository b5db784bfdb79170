"""Bytes that autograd keeps of a transformer block between its forward and its backward, module by module.

For T tokens of a microbatch, hidden size H, width A of all heads (most often H), key and value width K, intermediate
size I and c bytes a number, autograd saves, each tensor once however many operators need it:

- norm: its input [T, H]. An RMS norm as transformers writes it computes in fp32, so it keeps the input in fp32 and the
  normalised values besides; a layer norm keeps two statistics a token. The input of a pre-norm is the residual stream,
  which two parallel branches (GPT-NeoX) share. A post-norm (BERT) saves the same amount, of sums instead of inputs.
  Norms of query and key (Qwen3) are two more.
- linear: its input, [T, H] or [T, I]; linears that read the same tensor (query, key, value) share it. Outputs are not
  saved by the linear itself.
- attention (fused): query [T, A], key and value [T, K] each, its result [T, A] and one fp32 number a token and head.
  Where query, key and value are slices of one projection, any one of them keeps the whole projection alive; with rotary
  positions query and key are new tensors beside it. Where heads lie apart in the result, putting them together for the
  output projection is a copy (GPT-NeoX concatenates rotated and unrotated parts head by head).
- latent attention: instead of these three the inputs of the norms and of the products behind them, and the whole
  result [T, heads times (plain + value)] that keys and values are cut from; keys are put together anew.
- attention (efficient), which torch takes on accelerators for masks and for fp32: the same, but several heads of key
  and value are copied for each query head, and heads lie side by side in the result.
- attention that is not fused: query, key and value each [T, A] laid out for batched products, and the probabilities
  [B, heads, S, S], which models compute in fp32 and keep beside the cast; with dropout also the mask and what is left
  of them. The result is not kept, but its copy with heads side by side is, as the output projection's input. SDPA on a
  CPU does not fuse with dropout.
- activation function: GELU or SiLU its input [T, I]; ReLU nothing of its own, since its result is the next linear's
  input. A gated MLP keeps gate, its activation, and the other factor.
- experts: a token that goes to k of them is k rows. Their input [kT, H], gathered by expert; as in a gated MLP four of
  [kT, I]; the result [kT, H], whose product with the router's weights needs it; the router's probabilities in fp32, and
  indices. Where experts are batched products (`batched_mm`), a copy of an expert's weights for each row. All experts
  get gradients. Experts that all tokens go through are a gated MLP beside them. Where ranks share experts, the rows
  are those that arrive, and the result that waits for its weights is that of the rows which this rank sent.
- dropout by mask: one byte an element.

Of t tensor ranks each has 1/t of the heads and of I. The residual stream, norms, masks and what linears read of it stay
[T, H], or with sequence parallelism become [T/t, H] (arXiv 2205.05198, equation 4).

`working` is what the worst moment of a module's backward holds besides: gradients of its input and output, before they
are added to the gradient of the residual stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.model.facts import ModelFacts
from shardwise.model.tensor_plan import region_of
from shardwise.model.tensor_split import EXPERTS

FP32 = 4
ROUTE = 32  # bytes of a row's choice, its token, and its places before and behind the exchange, as routes keep them
INDICES = 40  # bytes of a row's expert, its place before and behind the sorting by expert, and its weight


@dataclass(frozen=True)
class BlockKind:
    """The traits of a block that decide how much it keeps.

    `of` reads them off parameter shapes, and off the family what these hide.
    """

    rms_norm: bool = False
    fused_projection: bool = False
    head_norms: bool = False  # query and key pass a norm of their own
    rotary: bool = False
    gated: bool = False
    relu: bool = False
    parallel_residual: bool = False
    heads_apart: bool = False
    experts: int = 0  # of which a token goes to `facts.experts_of_token`
    expert_features: int = 0  # I of one
    shared_features: int = 0  # I of the MLP beside them that all tokens go through
    shared_gate: bool = False  # whose result is weighted for each token

    @classmethod
    def of(cls, facts: ModelFacts) -> BlockKind:
        """The kind of the model's first block, or of the first that has experts."""
        shapes = _shapes_of_block(facts)
        hidden, heads = facts.hidden_size, facts.attention_width
        matrices = Counter(tuple(sorted(shape)) for shape in shapes.values() if len(shape) == 2)
        widths = (heads + 2 * facts.key_value_width, facts.intermediate_size, heads)
        projection, mlp, output = (tuple(sorted((hidden, width))) for width in widths)
        # Separate projections are at least two of the output's size, query and output; a fused one leaves that alone.
        fused = matrices[projection] > 0 and matrices[output] < 2
        return cls(
            **_experts(shapes, matrices, hidden, heads),
            rms_norm=bool(shapes) and not _has_norm_bias(shapes),
            fused_projection=fused,
            head_norms=not facts.latent and _norm_sizes(shapes).count((facts.head_size,)) >= 2,
            rotary=any(buffer.endswith("inv_freq") for buffer in facts.buffers),
            gated=bool(_stacks(shapes)) or matrices[mlp] - (fused and projection == mlp) >= 3,
            relu=facts.block_traits.relu,
            parallel_residual=facts.block_traits.parallel_residual,
            heads_apart=facts.block_traits.heads_apart or facts.latent is not None,
        )


Attention = Literal["fused", "efficient", "eager", "math"]  # math: SDPA that could not fuse


@dataclass(frozen=True)
class LocalMicrobatch:
    """One microbatch on one rank, in numbers."""

    tokens: int
    sequence: int
    bytes: int  # of a number in the compute dtype
    attention: Attention = "fused"
    dropout: bool = False  # masks are kept
    gathered: float = 0.0  # other ranks' keys and values, as a multiple of this rank's
    tensor: int = 1  # ranks that share heads and inner features
    scattered: bool = False  # and the tokens between them
    expert: int = 1  # ranks that share the experts
    imbalance: float = 1.0  # rows that arrive here over the mean of those ranks
    masked: float = 1.0  # share of the blocks for whose masks torch takes the efficient kernel


@dataclass(frozen=True)
class ModuleMemory:
    """A module of a block, in bytes and elements.

    saved: kept from forward to backward. normalised: of that, what the weight of an RMS norm needs. kept: what
    selective checkpointing keeps of its outputs. working: held besides at the worst moment of its backward.
    parameters: elements whose gradients exist once its backward is done. routes, rows: of `saved`, where rows go to
    experts that ranks share, and what of them is exchanged.
    """

    name: str
    saved: float = 0.0
    kept: float = 0.0
    working: float = 0.0
    parameters: float = 0.0
    normalised: float = 0.0
    routes: float = 0.0
    rows: float = 0.0


def _shapes_of_block(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """The parameters of the first block that has experts (some families begin with others), else of the first."""
    by_block: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in facts.base_shapes.items():
        if name in facts.block_of:
            by_block.setdefault(facts.block_of[name], {})[name] = shape
    blocks = list(by_block.values())
    return next(filter(_stacks, blocks), blocks[0] if blocks else {})


def _stacks(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of stacked experts' matrices, up (with the gate) and down."""
    return [shape for name, shape in shapes.items() if len(shape) == 3 and name.rpartition(".")[2] in EXPERTS]


def _experts(
    shapes: dict[str, tuple[int, ...]], matrices: Counter[tuple[int, ...]], hidden: int, heads: int
) -> dict[str, Any]:
    stacks = _stacks(shapes)
    if not stacks:
        return {}
    number = stacks[0][0]
    widths = {sum(pair) - hidden: count for pair, count in matrices.items() if hidden in pair}
    widths[heads] = widths.get(heads, 0) - 4  # of attention's, which are no MLP's
    return {
        "experts": number,
        "expert_features": sum(map(math.prod, stacks)) // (3 * hidden * number),
        "shared_features": max((width for width, count in widths.items() if count >= 3), default=0),  # gate, up, down
        "shared_gate": matrices[1, hidden] > 0,
    }


def modules_of_block(facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch) -> list[ModuleMemory]:
    """Return the modules of one block in the order of its forward."""
    attention = _attention_pieces(facts, kind, shape)
    norm = _mlp_norm(facts, kind, shape)
    mlp = _expert_pieces(facts, kind, shape) if kind.experts else _mlp_pieces(facts, kind, shape)
    return [*attention, norm, *mlp, ModuleMemory("MLP dropout", _mask(_rows(facts, shape)[1], shape))]


def waiting_features(
    facts: ModelFacts, kind: BlockKind, shapes: Mapping[str, tuple[int, ...]], sharing: int = 1
) -> float:
    """Return the features of a token that a block's weight gradients wait with: its linear layers' inputs and outputs.

    Query, key and value have one input, and so have gate and up. `sharing` tensor ranks that share the sequence each
    keep a part of it, and of what layers outside of their regions read and make.
    """
    layers = {name: sum(shapes[weight]) for name in facts.linears if (weight := f"{name}.weight") in shapes}
    twice = (0 if kind.fused_projection else 2) + (kind.gated and bool(kind.shared_features or not kind.experts))
    columns = {name: split for name, split in facts.tensor_splits.items() if split.kind == "column" and name in layers}
    regions = tuple(region_of(name, split) for name, split in columns.items())
    outside = sum(features for name, features in layers.items() if not name.startswith(regions))
    entering = max(0, len(columns) - twice) * facts.hidden_size
    return sum(layers.values()) - twice * facts.hidden_size - (entering + outside) * (1 - 1 / sharing)


def of_trained(pieces: Sequence[ModuleMemory], facts: ModelFacts, shape: LocalMicrobatch) -> list[ModuleMemory]:
    """Return the modules of a block that is trained in part: inputs that no trained layer reads are not kept.

    Nor are the normalised values that a frozen norm scales, and the rows that frozen experts read.
    Adapters keep what lies between their factors besides, and DoRA the product that row lengths multiply. Those of
    experts keep the changed stacks, which get a gradient. One packed weight at a time is unpacked.
    """
    if not facts.frozen or not facts.blocks:
        return list(pieces)
    layers = {name: sizes for name, sizes in facts.linears.items() if name.startswith(f"{facts.blocks[-1].name}.")}
    trained = [layers[name] for name in layers if name in facts.adapters or f"{name}.weight" not in facts.frozen]
    inner = (facts.intermediate_size, 2 * facts.intermediate_size)
    read = {
        "query, key, value": any(into == facts.hidden_size and out not in inner for into, out in trained),
        "MLP up": any(out in inner for _, out in trained),
        "MLP down": any(into == facts.intermediate_size for into, _ in trained),
    }
    block = f"{facts.blocks[-1].name}."
    if not facts.experts_copied and _experts_are_frozen(facts, block):
        read |= {"experts up": False, "experts down": False}
    pieces = _without_normalised(pieces, facts, block)
    kept = [piece if read.get(piece.name, True) else replace(piece, saved=0.0) for piece in pieces]
    adapters = [facts.adapters[name] for name in layers if name in facts.adapters]
    low = shape.tokens * shape.bytes * sum(one.rank for one in adapters)  # between the factors
    wide = shape.tokens * shape.bytes * sum(one.outputs / shape.tensor for one in adapters if one.has_magnitude)
    changed = shape.bytes * _changed_stacks(facts, shape)
    unpacked = max((math.prod(layers[name]) for name in layers if f"{name}.weight" in facts.packed), default=0)
    working = changed + shape.bytes * unpacked / shape.tensor
    return [ModuleMemory("adapters", low + wide + changed, low, working), *kept]


def _experts_are_frozen(facts: ModelFacts, block: str) -> bool:
    adapted = any(one.experts for name, one in facts.adapters.items() if name.startswith(block))
    stacks = [name for name in facts.expert_parameters if name.startswith(block)]
    return bool(stacks) and not adapted and all(name in facts.frozen for name in stacks)


def _without_normalised(pieces: Sequence[ModuleMemory], facts: ModelFacts, block: str) -> list[ModuleMemory]:
    """Return the modules of a block without what its norms' weights would need, where these are frozen."""
    shapes = {name: shape for name, shape in facts.base_shapes.items() if name.startswith(block)}
    if any(f"{norm}.weight" not in facts.frozen for norm in _norms(shapes)):
        return list(pieces)
    return [replace(piece, saved=piece.saved - piece.normalised) for piece in pieces]


def _changed_stacks(facts: ModelFacts, shape: LocalMicrobatch) -> float:
    """Return the elements of a block's stacks of experts that adapters change, as they are on a rank."""
    block = f"{facts.blocks[-1].name}."
    stacks = [one for name, one in facts.adapters.items() if one.experts and name.startswith(block)]
    ranks = shape.expert if shape.expert > 1 else shape.tensor
    return sum(one.experts * one.outputs * one.inputs for one in stacks) / ranks


def _rows(facts: ModelFacts, shape: LocalMicrobatch) -> tuple[float, float]:
    """(all tokens, those between regions) of hidden states, in bytes."""
    row = float(shape.tokens * shape.bytes * facts.hidden_size)
    return row, row / shape.tensor if shape.scattered else row


def _moved(row: float, shape: LocalMicrobatch) -> float:
    """Return what a tensor-parallel region's boundary holds while a collective runs: a copy of the hidden states."""
    return row if shape.tensor > 1 else 0.0


def _input_gradients(readers: int, whole: float, shape: LocalMicrobatch) -> float:
    """Return what backward of linears that read one tensor holds: gradients of it, and its whole gathered again.

    Autograd adds the second reader's gradient to the first's: both and their sum. One gradient is summed over ranks.
    """
    regathered = whole if shape.scattered else 0.0
    return max(3 * whole if readers > 1 else 0.0, whole + _moved(whole, shape)) + regathered


def _attention_pieces(facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch) -> list[ModuleMemory]:
    whole, between = _rows(facts, shape)
    heads = facts.attention_width / shape.tensor  # of this rank
    row = shape.tokens * shape.bytes * heads
    key_value = facts.key_value_width * facts.key_value_copies(shape.tensor) / shape.tensor
    qkv = row + 2 * shape.tokens * shape.bytes * key_value
    fused = shape.attention in ("fused", "efficient")
    size, output = _attention_elements(facts, heads, key_value, shape.tensor)
    saved, working = _fused_attention(facts, kind, shape, row, qkv) if fused else _plain_attention(facts, shape, row)
    apart = kind.heads_apart if shape.attention == "fused" else not fused
    per_head = shape.tokens * facts.attention_heads / shape.tensor
    kept = row + per_head * (FP32 if fused else shape.sequence * shape.bytes)  # statistics, or scores
    return [
        _norm("attention norm", between, kind, shape),
        ModuleMemory(
            "query, key, value", between, qkv, _input_gradients(1 if kind.fused_projection else 3, whole, shape), size
        ),
        ModuleMemory("latents", _latents(facts, kind, shape)),
        ModuleMemory("query and key norm", _norm("", (row + qkv) / 2, kind, shape).saved if kind.head_norms else 0.0),
        ModuleMemory("attention", saved, kept, working),
        ModuleMemory("attention output", row if apart else 0.0, whole, whole, output),
        ModuleMemory("attention dropout", _mask(between, shape)),
    ]


def _attention_elements(facts: ModelFacts, heads: float, key_value: float, tensor: int) -> tuple[float, float]:
    """Return a rank's elements of the products ahead of attention and behind it."""
    if not facts.latent:
        return facts.hidden_size * (heads + 2 * key_value), facts.hidden_size * heads
    *made, output = facts.latent.products(facts.hidden_size, max(1, facts.attention_heads // tensor))
    return float(sum(into * out for into, out in made)), float(math.prod(output))


def _latents(facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch) -> float:
    """Return the bytes that are kept of latents, which each tensor rank has whole, and of keys beside those used."""
    if not (latent := facts.latent):
        return 0.0
    number, whole = shape.tokens * shape.bytes, replace(shape, scattered=False)
    norms = [_norm("", float(number * rank), kind, whole).saved for rank in (latent.query, latent.key_value) if rank]
    cut_from = number * latent.plain * facts.attention_heads / shape.tensor
    return sum(norms) + number * (latent.query + latent.key_value) + cut_from


def _fused_attention(
    facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch, row: float, qkv: float
) -> tuple[float, float]:
    """(saved, working): query, key, value, result and statistics; working: the gradients of the first three."""
    rotated = (row + qkv) / 2 if kind.fused_projection and kind.rotary else 0.0
    # One head is repeated without a copy.
    is_one_head = facts.key_value_width * facts.key_value_copies(shape.tensor) <= facts.head_size * shape.tensor
    copied = shape.masked * (3 * row - qkv) if shape.attention == "efficient" and not is_one_head else 0.0
    others = shape.gathered * (qkv - row + copied)
    heads = qkv + copied + others + rotated
    return heads + row + FP32 * shape.tokens * facts.attention_heads / shape.tensor, heads


def _plain_attention(facts: ModelFacts, shape: LocalMicrobatch, row: float) -> tuple[float, float]:
    """(saved, working): copies of query, key and value, and matrices of all scores."""
    scores = shape.tokens * shape.sequence * facts.attention_heads / shape.tensor
    masked = scores * shape.bytes if shape.attention == "math" else scores  # as numbers, or one byte an element
    cast = shape.bytes if shape.bytes < FP32 else 0
    wide = scores * max(FP32, shape.bytes)
    saved = wide + scores * cast + (scores * shape.bytes + masked if shape.dropout else 0)
    others = 2 * row * shape.gathered
    return 3 * row + others + saved, 3 * row + others + 2 * wide


def _mlp_norm(facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch) -> ModuleMemory:
    _, row = _rows(facts, shape)
    norm = _norm("MLP norm", row, kind, shape)
    # Parallel branches read the same residual stream.
    return replace(norm, saved=norm.saved - row) if kind.parallel_residual else norm


def _mlp_pieces(
    facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch, features: int | None = None
) -> list[ModuleMemory]:
    hidden, wide = facts.hidden_size, math.ceil((features or facts.intermediate_size) / shape.tensor)
    (whole, row), inner = _rows(facts, shape), shape.tokens * shape.bytes * wide
    keeps, ups = (3, 2) if kind.gated else (1, 1)
    shares = kind.relu and not kind.gated  # ReLU holds on to its result, which is the next linear's input
    return [
        ModuleMemory("MLP up", row, ups * inner, _input_gradients(ups, whole, shape), ups * hidden * wide),
        ModuleMemory("activation", keeps * inner, 0.0, (2 + kind.gated) * inner),
        ModuleMemory("MLP down", (1 - shares) * inner, whole, inner + _moved(whole, shape), hidden * wide),
    ]


def _expert_pieces(facts: ModelFacts, kind: BlockKind, shape: LocalMicrobatch) -> list[ModuleMemory]:
    is_shared, (whole, row) = shape.expert > 1, _rows(facts, shape)
    sent = facts.experts_of_token * shape.tokens / (shape.tensor if is_shared else 1)
    rows = sent * (shape.imbalance if is_shared else 1)
    wide = kind.expert_features if is_shared else math.ceil(kind.expert_features / shape.tensor)
    inner, back = (float(rows * shape.bytes * wide), float(sent * shape.bytes * facts.hidden_size))
    spread = float(rows * shape.bytes * facts.hidden_size)  # hidden states by expert
    weights = facts.hidden_size * wide * kind.experts / shape.expert
    moved = spread if is_shared else 0.0  # on its way between ranks
    copies = inner * facts.hidden_size if facts.experts_copied else 0.0
    into = 2 * (inner + copies) + spread + moved + whole
    gated = whole if kind.shared_gate else 0.0
    scores = float(FP32 * shape.tokens * kind.experts + INDICES * max(rows, sent))
    shared = _mlp_pieces(facts, kind, shape, kind.shared_features) if kind.shared_features else []
    return [
        ModuleMemory(
            "router",
            (0.0 if shared else row) + scores,
            parameters=kind.experts * facts.hidden_size,
            routes=float(is_shared * ROUTE * max(rows, sent)),
        ),
        ModuleMemory("experts up", spread + 2 * copies, 2 * inner, into, 2 * weights, rows=spread),
        ModuleMemory("expert activation", 3 * inner, 0.0, 3 * inner),
        ModuleMemory("experts down", inner + copies, spread, spread + inner + copies, weights),
        ModuleMemory("sum of experts", back, 0.0, 2 * back + moved + _moved(whole, shape), rows=back),
        *shared,
        ModuleMemory("shared gate", gated, 0.0, 2 * gated),
    ]


def _norm(name: str, row: float, kind: BlockKind, shape: LocalMicrobatch) -> ModuleMemory:
    """Layer norm: input and two fp32 statistics. RMS norm: input in fp32, and the normalised values."""
    tokens = shape.tokens / shape.tensor if shape.scattered else shape.tokens
    if kind.rms_norm:
        wide = row * 4 / min(shape.bytes, 4)
        return ModuleMemory(name, wide + row + 4 * tokens, 0.0, 3 * wide, normalised=row)
    return ModuleMemory(name, row + 8 * tokens, 0.0, row)


def _mask(row: float, shape: LocalMicrobatch) -> float:
    return row / shape.bytes if shape.dropout else 0.0


def _norms(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Modules with a one-dim weight."""
    return [key.rpartition(".")[0] for key, shape in shapes.items() if key.endswith("weight") and len(shape) == 1]


def _has_norm_bias(shapes: dict[str, tuple[int, ...]]) -> bool:
    return any(f"{norm}.bias" in shapes for norm in _norms(shapes))


def _norm_sizes(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shapes[f"{norm}.weight"] for norm in _norms(shapes)]


def saved_bytes(pieces: Sequence[ModuleMemory]) -> float:
    """Return all that a block keeps without checkpointing."""
    return sum(piece.saved for piece in pieces)


def kept_bytes(pieces: Sequence[ModuleMemory]) -> float:
    """Return the outputs of matrix products and attention, which selective checkpointing keeps."""
    return sum(piece.kept for piece in pieces)


def exchanged_bytes(pieces: Sequence[ModuleMemory], with_rows: bool) -> float:
    """Return what a checkpointed block keeps of its shared experts: routes, and the rows that they get and give."""
    return sum(piece.routes + with_rows * piece.rows for piece in pieces)


def backward_peak(pieces: Sequence[ModuleMemory], gradient_bytes: int) -> tuple[float, float]:
    """(activations and temporaries, weight gradients) at the worst moment of a block's backward.

    Modules run backwards; a module's saved tensors are freed behind it and its weight gradients stay.
    """
    worst, gradients = (0.0, 0.0), 0.0
    saved = saved_bytes(pieces)
    for piece in reversed(pieces):
        gradients += piece.parameters * gradient_bytes
        moment = (saved + piece.working, gradients)
        worst = max(worst, moment, key=sum)
        saved -= piece.saved
    return worst
