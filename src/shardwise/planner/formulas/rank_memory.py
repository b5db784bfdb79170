"""Estimates what a pipeline rank holds at any moment of a step, and what its blocks keep; `memory` has the moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from shardwise.job.axes import Axis
from shardwise.job.devices import CPU
from shardwise.model.facts import ModelFacts
from shardwise.plan.optimizer_offload import offloaded_parameters
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.activations import (
    FP32,
    Attention,
    BlockKind,
    LocalMicrobatch,
    ModuleMemory,
    backward_peak,
    exchanged_bytes,
    kept_bytes,
    modules_of_block,
    of_trained,
    saved_bytes,
    waiting_features,
)
from shardwise.planner.formulas.in_flight import InFlight, in_flight_of, without_stages
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.shapes import optimizer_state_bytes, stored_bytes
from shardwise.planner.formulas.units import RankUnits, Unit

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class RankMemory:
    """The formulas of one plan and model on a pipeline rank, which no moment changes."""

    def __init__(self, plan: Plan, facts: ModelFacts, kind: BlockKind, pipeline: int, imbalance: float) -> None:
        self.plan, self.facts, self.kind, self.pipeline = plan, facts, kind, pipeline
        self.imbalance = imbalance
        self.stages = plan.stages_of(pipeline)  # none without a pipeline
        self.job = plan.job
        self.master, self.compute = BYTES[plan.dtypes.parameters], BYTES[plan.dtypes.compute]
        self.sizes = RankUnits(plan, facts, pipeline, self.compute)
        self.reduction, self.loss = BYTES[plan.dtypes.reduction], BYTES[plan.dtypes.loss]
        self.ranks = plan.state_ranks
        self.fsdp = plan.needs_fsdp
        self.keeps_gathered = plan.holds_whole or not plan.job.parallel.reshard_after_forward
        self.on_accelerator = plan.world.device_type != CPU
        self.length = facts.positions(plan.sequence_length)
        self.positions = plan.positions_of(self.length)
        self.tokens = plan.microbatch * self.positions
        self.row = self.tokens * facts.hidden_size * self.compute  # one hidden state
        self.context, self.tensor = plan.degrees[Axis.CONTEXT], plan.degrees[Axis.TENSOR]
        self.between = self.row / self.tensor if plan.sequence_parallel else self.row  # and between regions

    @property
    def units(self) -> list[Unit]:
        return self.sizes.of_blocks

    @property
    def root(self) -> Unit:
        return self.sizes.root

    @cached_property
    def head(self) -> float:
        """Elements of the output projection, whose gradient is the first to exist; 0 where it has none."""
        names = next((names for names in self.facts.ties if f"{self.facts.head}.weight" in names), None)
        is_frozen = (names[0] if names else f"{self.facts.head}.weight") in self.facts.frozen
        return self.vocabulary * self.facts.hidden_size if self.has_head and not is_frozen else 0.0

    @property
    def has_embedding(self) -> bool:
        return not self.stages or self.stages[0] == 0

    @property
    def has_head(self) -> bool:
        return not self.stages or self.stages[-1] == len(self.plan.stages) - 1

    @cached_property
    def in_flight(self) -> list[InFlight]:
        """Tasks of the rank: of those of one part that find the same parts done, the fullest."""
        candidates = list(without_stages(self.plan.accumulation > 1))
        if self.stages:
            ranks, schedule = self.plan.degrees[Axis.PIPELINE], self.job.parallel.pipeline
            orders = [
                in_flight_of(self.pipeline, ranks, len(self.stages), count, schedule)
                for count in dict.fromkeys(self.plan.accumulations)
            ]
            candidates = [in_flight for order in orders for in_flight in order]
        most: dict[object, InFlight] = {}
        for in_flight in candidates:
            key = (in_flight._replace(forwards=(), weights=()), self._reduces(in_flight))
            most[key] = max(most.get(key, in_flight), in_flight, key=self._others)
        return list(most.values())

    @property
    def at_end(self) -> InFlight:
        """The end of a step, when all backwards are done."""
        parts = len(self.sizes.groups)
        return InFlight(0, True, (0,) * parts, (0,) * parts, (self.plan.accumulation > 1,) * parts)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output projection on this rank."""
        shared = self.plan.chunked_loss and self.facts.vocabulary_parameters
        return math.ceil(self.facts.vocabulary_size / self.tensor) if shared else self.facts.vocabulary_size

    @cached_property
    def shard(self) -> float:
        """Elements of the whole model on this rank."""
        return self.root.shard + sum(unit.shard for unit in self.units)

    @cached_property
    def parameter_bytes(self) -> float:
        """Bytes of the parameters on this rank; frozen ones may be kept in a dtype of their own, or packed."""
        shapes, facts, master = self.sizes.all_shapes.items(), self.facts, self.master
        return sum(self.sizes.padded({name: shape})[0] * stored_bytes(facts, name, master) for name, shape in shapes)

    @cached_property
    def trained(self) -> float:
        """Elements on this rank that have a gradient and optimizer state."""
        return self.root.trained_shard + sum(unit.trained_shard for unit in self.units)

    @cached_property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state on this rank."""
        shapes = self.sizes.all_shapes
        trained = {
            name: self.sizes.part(name, shape) for name, shape in shapes.items() if name not in self.facts.frozen
        }
        return optimizer_state_bytes(self.plan, self.facts, trained)

    # --- what is held all the time

    def base(
        self, moment: str, in_flight: InFlight, behind: Sequence[int] = (), reduces: bool = True
    ) -> MemoryEstimate:
        """Parameters, optimizer state, what is `in_flight`, and gradients of the units that backward has left `behind`:
        their shards, if it `reduces` them; those of earlier microbatches."""
        done, partial = self._sharded_gradients(in_flight, behind if reduces else ())
        state = MemoryEstimate(
            moment,
            parameters=self.parameter_bytes,
            gradients=done * self.master,
            optimizer=self.optimizer_bytes,
            gathered=self.root.whole * self.compute if self.fsdp else 0.0,
            unsharded_gradients=self._heads(in_flight) + self._unreduced(in_flight, behind),
            activations=self._always(in_flight),
            reference=self.parameter_bytes * (self.plan.reference == "copy"),
            ema=self.trained * self.master * (self.job.training.ema_decay is not None),
        )
        away, copies = self._host_updates
        if not self.on_accelerator:
            return replace(state, optimizer=state.optimizer + copies, gradients=state.gradients + partial)
        state = replace(state, host=self._pool + away + copies, optimizer=state.optimizer - away)
        if not self.job.memory.offload_parameters:
            return replace(state, gradients=state.gradients + partial)
        moved = state.parameters + state.gradients + state.optimizer + state.reference + state.ema
        host = state.host + moved
        return replace(state, parameters=0.0, gradients=partial, optimizer=0.0, reference=0.0, ema=0.0, host=host)

    @property
    def _has_replicas(self) -> bool:
        return self.fsdp and self.plan.degrees[Axis.REPLICA] > 1

    @cached_property
    def _host_updates(self) -> tuple[float, float]:
        """Bytes of optimizer state in host memory, and of the copies beside it (training/host_updates.py)."""
        shapes = self.sizes.all_shapes
        names = [name for name in self.facts.parameter_shapes if name in shapes]
        chosen = offloaded_parameters(self.facts, names, float(self.job.memory.offload_optimizer))
        parts = {name: self.sizes.part(name, shapes[name]) for name in chosen}
        state = optimizer_state_bytes(self.plan, self.facts, parts)
        weights = self.master * sum(map(math.prod, parts.values()))
        return state, 2 * weights + state * self.plan.updates_in_backward

    @property
    def _waits(self) -> bool:
        """Return whether gradients are reduced once a step, at its end."""
        return self.plan.holds_whole and self.plan.accumulation > 1

    @property
    def _adds_whole(self) -> bool:
        """Return whether the gradients of several microbatches are added up before they are reduced, as shards are."""
        return self.plan.adds_whole and self.plan.accumulation > 1

    def _reduces(self, in_flight: InFlight) -> bool:
        """Return whether a backward reduces what it leaves; where gradients are added up whole, its stage's last."""
        if self._waits or not self._adds_whole:
            return not self._waits
        return in_flight.done[in_flight.part] and in_flight.forwards[in_flight.part] == 0

    def _heads(self, in_flight: InFlight) -> float:
        """A head's gradient for each microbatch in flight, made in its forward."""
        return in_flight.forwards[-1] * self.head * self.loss if self.plan.chunked_loss else 0.0

    def _sharded_gradients(self, in_flight: InFlight, behind: Sequence[int]) -> tuple[float, float]:
        """(elements of gradient shards, bytes of those that wait for a reduction over replicas)."""
        now = sum(self._units_and_root[index].trained_shard for index in behind)
        if self._waits:
            return now, 0.0
        earlier = sum(share * unit.trained_shard for unit, share in self._earlier(in_flight, behind))
        return (now, earlier * self.reduction) if self._has_replicas else (now + earlier, 0.0)

    def _unreduced(self, in_flight: InFlight, behind: Sequence[int]) -> float:
        """Gradients that wait for the end of a step: of earlier microbatches, and of what is left `behind`."""
        if not self._waits:
            return 0.0
        left = [(self._units_and_root[index], 1.0) for index in behind]
        left += self._earlier(in_flight, behind)
        return sum(share * (unit.trained + unit.alone) for unit, share in left) * self.reduction

    def _earlier(self, in_flight: InFlight, behind: Sequence[int]) -> list[tuple[Unit, float]]:
        """The units not `behind` that an earlier microbatch has left gradients of; of the root, which share."""
        done = [
            index for has, part in zip(in_flight.done, self.parts, strict=True) if has for index in self._range(part)
        ]
        shares = {**dict.fromkeys(done, 1.0), len(self.units): self._share_of_root(in_flight)}
        return [(self._units_and_root[index], share) for index, share in shares.items() if index not in behind]

    @cached_property
    def _units_and_root(self) -> list[Unit]:
        return [*self.units, self.root]

    def _range(self, part: slice) -> range:
        return range(len(self.units))[part]

    def _share_of_root(self, in_flight: InFlight) -> float:
        """The share of the root's gradients that a microbatch has left: the head's come with the last stage's."""
        if not self.root.trained:
            return 0.0
        of_head = min(1.0, self.head / self.root.trained)
        return in_flight.done[-1] * of_head + in_flight.done[0 if self.has_embedding else -1] * (1 - of_head)

    def _always(self, in_flight: InFlight) -> float:
        """The mask, which all blocks share; on a CPU the pool of offloaded inputs; other microbatches and traffic."""
        mask = self._mask * self.compute
        return mask + (0.0 if self.on_accelerator else self._pool) + self._others(in_flight) + self._traffic(in_flight)

    def _others(self, in_flight: InFlight) -> float:
        """Bytes that other microbatches keep on a pipeline stage, with those of weight gradients that wait."""
        kept = sum(
            count * (self._kept_until[part.stop] - self._kept_until[part.start] + self._mask * self.compute)
            for count, part in zip(in_flight.forwards, self.parts, strict=True)
        )
        return kept + sum(
            count * sum(self._waiting[part]) for count, part in zip(in_flight.weights, self.parts, strict=True)
        )

    @cached_property
    def parts(self) -> list[slice]:
        """Slices of `units`, one for each of the rank's stages."""
        ends = accumulate(map(len, self.sizes.groups))
        return [slice(end - len(group), end) for end, group in zip(ends, self.sizes.groups, strict=True)]

    @cached_property
    def _waiting(self) -> list[float]:
        """Bytes with which each unit's weight gradients wait; on the first stage, whose input needs no gradient, they
        do not."""
        if not self.plan.splits_backward:
            return [0.0] * len(self.units)
        units = ((stage, names) for stage, part in zip(self.stages, self.sizes.groups, strict=True) for names in part)
        sharing = self.tensor if self.plan.sequence_parallel else 1
        features = (
            sum(waiting_features(self.facts, self.kind, self.sizes.shapes[name], sharing) for name in names)
            if stage
            else 0
            for stage, names in units
        )
        return [float(count * self.tokens * self.compute) for count in features]

    def _waiting_after(self, index: int) -> float:
        """Return what the units after `index` that are of its stage have left for their weight gradients."""
        return sum(self._waiting[index + 1 : self._part_of(index).stop])

    def _part_of(self, index: int) -> slice:
        return next((part for part in self.parts if index < part.stop), self.parts[-1])

    @cached_property
    def _mask(self) -> float:
        """Elements of the mask of isolated documents, or of pairs' completions; of windows and of gathered keys one for
        all rows."""
        if not self.plan.masks_rows:
            return float(self.positions * self.length) if self._masked_share else 0.0
        if self.job.isolates_documents or self.job.reads_pairs:
            ranks = self.context if self.plan.context_method == "ulysses" else 1
            return float(self.tokens * ranks * self.length)
        return float(self.positions * self.length)

    def _traffic(self, in_flight: InFlight) -> float:
        """A hidden state that arrives and a gradient that comes back, one at a time.

        A stage's output waits for its backward. Its input is in what its first block keeps already, except that tensor
        ranks which share the sequence keep their part there, and the stage the whole.
        """
        last = len(self.plan.stages) - 1
        into, out = ([stage != end for stage in self.stages] for end in (0, last))
        ends = [out[part] + into[part] * self.plan.sequence_parallel for part in range(len(self.stages))]
        waiting = sum(
            (count + (part == in_flight.part)) * ends[part] for part, count in enumerate(in_flight.forwards) if ends
        )
        return (any(into) + any(out) + waiting) * self.row

    @cached_property
    def _pool(self) -> float:
        """Host buffers of offloaded activations: one hidden state a checkpoint, kept from step to step."""
        return self.between * sum(map(self.offloaded, range(len(self.units))))

    # --- activations

    @cached_property
    def pieces(self) -> list[ModuleMemory]:
        """The modules of one block; none for a model that is not known."""
        facts, job = self.facts, self.job
        if not facts.attention_heads:
            return []
        shape = LocalMicrobatch(
            self.tokens,
            self.length,
            self.compute,
            self._attention,
            facts.has_attention_dropout or bool(job.model.dropout),
            self.context - 1 if self.plan.context_method == "all_gather" else 0,
            1 if facts.heads_whole else self.tensor,
            self.plan.sequence_parallel,
            self.plan.degrees[Axis.EXPERT],
            self.imbalance,
            self._masked_share if self._by_mask else 1.0,
        )
        return of_trained(modules_of_block(facts, self.kind, shape), facts, shape)

    @cached_property
    def _saved(self) -> float:
        return saved_bytes(self.pieces)

    @cached_property
    def _kept(self) -> float:
        return kept_bytes(self.pieces)

    @cached_property
    def _backward(self) -> tuple[float, float]:
        return backward_peak(self.pieces, self.compute) if self.pieces else (0.0, 0.0)

    @cached_property
    def _by_mask(self) -> bool:
        """True where torch's kernels take an efficient kernel on an accelerator for nothing but a mask."""
        return self._masked_share > 0 and self.compute < FP32 and self.job.model.attention != "efficient"

    @cached_property
    def _masked_share(self) -> float:
        """Share of attention's calls for which torch's kernels are given a whole mask."""
        if self.plan.masks_rows:
            return 1.0
        in_ring = self.plan.context_method == "ring"
        return self.facts.limited_share(self.length) if self.plan.masks_whole and not in_ring else 0.0

    @property
    def _attention(self) -> Attention:
        """Return the kind of kernel that attention gets."""
        in_ring = self.plan.context_method == "ring"  # whose blocks have kernels, whatever the model's would be
        if self.job.model.attention == "eager" and not in_ring:
            return "eager"
        if self.on_accelerator:
            by_torch = self.plan.masks_whole and not in_ring
            masked = self._mask or self.job.model.attention == "efficient"
            return "efficient" if by_torch and (masked or self.compute >= FP32) else "fused"
        unfused = self.facts.has_attention_dropout or (self.facts.latent and self.facts.latent.is_uneven)
        return "math" if unfused and self.plan.masks_whole else "fused"

    @cached_property
    def reached(self) -> list[bool]:
        """The answer for each unit whether backward comes to it: not before the first trained parameter of the model.

        What a stage is sent has a gradient in any case.
        """
        names, trained, reached = iter(self.facts.parameter_shapes), False, list[bool]()
        for part, blocks in ((part, unit) for part, units in enumerate(self.sizes.groups) for unit in units):
            inside = {name for name, block in self.facts.block_of.items() if block in blocks}
            for name in names:
                trained = trained or name not in self.facts.frozen
                inside.discard(name)
                if not inside:
                    break
            reached.append(trained or bool(self.stages and self.stages[part] > 0))
        return reached

    def checkpointed(self, index: int) -> bool:
        place = index - self._part_of(index).start  # each stage counts its own
        return self.job.memory.activation_checkpointing != "none" and place % self.job.memory.checkpoint_every == 0

    def offloaded(self, index: int) -> bool:
        return self.checkpointed(index) and self.job.memory.offload_activations

    def kept(self, index: int) -> float:
        """Return what unit `index` keeps on the device between forward and backward."""
        blocks = self.units[index].blocks
        if not self.reached[index]:
            return 0.0
        if not self.checkpointed(index):
            return blocks * self._saved
        selective = self.job.memory.activation_checkpointing == "selective"
        kept = blocks * self._kept if selective else 0.0
        kept += blocks * exchanged_bytes(self.pieces, self.job.memory.keep_expert_rows)
        return kept + (0.0 if self.offloaded(index) else self.between)

    def recomputed(self, index: int) -> float:
        """Return what unit `index` holds when its backward begins: a checkpoint's input, loaded ahead, and the rest."""
        if not self.checkpointed(index):
            return self.kept(index)
        ahead = min(index, self.job.memory.activation_loading_horizon) if self.offloaded(index) else 0
        return self.between * (1 + ahead) + self.units[index].blocks * self._saved

    def kept_before(self, index: int) -> float:
        """Return what the units before `index` that are of its stage keep."""
        return self._kept_until[index] - self._kept_until[self._part_of(index).start]

    @cached_property
    def _kept_until(self) -> list[float]:
        return [0.0, *accumulate(map(self.kept, range(len(self.units))))]
