"""The parameters of a pipeline rank as FSDP2 gathers them: units of blocks and the root, and the size of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.model.packed_weights import packed_bytes
from shardwise.plan.draft import group_size
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.shapes import expert_shards, local_shapes


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        whole, shard: elements, padded; of all ranks and of one. Packed weights count in `whole` as elements of the
            compute dtype that take their bytes.
        blocks: that are in it.
        trained, trained_shard: the same as the first two, of parameters that have gradients.
        last: elements of the last tensor that has one.
        alone: elements that have one and are on this rank alone, which FSDP2 leaves: in the shards, not in the whole.
        experts, trained_experts: of `whole` and of `trained`, experts that ranks share. FSDP2 gathers them for
            themselves, when it comes to them.
    """

    whole: float
    shard: float
    blocks: int
    trained: float
    trained_shard: float
    last: float
    alone: float
    experts: float = 0.0
    trained_experts: float = 0.0


class RankUnits:
    """The units of one pipeline rank; numbers of the compute dtype have `compute` bytes."""

    def __init__(self, plan: Plan, facts: ModelFacts, pipeline: int, compute: int) -> None:
        self.plan, self.facts, self.pipeline, self.compute = plan, facts, pipeline, compute

    @cached_property
    def of_blocks(self) -> list[Unit]:
        """The groups of blocks that are one unit of FSDP2, in forward order."""
        return [self._unit(names) for part in self.groups for names in part]

    @cached_property
    def root(self) -> Unit:
        """Everything outside of the blocks."""
        return self._sized(self.shapes[None], 0)

    @cached_property
    def groups(self) -> list[list[tuple[str, ...]]]:
        """The names of each unit's blocks, stage by stage."""
        whole = tuple(block.name for block in self.facts.blocks)
        strategy, groups = self.plan.job.memory.checkpoint_strategy, []
        for names in [self.plan.stages[stage] for stage in self.plan.stages_of(self.pipeline)] or [whole]:
            size = len(names) if strategy == "contiguous" else group_size(strategy) or 1
            groups.append([names[start : start + size] for start in range(0, len(names), max(1, size))])
        return groups

    @cached_property
    def shapes(self) -> dict[str | None, dict[str, tuple[int, ...]]]:
        """The shapes of each block's parameters on this rank, by name; under None, of those outside of the blocks.

        Stages of a traced forward, which calls no block, are one unit.
        """
        shapes: dict[str | None, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name, shape in local_shapes(self.facts, self.plan, pipeline=self.pipeline).items():
            shapes[None if self.facts.stages.traced else self.facts.block_of.get(name)][name] = shape
        return shapes

    @cached_property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters on this rank, by name."""
        return {name: shape for of_block in self.shapes.values() for name, shape in of_block.items()}

    def padded(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, float]:
        """Return (elements of one rank, elements of all ranks that shard them, packed ones by their bytes)."""
        shard, whole = 0, 0.0
        for name, shape in shapes.items():
            size = math.prod(self.part(name, shape))
            shard += size
            whole += 0 if self._is_alone(name) else size * self._shards(name) * self._packing(name)
        return shard, whole

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what one of the ranks that shard a parameter has of it, padded."""
        return (math.ceil(shape[0] / self._shards(name)), *shape[1:]) if shape else shape

    def _unit(self, names: Sequence[str]) -> Unit:
        return self._sized({key: shape for name in names for key, shape in self.shapes[name].items()}, len(names))

    def _sized(self, shapes: Mapping[str, tuple[int, ...]], blocks: int) -> Unit:
        """Each tensor's dim 0 is padded to a multiple of the shard ranks."""
        trained = {name: shape for name, shape in shapes.items() if name not in self.facts.frozen}
        last = math.prod(list(trained.values())[-1]) if trained else 0
        (shard, whole), (trained_shard, trained_whole) = self.padded(shapes), self.padded(trained)
        alone = sum(math.prod(shape) for name, shape in trained.items() if self._is_alone(name))
        experts = (self.padded({name: of[name] for name in of if self._is_shared(name)})[1] for of in (shapes, trained))
        return Unit(whole, shard, blocks, trained_whole, trained_shard, last, alone, *experts)

    def _is_alone(self, name: str) -> bool:
        return self.plan.leaves_experts and name in self.facts.expert_parameters

    def _is_shared(self, name: str) -> bool:
        return self.plan.degrees[Axis.EXPERT] > 1 and name in self.facts.expert_parameters

    def _shards(self, name: str) -> int:
        return expert_shards(self.plan) if self._is_shared(name) else self.plan.state_ranks

    def _packing(self, name: str) -> float:
        """Return the bytes of a packed weight's elements as a share of those in the compute dtype; else 1."""
        form = self.facts.packed.get(name)
        return 1 if form is None else packed_bytes(form) / self.compute
