"""What autograd keeps of one transformer block between its forward and its backward, counted module by module.

For T tokens of a microbatch, hidden size H, key and value width K, intermediate size I and c bytes a number, autograd
saves, each tensor once however many operators need it:

- norm: its input [T, H]. An RMS norm as transformers writes it computes in fp32, so it keeps the input in fp32 and the
  normalised values besides; a layer norm keeps two statistics a token. The input of a pre-norm is the residual stream,
  which two parallel branches (GPT-NeoX) share. A post-norm (BERT) saves the same amount, of sums instead of inputs.
  Norms of query and key (Qwen3) are two more.
- linear: its input, [T, H] or [T, I]; linears that read the same tensor (query, key, value) share it. Outputs are not
  saved by the linear itself.
- attention (fused): query [T, H], key and value [T, K] each, its result [T, H] and one fp32 number a token and head.
  Where query, key and value are slices of one projection, any one of them keeps the whole projection alive; with rotary
  positions query and key are new tensors beside it. Where heads lie apart in the result, putting them together for the
  output projection is a copy (GPT-NeoX concatenates rotated and unrotated parts head by head).
- attention that is not fused: query, key and value each [T, H] laid out for batched products, and the probabilities
  [B, heads, S, S]; with dropout also the mask and what is left of them. The result is not kept, but its copy with heads
  side by side is, as the output projection's input. SDPA on a CPU does not fuse with dropout.
- activation function: GELU or SiLU its input [T, I]; ReLU nothing of its own, since its result is the next linear's
  input; the tanh formula of GPT-2 (`gelu_new`) four intermediate results. A gated MLP keeps gate, its activation, and
  the other factor.
- dropout by mask: one byte an element.

Of t tensor ranks each has 1/t of the heads and of I. The residual stream, norms, masks and what linears read of it stay
[T, H], or with sequence parallelism become [T/t, H] (arXiv 2205.05198, equation 4).

`working` is what the worst moment of a module's backward holds besides: gradients of its input and output, before they
are added to the gradient of the residual stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.families.facts import ModelFacts

# Tensors of [T, I] that the activation function keeps, where transformers' default of the family is not GELU or SiLU.
_ACTIVATION_KEEPS = {"gpt2": 4, "gpt_neo": 4, "gptj": 4, "codegen": 4, "phi": 4, "opt": 0}
_PARALLEL_RESIDUAL = frozenset({"gpt_neox", "gptj", "phi", "falcon", "codegen", "cohere"})
_HEADS_APART = frozenset({"gpt_neox", "phi", "gptj", "codegen", "stablelm"})


@dataclass(frozen=True)
class BlockKind:
    """What decides how much a block keeps. `of` reads it off parameter shapes, and off the family what they hide."""

    rms_norm: bool = False
    fused_projection: bool = False
    head_norms: bool = False  # query and key pass a norm of their own
    rotary: bool = False
    gated: bool = False
    activation_keeps: int = 1
    parallel_residual: bool = False
    heads_apart: bool = False

    @classmethod
    def of(cls, facts: ModelFacts) -> BlockKind:
        """The kind of the model's first block."""
        name = f"{facts.blocks[0].name}." if facts.blocks else ""
        shapes = {key: shape for key, shape in facts.parameter_shapes.items() if name and key.startswith(name)}
        hidden = facts.hidden_size
        matrices = Counter(tuple(sorted(shape)) for shape in shapes.values() if len(shape) == 2)
        projection, mlp = (tuple(sorted((hidden, n))) for n in (_projection_width(facts), facts.intermediate_size))
        # Separate projections are at least two square matrices, query and output; a fused one leaves the output alone.
        fused = matrices[projection] > 0 and matrices[hidden, hidden] < 2
        return cls(
            rms_norm=bool(shapes) and not _has_norm_bias(shapes),
            fused_projection=fused,
            head_norms=_norm_sizes(shapes).count((key_value_width(facts) // max(1, facts.key_value_heads),)) >= 2,
            rotary=any(buffer.endswith("inv_freq") for buffer in facts.buffers),
            gated=matrices[mlp] - (fused and projection == mlp) >= 3,
            activation_keeps=_ACTIVATION_KEEPS.get(facts.family, 1),
            parallel_residual=facts.family in _PARALLEL_RESIDUAL,
            heads_apart=facts.family in _HEADS_APART,
        )


Attention = Literal["fused", "eager", "math"]  # math: SDPA that could not fuse


@dataclass(frozen=True)
class Shape:
    """One microbatch on one rank, in numbers."""

    tokens: int
    sequence: int
    bytes: int  # of a number in the compute dtype
    attention: Attention = "fused"
    dropout: bool = False  # masks are kept
    gathered: float = 0.0  # bytes of other ranks' keys and values, and of the mask over them
    tensor: int = 1  # ranks that share heads and inner features
    scattered: bool = False  # and the tokens between them


@dataclass(frozen=True)
class Piece:
    """A module of a block, in bytes and elements.

    saved: kept from forward to backward. kept: what selective checkpointing keeps of its outputs. working: held besides
    at the worst moment of its backward. parameters: elements whose gradients exist once its backward is done.
    """

    name: str
    saved: float = 0.0
    kept: float = 0.0
    working: float = 0.0
    parameters: float = 0.0


def key_value_width(facts: ModelFacts) -> int:
    """K: key-value heads times the size of a head."""
    return facts.hidden_size * facts.key_value_heads // facts.attention_heads if facts.attention_heads else 0


def _projection_width(facts: ModelFacts) -> int:
    return facts.hidden_size + 2 * key_value_width(facts)


def block_pieces(facts: ModelFacts, kind: BlockKind, shape: Shape) -> list[Piece]:
    """The modules of one block in the order of its forward."""
    attention = _attention_pieces(facts, kind, shape)
    mlp = _mlp_pieces(facts, kind, shape)
    return [*attention, *mlp]


def _rows(facts: ModelFacts, shape: Shape) -> tuple[float, float]:
    """(all tokens, those between regions) of hidden states, in bytes."""
    row = float(shape.tokens * shape.bytes * facts.hidden_size)
    return row, row / shape.tensor if shape.scattered else row


def _moved(row: float, shape: Shape) -> float:
    """What the border of a region holds while a sum or a gathering runs: a copy of the hidden states."""
    return row if shape.tensor > 1 else 0.0


def _attention_pieces(facts: ModelFacts, kind: BlockKind, shape: Shape) -> list[Piece]:
    whole, between = _rows(facts, shape)
    row = whole / shape.tensor  # this rank's heads
    key_value = key_value_width(facts) * facts.key_value_copies(shape.tensor) / shape.tensor
    qkv = row + 2 * shape.tokens * shape.bytes * key_value
    fused = shape.attention == "fused"
    size = facts.hidden_size**2 / shape.tensor + 2 * facts.hidden_size * key_value
    saved, working = _fused_attention(facts, kind, shape, row, qkv) if fused else _plain_attention(facts, shape, row)
    output = facts.hidden_size**2 / shape.tensor
    return [
        _norm("attention norm", between, kind, shape),
        Piece("query, key, value", between, qkv, whole + _moved(whole, shape), size),
        Piece("query and key norm", _norm("", (row + qkv) / 2, kind, shape).saved if kind.head_norms else 0.0),
        Piece("attention", saved + shape.gathered, row if fused else 0.0, working),
        Piece("attention output", row if kind.heads_apart or not fused else 0.0, whole, whole, output),
        Piece("attention dropout", _mask(between, shape)),
    ]


def _fused_attention(facts: ModelFacts, kind: BlockKind, shape: Shape, row: float, qkv: float) -> tuple[float, float]:
    """(saved, working): query, key, value, result and statistics; working: the gradients of the first three."""
    rotated = (row + qkv) / 2 if kind.fused_projection and kind.rotary else 0.0
    return qkv + rotated + row + 4 * shape.tokens * facts.attention_heads / shape.tensor, qkv + rotated


def _plain_attention(facts: ModelFacts, shape: Shape, row: float) -> tuple[float, float]:
    """(saved, working): copies of query, key and value, and matrices of all scores."""
    scores = shape.tokens * shape.sequence * facts.attention_heads / shape.tensor
    masked = scores * shape.bytes if shape.attention == "math" else scores  # as numbers, or one byte an element
    saved = scores * shape.bytes + (scores * shape.bytes + masked if shape.dropout else 0)
    return 3 * row + saved, 3 * row + 2 * scores * shape.bytes


def _mlp_pieces(facts: ModelFacts, kind: BlockKind, shape: Shape) -> list[Piece]:
    hidden, wide = facts.hidden_size, math.ceil(facts.intermediate_size / shape.tensor)
    (whole, row), inner = _rows(facts, shape), shape.tokens * shape.bytes * wide
    keeps, ups = (3, 2) if kind.gated else (kind.activation_keeps, 1)
    shares = keeps == 0  # ReLU holds on to its result, which is the next linear's input
    norm = _norm("MLP norm", row, kind, shape)
    if kind.parallel_residual:  # the branches read the same residual stream
        norm = Piece(norm.name, norm.saved - row, 0.0, norm.working, norm.parameters)
    return [
        norm,
        Piece("MLP up", row, ups * inner, whole + _moved(whole, shape), ups * hidden * wide),
        Piece("activation", (keeps + shares) * inner, 0.0, (2 + (keeps > 1)) * inner),
        Piece("MLP down", (1 - shares) * inner, whole, inner + _moved(whole, shape), hidden * wide),
        Piece("MLP dropout", _mask(row, shape)),
    ]


def _norm(name: str, row: float, kind: BlockKind, shape: Shape) -> Piece:
    """Layer norm: input and two fp32 statistics. RMS norm: input in fp32, and the normalised values."""
    tokens = shape.tokens / shape.tensor if shape.scattered else shape.tokens
    if kind.rms_norm:
        wide = row * 4 / min(shape.bytes, 4)
        return Piece(name, wide + row + 4 * tokens, 0.0, 3 * wide)
    return Piece(name, row + 8 * tokens, 0.0, row)


def _mask(row: float, shape: Shape) -> float:
    return row / shape.bytes if shape.dropout else 0.0


def _norms(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Modules with a one-dim weight."""
    return [key.rpartition(".")[0] for key, shape in shapes.items() if key.endswith("weight") and len(shape) == 1]


def _has_norm_bias(shapes: dict[str, tuple[int, ...]]) -> bool:
    return any(f"{norm}.bias" in shapes for norm in _norms(shapes))


def _norm_sizes(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shapes[f"{norm}.weight"] for norm in _norms(shapes)]


def saved_bytes(pieces: Sequence[Piece]) -> float:
    """All that a block keeps without checkpointing."""
    return sum(piece.saved for piece in pieces)


def kept_bytes(pieces: Sequence[Piece]) -> float:
    """Outputs of matrix products and attention, which selective checkpointing keeps."""
    return sum(piece.kept for piece in pieces)


def backward_peak(pieces: Sequence[Piece], gradient_bytes: int) -> tuple[float, float]:
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
