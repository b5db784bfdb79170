"""The ways in which tensor parallelism splits a module, and the rule by which a size is cut into parts. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

LINEAR_KINDS = ("column", "row", "gathered")  # kinds of split linear layers


@dataclass(frozen=True)
class TensorSplit:
    """The way in which tensor parallelism treats a module.

    Attributes:
        kind: a linear module is split by `column` (output features) or `row` (input features); a `partial` one is whole
            but sees only a part of the activations, so the gradients of its parameters are summed; an `inner` one is
            dropout of activations that exist in parts, between a column and the row module beside it; `experts` are
            stacks of MLPs, each of which is split by its inner features; a `gathered` linear is split by output
            features as a `column` one is, and its ranks' outputs are put together at once, so that nothing else is cut;
            a `mixer` is a region of states, and its own parameters and those of `channels` modules in it are cut along
            their first dim: by heads, or by channels.
        dim: of the weight.
        sections: fused projections that lie side by side along `dim`, each of which is split.
        sizes: theirs, where they differ.
        shared: features of the one key head, and of the one value head, that lie behind the queries of each group and
            serve all of them; ranks that share a group each make a part of both, and the parts are gathered. Of a
            mixer, features of what writes the states of a group of heads, and of what reads them.
        groups: of queries with the key and the value head that `shared` speaks of, one after the other; of heads of a
            mixer.
        behind: sections of `sizes` behind the two that `shared` speaks of.
        heads: of a mixer, or its channels where each is by itself.
        alone: a column module whose parent also works on whole activations.
        inside: a row module whose sum all ranks go on with inside of the region.
        key_value: a column module of key or value heads alone; of fewer heads than ranks each is held by several.
        grouped: experts that transformers' grouped products compute, which read rows of a multiple of 16 bytes.
    """

    kind: str
    dim: int = 0
    sections: int = 1
    sizes: tuple[int, ...] = ()
    shared: int = 0
    groups: int = 1
    behind: int = 0
    heads: int = 0
    alone: bool = False
    inside: bool = False
    key_value: bool = False
    grouped: bool = False

    def of(self, leaf: str) -> TensorSplit | None:
        """Return how a parameter of the module is split; None where it is whole, as the bias of a row module is."""
        if self.kind == "experts":
            return EXPERTS.get(leaf)
        if self.kind in ("mixer", "channels") or (leaf == "weight" and self.kind in LINEAR_KINDS):
            return self
        return replace(self, dim=0) if leaf == "bias" and self.by_outputs else None

    @property
    def by_outputs(self) -> bool:
        """True where each rank makes a part of the output features."""
        return self.kind in ("column", "gathered")

    def shares_groups(self, degree: int) -> bool:
        """Tell whether one of `degree` ranks holds a part of a group, and not whole ones."""
        return self.shared > 0 and self.groups % degree > 0

    def shares_heads(self, degree: int) -> bool:
        """Tell whether each of `degree` ranks can have as many heads of a mixer, of whole groups or of one."""
        if self.heads % degree:
            return False
        return self.groups % degree == 0 or (degree % self.groups == 0 and self.shared % (degree // self.groups) == 0)

    def own_slices(self, size: int, degree: int, index: int) -> list[slice]:
        """Return what one of `degree` ranks has along a `dim` of a mixer's, what its group shares included."""
        slices, first, sections = [], 0, self.along(size, degree)[0]
        end = len(sections) - self.behind
        in_common = range(end - 2, end) if self.sizes and self.shares_groups(degree) else range(0)
        for number, section in enumerate(sections):
            part = chunk(section, degree, index)
            if number in in_common:
                part = chunk(section, self.groups, index * self.groups // degree)
            slices.append(slice(first + part.start, first + part.stop))
            first += section
        return slices

    def along(self, size: int, degree: int) -> tuple[tuple[int, ...], int]:
        """Return (sizes of the projections along a `dim` of `size`, groups of ranks that share them in turn)."""
        if self.sizes or self.kind == "mixer":
            return self.sizes or (size,), 1
        if self.shares_groups(degree):
            queries = size // self.groups - 2 * self.shared
            return (queries, self.shared, self.shared) * self.groups, self.groups
        return (size // self.sections,) * self.sections, 1


# Stacks [experts, (gate, up), hidden] and [experts, hidden, inner features]: their parameters by name.
EXPERTS = {"gate_up_proj": TensorSplit("column", dim=1, sections=2), "down_proj": TensorSplit("row", dim=2)}


def chunk(size: int, degree: int, index: int) -> slice:
    """Return part `index` of `size` in chunks of ceil(size / degree), the last short or empty (torch.chunk's rule)."""
    most = -(-size // degree)
    return slice(min(index * most, size), min((index + 1) * most, size))


def chunks(sections: tuple[int, ...], degree: int, index: int, groups: int = 1) -> list[slice]:
    """Return part `index` of each of the `sections`; several groups of ranks have as many sections each, alone."""
    ranks, count = degree // groups, len(sections) // groups
    of_group = range(index // ranks * count, (index // ranks + 1) * count)
    return [chunk(size, ranks, index % ranks) if n in of_group else slice(0, 0) for n, size in enumerate(sections)]
