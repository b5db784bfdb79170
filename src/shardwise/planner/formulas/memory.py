"""Peak memory of a rank, by cause, as formulas of plan and model; no tensor is made.

Training peaks at one of a few moments. For each there is a `MemoryEstimate`, and the estimate of a plan is the largest.
Elements: N of the model, n_u of a unit (the blocks that FSDP2 gathers together), n_r of the root (embeddings, final
norm, head), s shard ranks, T tokens of a microbatch. Bytes a number: p of the master parameters, c of the compute
dtype, r of the reduction.

Held all the time: parameters N/s·p (FSDP2 pads dim 0 of each tensor to a multiple of s), optimizer state, and with
accumulation the gradients of earlier microbatches N/s·p. Of N and n only trained parameters have gradients and state.
What is updated in host memory has its state there, beside a copy of weights and gradient and, where that runs beside
backward, the state before; on a CPU these copies count. Averaged weights (EMA) take p for each trained parameter. The
frozen copy of a preference loss takes N/s·p more; its forward, which holds no activations, is no peak.
One rank without a compute dtype of its own has no FSDP2: s = 1, and nothing below is gathered or communicated. With
tensor parallelism all are of the first, fullest, rank.

FSDP2 (torch/distributed/fsdp/_fully_shard) gathers a unit into a flat buffer of n_u·c and copies it out into
parameters of n_u·c; in forward the flat buffer lives until the next unit's copy-out, in backward it is freed at once.
Without a pipeline the last unit stays gathered from its forward to its backward.
Each unit that is prefetched holds a flat buffer. With replicas, what earlier microbatches' reductions have left waits
in r bytes on the device for the last one's. After a unit's backward its parameters are freed, its gradients n_u·c
are copied into a reduce-scatter input of n_u·r and freed, and the output n_u/s·r becomes the gradient shard; the input
lives until the next unit's. The root stays gathered from first use to the end of backward. With one shard rank there
is no flat buffer. Gloo reduces a copy of its input; with one shard rank FSDP2 makes that copy.

Experts that ranks share are units of their own, sharded over the ranks that hold the same ones. They come on top of
their block's unit as if both were one, which they are to within the moment at which either is gathered.

Not in it: what a kernel allocates inside one operator, a backend's own buffers, the allocator's fragmentation, CUDA's
context, and buffers of the model (rotary tables). Float8's messages live inside the gathering's call, a byte a number,
before gradients and reduction buffers of the same unit exist, which take more: no moment has them at its peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from shardwise.job.axes import Axis
from shardwise.job.devices import CPU, CUDA, kernels_of
from shardwise.model.facts import ModelFacts
from shardwise.model.packed_weights import packed_bytes
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
from shardwise.planner.formulas.in_flight import InFlight, alone, in_flight_of
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.prediction import IMBALANCE
from shardwise.planner.formulas.shapes import optimizer_state_bytes
from shardwise.planner.formulas.units import RankUnits, Unit

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
KEPT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a dtype by torch's name


def estimate(
    plan: Plan,
    facts: ModelFacts,
    kind: BlockKind | None = None,
    pipeline: int | None = None,
    imbalance: float = IMBALANCE,
) -> MemoryEstimate:
    """The largest moment of a training step after the first (which makes the optimizer state), on the fullest rank.

    `kind` says what a block keeps; unset, it is read off the facts. For a model without attention heads (a user's own
    module) the activations are not known and count as nothing. `pipeline` asks for that rank of the pipeline. Of ranks
    that share experts, the fullest gets `imbalance` times the mean of the rows; see `worst_imbalance`.
    """
    ranks = range(plan.degrees[Axis.PIPELINE]) if pipeline is None else [pipeline]
    estimates = (moment for rank in ranks for moment in moments(plan, facts, kind, rank, imbalance))
    return max(estimates, key=lambda moment: moment.total)


def worst_imbalance(plan: Plan, facts: ModelFacts) -> float:
    """Return the largest `imbalance` there can be: every token goes to as many experts of one rank as it can."""
    degree, chosen = plan.degrees[Axis.EXPERT], facts.experts_of_token
    if degree == 1 or not chosen:
        return 1.0
    return degree * min(chosen, *(number // degree for number in facts.expert_stacks.values())) / chosen


def moments(
    plan: Plan, facts: ModelFacts, kind: BlockKind | None = None, pipeline: int = 0, imbalance: float = IMBALANCE
) -> list[MemoryEstimate]:
    """The moments of a step that can be the peak on a rank of the pipeline, in their order."""
    return list(_Step(plan, facts, kind or BlockKind.of(facts), pipeline, imbalance).moments())


class _Step:
    """The formulas, for one plan and model, on a pipeline rank."""

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
        self.tokens = plan.microbatch * plan.positions
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
        """What the rank holds at its forwards and backwards: of those of one part that find the same parts done, the
        one that holds most."""
        found = list(alone(self.plan.accumulation > 1))
        if self.stages:
            ranks, schedule = self.plan.degrees[Axis.PIPELINE], self.job.parallel.pipeline
            orders = [
                in_flight_of(self.pipeline, ranks, len(self.stages), count, schedule)
                for count in dict.fromkeys(self.plan.accumulations)
            ]
            found = [held for order in orders for held in order]
        most: dict[object, InFlight] = {}
        for held in found:
            key = (held.part, held.in_backward, held.done)
            most[key] = max(most.get(key, held), held, key=self._others)
        return list(most.values())

    @property
    def at_end(self) -> InFlight:
        """What the rank holds when all backwards of a step are done."""
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
        shapes = self.sizes.all_shapes.items()
        return sum(self.sizes.padded({name: shape})[0] * self._element_bytes(name) for name, shape in shapes)

    def _element_bytes(self, name: str) -> float:
        form = self.facts.packed.get(name)
        return KEPT_BYTES.get(self.facts.kept_dtype(name), self.master) if form is None else packed_bytes(form)

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

    def base(self, moment: str, held: InFlight, behind: Sequence[int] = (), reduces: bool = True) -> MemoryEstimate:
        """Parameters, optimizer state, what is `held` of other microbatches, and gradients of the units that backward
        has left `behind`: their shards, if it `reduces` them; those of earlier microbatches."""
        done, partial = self._sharded_gradients(held, behind if reduces else ())
        state = MemoryEstimate(
            moment,
            parameters=self.parameter_bytes,
            gradients=done * self.master,
            optimizer=self.optimizer_bytes,
            gathered=self.root.whole * self.compute if self.fsdp else 0.0,
            unsharded_gradients=self._heads(held) + self._unreduced(held, behind),
            activations=self._always(held),
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

    def _heads(self, held: InFlight) -> float:
        """A head's gradient for each microbatch in flight, made in its forward."""
        return held.forwards[-1] * self.head * self.loss if self.plan.chunked_loss else 0.0

    def _sharded_gradients(self, held: InFlight, behind: Sequence[int]) -> tuple[float, float]:
        """(elements of gradient shards, bytes of those that wait for a reduction over replicas)."""
        now = sum(self._units_and_root[index].trained_shard for index in behind)
        if self._waits:
            return now, 0.0
        earlier = sum(share * unit.trained_shard for unit, share in self._earlier(held, behind))
        return (now, earlier * self.reduction) if self._has_replicas else (now + earlier, 0.0)

    def _unreduced(self, held: InFlight, behind: Sequence[int]) -> float:
        """Gradients that wait for the end of a step: of earlier microbatches, and of what is left `behind`."""
        if not self._waits:
            return 0.0
        left = [(self._units_and_root[index], 1.0) for index in behind]
        left += self._earlier(held, behind)
        return sum(share * (unit.trained + unit.alone) for unit, share in left) * self.reduction

    def _earlier(self, held: InFlight, behind: Sequence[int]) -> list[tuple[Unit, float]]:
        """The units not `behind` that an earlier microbatch has left gradients of; of the root, which share."""
        done = [index for has, part in zip(held.done, self.parts, strict=True) if has for index in self._range(part)]
        shares = {**dict.fromkeys(done, 1.0), len(self.units): self._share_of_root(held)}
        return [(self._units_and_root[index], share) for index, share in shares.items() if index not in behind]

    @cached_property
    def _units_and_root(self) -> list[Unit]:
        return [*self.units, self.root]

    def _range(self, part: slice) -> range:
        return range(len(self.units))[part]

    def _share_of_root(self, held: InFlight) -> float:
        """The share of the root's gradients that a microbatch has left: the head's come with the last stage's."""
        if not self.root.trained:
            return 0.0
        of_head = min(1.0, self.head / self.root.trained)
        return held.done[-1] * of_head + held.done[0 if self.has_embedding else -1] * (1 - of_head)

    def _always(self, held: InFlight) -> float:
        """The mask, which all blocks share; on a CPU the pool of offloaded inputs; other microbatches and traffic."""
        mask = self._mask * self.compute
        return mask + (0.0 if self.on_accelerator else self._pool) + self._others(held) + self._traffic(held)

    def _others(self, held: InFlight) -> float:
        """Bytes that other microbatches keep on a pipeline stage, with those of weight gradients that wait."""
        kept = sum(
            count * (self._kept_until[part.stop] - self._kept_until[part.start] + self._mask * self.compute)
            for count, part in zip(held.forwards, self.parts, strict=True)
        )
        return kept + sum(
            count * sum(self._waiting[part]) for count, part in zip(held.weights, self.parts, strict=True)
        )

    @cached_property
    def parts(self) -> list[slice]:
        """Where the units of each of the rank's stages are among `units`."""
        ends = accumulate(map(len, self.sizes.groups))
        return [slice(end - len(group), end) for end, group in zip(ends, self.sizes.groups, strict=True)]

    @cached_property
    def _waiting(self) -> list[float]:
        """Bytes with which each unit's weight gradients wait; on the first stage, whose input needs no gradient, they
        do not."""
        if not self.plan.splits_backward:
            return [0.0] * len(self.units)
        units = ((stage, names) for stage, part in zip(self.stages, self.sizes.groups, strict=True) for names in part)
        features = (
            sum(waiting_features(self.facts, self.kind, self.sizes.shapes[name]) for name in names) if stage else 0
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
        """Elements of the mask of isolated documents, or of pairs' completions; of gathered keys one for all rows."""
        if not self.plan.masks_whole or self.plan.context_method == "ring":
            return 0.0
        if self.job.isolates_documents or self.job.reads_pairs:
            ranks = self.context if self.plan.context_method == "ulysses" else 1
            return float(self.tokens * ranks * self.plan.sequence_length)
        is_split = self.plan.context_method == "all_gather"
        return float(self.plan.positions * self.plan.sequence_length) if is_split else 0.0

    def _traffic(self, held: InFlight) -> float:
        """A hidden state that arrives and a gradient that comes back, one at a time.

        A stage's output waits for its backward. Its input is in what its first block keeps already, except that tensor
        ranks which share the sequence keep their part there, and the stage the whole.
        """
        last = len(self.plan.stages) - 1
        into, out = ([stage != end for stage in self.stages] for end in (0, last))
        ends = [out[part] + into[part] * self.plan.sequence_parallel for part in range(len(self.stages))]
        waiting = sum((count + (part == held.part)) * ends[part] for part, count in enumerate(held.forwards) if ends)
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
            self.plan.sequence_length,
            self.compute,
            self._attention,
            facts.has_attention_dropout or bool(job.model.dropout),
            self.context - 1 if self.plan.context_method == "all_gather" else 0,
            1 if facts.heads_whole else self.tensor,
            self.plan.sequence_parallel,
            self.plan.degrees[Axis.EXPERT],
            self.imbalance,
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

    @property
    def _attention(self) -> Attention:
        """Return the kind of kernel that attention gets."""
        if self.job.model.attention == "eager":
            return "eager"
        if self.on_accelerator:
            by_torch = self.plan.masks_whole and self.plan.context_method != "ring"  # whose blocks have kernels
            masked = self._mask or self.job.model.attention == "efficient"
            return "efficient" if by_torch and (masked or self.compute >= FP32) else "fused"
        return "math" if self.facts.has_attention_dropout and self.plan.masks_whole else "fused"

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
        return self.job.memory.activation_checkpointing != "none" and index % self.job.memory.checkpoint_every == 0

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

    # --- moments

    def moments(self) -> Iterator[MemoryEstimate]:
        for held in self.in_flight:
            yield from self._in_backwards(held) if held.in_backward else self._in_forwards(held)
        if self._waits:
            for index in (index for index in reversed(range(len(self.units))) if self.reached[index]):
                yield self.in_reduction(index, self.at_end)
            yield self.in_root_reduction(self.at_end, range(len(self.units)))
        yield replace(self.base("optimizer step", self.at_end, range(len(self._units_and_root))), gathered=0.0)

    def _in_forwards(self, held: InFlight) -> Iterator[MemoryEstimate]:
        for index in self._range(self.parts[held.part])[-2:]:
            yield self.in_forward(index, held)
        if self._ends(held):
            yield self.at_loss(held)

    def _in_backwards(self, held: InFlight) -> Iterator[MemoryEstimate]:
        if self._ends(held):
            if self.plan.chunked_loss:
                yield self.at_head(held)
            if self.kind.rms_norm:
                yield self.at_final_norm(held)
        part = self._range(self.parts[held.part])
        for index in (index for index in reversed(part) if self.reached[index]):
            yield self.in_backward(index, held)
            if not self._waits:
                yield self.in_reduction(index, held)
        if held.part == 0:
            yield self.at_embedding(held)
        if not self._waits and (held.part == 0 or self._ends(held)):
            yield self.in_root_reduction(held, part)

    def _ends(self, held: InFlight) -> bool:
        """True where the model's last stage runs."""
        return self.has_head and held.part == len(self.parts) - 1

    def _behind(self, index: int) -> range:
        """The units of the same stage that backward has left when it is at `index`."""
        return range(index + 1, self._part_of(index).stop)

    def _held_whole(self, index: int, held: InFlight) -> list[Unit]:
        """The units that are gathered at `index` where they stay so after forward.

        Those of another part are while a forward awaits its backward, or until the end of a step.
        """
        units = list[Unit]()
        for number, part in enumerate(self.parts):
            runs_back = held.in_backward and number == held.part
            stays = held.forwards[number] > 0 and not runs_back
            stays = stays or (self._waits and (runs_back or held.done[number]))
            until = part.stop if stays else index + 1 if number == held.part else part.start
            units += self.units[part.start : until]
        return units

    def _head_of(self, held: InFlight) -> float:
        """Bytes of the head's gradient while its own microbatch runs back."""
        return self.head * self.compute if self._ends(held) else 0.0

    def in_forward(self, index: int, held: InFlight) -> MemoryEstimate:
        """The end of a unit's forward: its own flat buffer is still there, and those of the next are filled.

        Experts that ranks share are gathered last, and nobody gathers them ahead: the rest's buffers take their turn.
        """
        size = self.base(f"forward of unit {index}", held)
        ahead = self.job.parallel.prefetch_depth if self.plan.degrees[Axis.EXPERT] == 1 else 0
        gathered = self._held_whole(index, held) if self.keeps_gathered else self.units[index : index + 1]
        flat = 0.0 if self.ranks == 1 else self._gathered(self.units[index : index + 1 + ahead])
        return replace(
            size,
            gathered=size.gathered + self._gathered(gathered),
            communication=0.0 if self._waits else flat,
            activations=size.activations + self.kept_before(index) + self.kept(index),
        )

    def at_loss(self, held: InFlight) -> MemoryEstimate:
        """The last chunk of the loss: logits of R rows in the loss dtype (and first in the compute dtype), gradients of
        hidden states and head; hidden states before and after the final norm. A share of the head's gradient is added
        up in the loss dtype, on CUDA without being made first. Whole logits: log-softmax, its gradient and that of the
        logits."""
        size, vocabulary = self.base("loss", held), self.vocabulary
        if self.plan.chunked_loss:
            rows, cast = min(self.tokens, self.job.memory.loss_chunk_tokens), self._cast
            logits = float(rows * vocabulary * (self.loss + cast))
            gradients = self.head * (self.loss + (0 if kernels_of(self.plan.world.device_type) == CUDA else cast))
        else:
            logits, gradients = 3.0 * self.tokens * vocabulary * self.loss, 0.0
        return replace(
            size,
            gathered=size.gathered + self._gathered(self._kept_whole(held)),
            unsharded_gradients=size.unsharded_gradients + gradients,
            activations=size.activations + self.kept_before(len(self.units)) + 2 * self.row,
            working=self.row,
            logits=logits,
        )

    def _kept_whole(self, held: InFlight) -> list[Unit]:
        """The units that are gathered when the last one's forward is over."""
        if self.keeps_gathered:
            return self._held_whole(len(self.units) - 1, held._replace(in_backward=False))
        return self.units[-1:] if self.plan.keeps_last_unit else []

    @property
    def _cast(self) -> int:
        """Bytes of a number that is in the loss dtype and in the compute dtype, where they differ."""
        return self.compute if self.compute != self.loss else 0

    def at_head(self, held: InFlight) -> MemoryEstimate:
        """The backward of a chunked loss, which casts the head's gradient."""
        size = self.at_loss(held)
        gradients = self.base("", held).unsharded_gradients + self.head * (self.loss + self._cast)
        return replace(size, moment="backward of the loss", logits=0.0, unsharded_gradients=gradients)

    def at_final_norm(self, held: InFlight) -> MemoryEstimate:
        """The backward of the final norm, in fp32 on all positions: its input and five as large; the next gathered."""
        size, wide = self.base("backward of the final norm", held), self.row * 4 / min(self.compute, 4)
        kept = self._kept_whole(held)
        return replace(
            size,
            gathered=size.gathered + self._gathered(kept),
            communication=0.0 if kept else self._prefetched(len(self.units)),
            unsharded_gradients=size.unsharded_gradients + self.head * self.compute,
            activations=size.activations + self.kept_before(len(self.units)) + wide,
            working=5 * wide,
        )

    def in_backward(self, index: int, held: InFlight) -> MemoryEstimate:
        """The worst moment inside the backward of a unit: its last block, everything before it still kept."""
        size = self.base(f"backward of unit {index}", held, self._behind(index), reduces=not self._waits)
        unit = self.units[index]
        worst, gradients = self._backward
        if self.facts.frozen:  # what the modules' own weights would have is not there
            gradients = min(gradients, (unit.trained + unit.alone) * self.compute)
        if self._waiting[index]:  # weight gradients come later
            gradients = 0.0
        gathered = self._held_whole(index, held) if self.keeps_gathered else [unit]
        reduced = [] if self._waits else [self.units[behind] for behind in self._behind(index)[:1]]
        return replace(
            size,
            gathered=size.gathered + self._gathered(gathered),
            communication=self._prefetched(index) + self.fsdp * sum(one.trained for one in reduced) * self.reduction,
            unsharded_gradients=size.unsharded_gradients + self._head_of(held) + gradients,
            activations=size.activations
            + self.kept_before(index)
            + self.recomputed(index)
            + self._waiting_after(index),
            working=worst - self._saved + self.between,
        )

    def in_reduction(self, index: int, held: InFlight) -> MemoryEstimate:
        """A unit's gradients beside the reduce-scatter input they are copied into; its parameters are freed."""
        behind = range(index + 1, len(self.units)) if self._waits else self._behind(index)
        size, unit = self.base(f"reduction of unit {index}", held, behind), self.units[index]
        own, buffers = self._reduced(unit)
        kept = self.units[:index] if self._waits else self._held_whole(index - 1, held)
        return replace(
            size,
            gathered=size.gathered + (self._gathered(kept) if self.keeps_gathered else 0.0),
            communication=self._prefetched(index) + buffers,
            unsharded_gradients=size.unsharded_gradients + self._head_of(held) + own + unit.alone * self.compute,
            activations=size.activations + (0.0 if self._waits else self.kept_before(index)),
            working=self.row,
        )

    def at_embedding(self, held: InFlight) -> MemoryEstimate:
        """The gradient of the embedding, made whole; where it is tied to the head, that of each and their sum."""
        size = self.base("backward of the embedding", held, self._behind(-1))
        is_tied = bool(self.facts.ties)
        if len(self.parts) == 1:
            own = self.root.trained + 2 * is_tied * self.head
        else:  # the head's is an earlier backward's
            own = max(self.root.trained - self.head, is_tied * self.head)
        waiting = self.units[0].trained * self.reduction if self.units and self.fsdp else 0.0
        return replace(
            size,
            communication=waiting,
            unsharded_gradients=size.unsharded_gradients + own * self.compute,
            working=self.row,
        )

    def in_root_reduction(self, held: InFlight, behind: Sequence[int]) -> MemoryEstimate:
        """The root's gradients beside their reduce-scatter input; nothing is gathered any more."""
        size = self.base("reduction of the root", held, behind)
        own, buffers = self._reduced(self.root)
        return replace(
            size,
            gathered=0.0,
            communication=buffers,
            unsharded_gradients=size.unsharded_gradients + own,
        )

    def _reduced(self, unit: Unit) -> tuple[float, float]:
        """(gradients, buffers) at the larger moment of a reduction: filling its input, or its output beside it."""
        if not self.fsdp:
            return unit.trained * self.compute, 0.0
        filling = (0.0 if self._waits else unit.trained * self.compute, unit.trained * self.reduction)
        copies = 1 if self.ranks == 1 or self.plan.backend == "gloo" else 0
        sharded = unit.trained_shard - unit.alone
        # The loop that filled the input still refers to the last gradient.
        output = (unit.last * self.compute, ((1 + copies) * unit.trained + sharded) * self.reduction)
        return max(filling, output, key=sum)

    def _gathered(self, units: Sequence[Unit]) -> float:
        return sum(unit.whole for unit in units) * self.compute if self.fsdp else 0.0

    def _prefetched(self, index: int) -> float:
        """Flat buffers of the units whose parameters are on their way; FSDP2 itself fetches one ahead in backward."""
        if not self.fsdp or self.ranks == 1 or self.keeps_gathered:
            return 0.0
        depth = max(1, self.job.parallel.prefetch_depth)
        return sum(unit.whole for unit in self.units[max(0, index - depth) : index]) * self.compute
