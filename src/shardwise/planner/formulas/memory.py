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
is no flat buffer, the gradients of several microbatches are added up before the last one's reduction, and the root
stays gathered between them. Gloo reduces a copy of its input; with one shard rank FSDP2 makes that copy.

Experts that ranks share are units of their own, sharded over the ranks that hold the same ones. They come on top of
their block's unit as if both were one, which they are to within the moment at which either is gathered.

Not in it: what a kernel allocates inside one operator, a backend's own buffers, the allocator's fragmentation, CUDA's
context, and buffers of the model (rotary tables). Float8's messages live inside the gathering's call, a byte a number,
before gradients and reduction buffers of the same unit exist, which take more: no moment has them at its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.job.axes import Axis
from shardwise.job.devices import CUDA, kernels_of
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.activations import BlockKind
from shardwise.planner.formulas.in_flight import InFlight
from shardwise.planner.formulas.memory_estimate import MemoryEstimate
from shardwise.planner.formulas.prediction import IMBALANCE
from shardwise.planner.formulas.rank_memory import RankMemory
from shardwise.planner.formulas.units import Unit


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


class _Step(RankMemory):
    """The moments of a step."""

    def moments(self) -> Iterator[MemoryEstimate]:
        for in_flight in self.in_flight:
            if in_flight.in_weights:
                yield self.behind_weights(in_flight)
            else:
                yield from self._in_backwards(in_flight) if in_flight.in_backward else self._in_forwards(in_flight)
        if self._waits:
            for index in (index for index in reversed(range(len(self.units))) if self.reached[index]):
                yield self.in_reduction(index, self.at_end)
            yield self.in_root_reduction(self.at_end, range(len(self.units)))
        yield replace(self.base("optimizer step", self.at_end, range(len(self._units_and_root))), gathered=0.0)

    def _in_forwards(self, in_flight: InFlight) -> Iterator[MemoryEstimate]:
        for index in self._range(self.parts[in_flight.part])[-2:]:
            yield self.in_forward(index, in_flight)
        if self._ends(in_flight):
            yield self.at_loss(in_flight)

    def _in_backwards(self, in_flight: InFlight) -> Iterator[MemoryEstimate]:
        if self._ends(in_flight):
            if self.plan.chunked_loss:
                yield self.at_head(in_flight)
            if self.kind.rms_norm:
                yield self.at_final_norm(in_flight)
        part = self._range(self.parts[in_flight.part])
        for index in (index for index in reversed(part) if self.reached[index]):
            yield self.in_backward(index, in_flight)
            if self.units[index].experts and not self.keeps_gathered:
                yield self.gathering_experts(index, in_flight)
            if self._reduces(in_flight):
                yield self.in_reduction(index, in_flight)
        if in_flight.part == 0:
            yield self.at_embedding(in_flight)
        if self._reduces(in_flight) and (in_flight.part == 0 or self._ends(in_flight)):
            yield self.in_root_reduction(in_flight, part)

    def _ends(self, in_flight: InFlight) -> bool:
        """True where the model's last stage runs."""
        return self.has_head and in_flight.part == len(self.parts) - 1

    def _behind(self, index: int) -> range:
        """The units of the same stage that backward has left when it is at `index`."""
        return range(index + 1, self._part_of(index).stop)

    def _held_whole(self, index: int, in_flight: InFlight) -> list[Unit]:
        """The units that are gathered at `index` where they stay so after forward.

        Those of another part are while a forward awaits its backward, or until the end of a step.
        """
        units = list[Unit]()
        keeps = self._waits or (self._adds_whole and self.plan.keeps_between_microbatches)
        for number, part in enumerate(self.parts):
            runs_back = in_flight.in_backward and number == in_flight.part
            stays = in_flight.forwards[number] > 0 and not runs_back
            stays = stays or (
                keeps and (in_flight.done[number] or runs_back) and not (runs_back and self._reduces(in_flight))
            )
            until = part.stop if stays else index + 1 if number == in_flight.part else part.start
            units += self.units[part.start : until]
        return units

    def _head_of(self, in_flight: InFlight) -> float:
        """Bytes of the head's gradient while its own microbatch runs back."""
        return self.head * self.compute if self._ends(in_flight) else 0.0

    def in_forward(self, index: int, in_flight: InFlight) -> MemoryEstimate:
        """The end of a unit's forward: its own flat buffer is still there, and those of the next are filled.

        Experts that ranks share are gathered last, and nobody gathers them ahead: the rest's buffers take their turn.
        """
        size = self.base(f"forward of unit {index}", in_flight)
        ahead = self.job.parallel.prefetch_depth if self.plan.degrees[Axis.EXPERT] == 1 else 0
        gathered = self._held_whole(index, in_flight) if self.keeps_gathered else self.units[index : index + 1]
        flat = 0.0 if self.ranks == 1 else self._gathered(self.units[index : index + 1 + ahead])
        return replace(
            size,
            gathered=size.gathered + self._gathered(gathered),
            communication=0.0 if self._waits else flat,
            activations=size.activations + self.kept_before(index) + self.kept(index),
        )

    def at_loss(self, in_flight: InFlight) -> MemoryEstimate:
        """The last chunk of the loss: logits of R rows in the loss dtype (and first in the compute dtype), gradients of
        hidden states and head; hidden states before and after the final norm. A share of the head's gradient is added
        up in the loss dtype, on CUDA without being made first. Whole logits: log-softmax, its gradient, that of the
        logits, and what a soft cap keeps."""
        size, vocabulary = self.base("loss", in_flight), self.vocabulary
        if self.plan.chunked_loss:
            rows, cast = min(self.tokens, self.job.memory.loss_chunk_tokens), self._cast
            logits = float(rows * vocabulary * (self.loss + cast))
            gradients = self.head * (self.loss + (0 if kernels_of(self.plan.world.device_type) == CUDA else cast))
        else:
            sizes = 3.0 * self.loss + self.facts.kept_logits * self.compute
            logits, gradients = self.tokens * vocabulary * sizes, 0.0
        return replace(
            size,
            gathered=size.gathered + self._gathered(self._kept_whole(in_flight)),
            unsharded_gradients=size.unsharded_gradients + gradients,
            activations=size.activations + self.kept_before(len(self.units)) + 2 * self.row,
            working=self.row,
            logits=logits,
        )

    def _kept_whole(self, in_flight: InFlight) -> list[Unit]:
        """The units that are gathered when the last one's forward is over."""
        if self.keeps_gathered:
            return self._held_whole(len(self.units) - 1, in_flight._replace(in_backward=False))
        return self.units[-1:] if self.plan.keeps_last_unit else []

    @property
    def _cast(self) -> int:
        """Bytes of a number that is in the loss dtype and in the compute dtype, where they differ."""
        return self.compute if self.compute != self.loss else 0

    def at_head(self, in_flight: InFlight) -> MemoryEstimate:
        """The backward of a chunked loss, which casts the head's gradient."""
        size = self.at_loss(in_flight)
        gradients = self.base("", in_flight).unsharded_gradients + self.head * (self.loss + self._cast)
        return replace(size, moment="backward of the loss", logits=0.0, unsharded_gradients=gradients)

    def at_final_norm(self, in_flight: InFlight) -> MemoryEstimate:
        """The backward of the final norm, in fp32 on all positions: its input and five as large; the next gathered."""
        size, wide = self.base("backward of the final norm", in_flight), self.row * 4 / min(self.compute, 4)
        kept = self._kept_whole(in_flight)
        return replace(
            size,
            gathered=size.gathered + self._gathered(kept),
            communication=0.0 if kept else self._prefetched(len(self.units)),
            unsharded_gradients=size.unsharded_gradients + self.head * self.compute,
            activations=size.activations + self.kept_before(len(self.units)) + wide,
            working=5 * wide,
        )

    def in_backward(self, index: int, in_flight: InFlight) -> MemoryEstimate:
        """The worst moment inside the backward of a unit: its last block, everything before it still kept."""
        behind = () if self._waiting[index] else self._behind(index)  # or weight gradients come later
        size = self.base(f"backward of unit {index}", in_flight, behind, reduces=not self._waits)
        unit = self.units[index]
        gathered = self._held_whole(index, in_flight) if self.keeps_gathered else [unit]
        reduced = [self.units[behind] for behind in self._behind(index)[:1]] if self._reduces(in_flight) else []
        of_reduced = sum(one.trained - one.trained_experts for one in reduced) * self.reduction
        return replace(
            size,
            gathered=size.gathered + self._gathered(gathered),
            communication=self._prefetched(index) + self.fsdp * of_reduced,
            unsharded_gradients=size.unsharded_gradients + self._head_of(in_flight) + self._own_gradients(index),
            activations=size.activations
            + self.kept_before(index)
            + self.recomputed(index)
            + self._waiting_after(index),
            working=self._backward[0] - self._saved + self.between,
        )

    def _own_gradients(self, index: int) -> float:
        """Bytes of a unit's gradients at the worst moment inside its backward."""
        gradients, unit = self._backward[1], self.units[index]
        if self._waiting[index]:
            return 0.0
        # Of frozen ones, what the modules' own weights would have is not there.
        return min(gradients, (unit.trained + unit.alone) * self.compute) if self.facts.frozen else gradients

    def gathering_experts(self, index: int, in_flight: InFlight) -> MemoryEstimate:
        """Experts that ranks share arrive in the unit's backward, where it comes to them; no gradient is there yet."""
        size, experts = self.in_backward(index, in_flight), self.units[index].experts
        return replace(
            size,
            moment=f"gathering of unit {index}'s experts",
            communication=size.communication + experts * self.compute,
            unsharded_gradients=size.unsharded_gradients - self._own_gradients(index),
            working=self.between,
        )

    def behind_weights(self, in_flight: InFlight) -> MemoryEstimate:
        """The end of weight gradients that were put off: they are there, and others wait."""
        size = self.base("weight gradients", in_flight)
        kept = self._held_whole(self.parts[in_flight.part].stop - 1, in_flight) if self.keeps_gathered else []
        return replace(size, gathered=size.gathered + self._gathered(kept))

    def in_reduction(self, index: int, in_flight: InFlight) -> MemoryEstimate:
        """A unit's gradients beside the reduce-scatter input they are copied into; its parameters are freed."""
        behind = range(index + 1, len(self.units)) if self._waits else self._behind(index)
        size, unit = self.base(f"reduction of unit {index}", in_flight, behind), self.units[index]
        own, buffers = self._reduced(unit)
        kept = self.units[:index] if self._waits else self._held_whole(index - 1, in_flight)
        return replace(
            size,
            gathered=size.gathered + (self._gathered(kept) if self.keeps_gathered else 0.0),
            communication=self._prefetched(index) + buffers,
            unsharded_gradients=size.unsharded_gradients + self._head_of(in_flight) + own + unit.alone * self.compute,
            activations=size.activations + (0.0 if self._waits else self.kept_before(index)),
            working=self.row,
        )

    def at_embedding(self, in_flight: InFlight) -> MemoryEstimate:
        """The gradient of the embedding, made whole; where it is tied to the head, that of each and their sum."""
        size = self.base("backward of the embedding", in_flight, () if any(self._waiting[:1]) else self._behind(-1))
        is_tied = bool(self.facts.ties)
        if len(self.parts) == 1:
            own = self.root.trained + 2 * is_tied * self.head
        else:  # the head's is an earlier backward's
            own = max(self.root.trained - self.head, is_tied * self.head)
        reduces = self._waits or self._reduces(in_flight)
        waiting = self.units[0].trained * self.reduction if self.units and self.fsdp and reduces else 0.0
        return replace(
            size,
            communication=waiting,
            unsharded_gradients=size.unsharded_gradients + own * self.compute,
            working=self.row,
        )

    def in_root_reduction(self, in_flight: InFlight, behind: Sequence[int]) -> MemoryEstimate:
        """The root's gradients beside their reduce-scatter input; nothing is gathered any more."""
        size = self.base("reduction of the root", in_flight, behind)
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
        if self._adds_whole:  # one sum becomes the other
            return 0.0, (1 + (self.plan.world.size > 1)) * unit.trained * self.reduction
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
        return sum(unit.whole - unit.experts for unit in self.units[max(0, index - depth) : index]) * self.compute
