"""Matrices of a model as Muon takes them: hidden weights, each projection and each expert by itself. Plain data.

A projection that is fused with others is a matrix of its own, however its rows lie in the parameter, and so is each
expert of a stack. This follows from the model alone, so that it is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardwise.model.adapters import LORA_A, LORA_B
from shardwise.model.facts import ModelFacts
from shardwise.model.tensor_split import LINEAR_KINDS

Parts = tuple[slice, ...]


class Place(NamedTuple):
    """A box of a matrix, (rows, columns), and the box of a tensor that holds it."""

    inside: tuple[slice, slice]
    local: tuple[slice, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix within a parameter.

    Attributes:
        shape: rows and columns.
        parts: what of the parameter's `dim` belongs to it, in order.
        dim: 0 or 1 of the matrix, along which the parts lie.
        expert: of a stack [experts, rows, columns]; None for a parameter of two dims.
    """

    shape: tuple[int, int]
    parts: Parts
    dim: int = 0
    expert: int | None = None

    @property
    def larger(self) -> int:
        """The larger of both dims; the first if they are equal."""
        return int(self.shape[1] > self.shape[0])

    @property
    def work(self) -> float:
        """FLOPs of one Newton-Schulz iteration: 4 k^2 l + 2 k^3 of k x l, k the smaller."""
        small, large = sorted(self.shape)
        return 4.0 * small**2 * large + 2.0 * small**3

    def places(self, logical: tuple[slice, ...], local: tuple[slice, ...]) -> list[Place]:
        """Return what a region of the parameter holds of the matrix; `local` is where the region lies in a tensor."""
        inner, boxes = list(logical), list(local)
        head: tuple[slice, ...] = ()
        if self.expert is not None:
            stack, first = inner.pop(0), boxes.pop(0).start
            if not stack.start <= self.expert < stack.stop:
                return []
            at = first + self.expert - stack.start
            head = (slice(at, at + 1),)
        places, offset = [], 0
        for part in self.parts:
            start, stop = max(part.start, inner[self.dim].start), min(part.stop, inner[self.dim].stop)
            inside, own = [inner[0], inner[1]], [boxes[0], boxes[1]]
            inside[self.dim] = slice(offset + start - part.start, offset + stop - part.start)
            shift = boxes[self.dim].start - inner[self.dim].start
            own[self.dim] = slice(start + shift, stop + shift)
            if start < stop and all(box.start < box.stop for box in inside):
                places.append(Place((inside[0], inside[1]), (*head, *own)))
            offset += part.stop - part.start
        return places


def is_hidden_matrix(facts: ModelFacts, name: str) -> bool:
    """Tell whether a parameter is a hidden weight: of a linear layer of a block, of experts, or of an adapter there.

    Embeddings, heads, norms, biases, routers and vectors are not.
    """
    shape, (module, _, leaf) = facts.parameter_shapes[name], name.rpartition(".")
    if min(shape[-2:], default=0) < 2:
        return False
    if len(shape) == 3:
        return name in facts.expert_parameters
    is_adapter = module.rpartition(".")[2] in (LORA_A, LORA_B)
    is_router = any(module == router for router, _ in facts.routers.values())
    split = facts.tensor_splits.get(module)  # of a class of its own, such as Falcon's linear layers
    is_plain = module in facts.linears or module in facts.read_linears
    is_linear = is_plain or (split is not None and split.kind in LINEAR_KINDS)
    return len(shape) == 2 and leaf == "weight" and (is_adapter or (is_linear and not is_router))


def can_be_matrices(facts: ModelFacts, name: str) -> bool:
    """Tell whether Muon can take a parameter: it has two dims, or is a stack of experts."""
    dims = len(facts.parameter_shapes[name])
    return dims == 2 or (dims == 3 and name in facts.expert_parameters)


def matrices_of(facts: ModelFacts, name: str) -> list[Matrix]:
    """Return the matrices of a parameter: all of it, or each projection that is fused in it, of each expert."""
    shape, module = facts.parameter_shapes[name], name.rpartition(".")[0]
    if len(shape) == 3:
        stack = (shape[1], shape[2])
        projections = _halves(shape[1]) if _has_gate_and_up(facts, name) else [(slice(0, shape[1]),)]
        return [_matrix(stack, parts, 0, expert) for expert in range(shape[0]) for parts in projections]
    dim = int(module in facts.transposed_linears)
    return [_matrix((shape[0], shape[1]), parts, dim) for parts in _projections(facts, name, shape[dim])]


def _matrix(whole: tuple[int, int], parts: Parts, dim: int, expert: int | None = None) -> Matrix:
    size = sum(part.stop - part.start for part in parts)
    return Matrix((size, whole[1]) if dim == 0 else (whole[0], size), parts, dim, expert)


def _has_gate_and_up(facts: ModelFacts, name: str) -> bool:
    """Tell whether a stack of experts has gates above what they gate, [experts, 2 * inner, hidden]."""
    module, _, leaf = name.rpartition(".")
    experts, fused, hidden = facts.parameter_shapes[name]
    down = facts.parameter_shapes.get(f"{module}.down_proj")
    return leaf == "gate_up_proj" and fused % 2 == 0 and down == (experts, hidden, fused // 2)


def _halves(size: int) -> list[Parts]:
    return [(slice(0, size // 2),), (slice(size // 2, size),)]


def _projections(facts: ModelFacts, name: str, size: int) -> list[Parts]:
    """Return the rows of each projection that is fused in a weight; all rows where none is known to be."""
    module, _, leaf = name.rpartition(".")
    layout = FUSED.get(module.rpartition(".")[2]) if leaf == "weight" else None
    projections = layout(facts, size) if layout is not None else []
    return projections or [(slice(0, size),)]


def _side_by_side(facts: ModelFacts, size: int) -> list[Parts]:
    """Queries, keys and values one after the other."""
    parts = facts.block_traits.projection_parts
    if parts > 1:
        return _in_parts(size, parts)
    sizes = (facts.attention_width, facts.key_value_width, facts.key_value_width)
    return [(slice(*bounds),) for bounds in pairwise((0, *accumulate(sizes)))] if sum(sizes) == size else []


def _in_parts(size: int, parts: int) -> list[Parts]:
    """So many times queries, values and keys."""
    bounds = [size * place // (3 * parts) for place in range(3 * parts + 1)]
    return [tuple(slice(bounds[at], bounds[at + 1]) for at in range(kind, 3 * parts, 3)) for kind in range(3)]


def _by_group(facts: ModelFacts, size: int) -> list[Parts]:
    """Each group of query heads with the key and the value head that serve it."""
    heads, groups = facts.attention_heads, facts.key_value_heads
    if not groups or heads % groups or size % (heads + 2 * groups):
        return []
    head = size // (heads + 2 * groups)
    queries, of_group = heads // groups * head, (heads // groups + 2) * head
    starts = [of_group * group for group in range(groups)]
    return [
        tuple(slice(start, start + queries) for start in starts),
        tuple(slice(start + queries, start + queries + head) for start in starts),
        tuple(slice(start + queries + head, start + of_group) for start in starts),
    ]


def _gate_and_up(facts: ModelFacts, size: int) -> list[Parts]:
    return _halves(size)


# Names of modules in which transformers' models fuse projections, and how these lie in the weight's outputs.
FUSED: dict[str, Callable[[ModelFacts, int], list[Parts]]] = {
    "c_attn": _side_by_side,
    "qkv_proj": _side_by_side,
    "Wqkv": _side_by_side,
    "query_key_value": _by_group,
    "gate_up_proj": _gate_and_up,
}
