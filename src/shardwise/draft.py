"""What the legality table and the plan both read: the machine, and the numbers that follow from job, machine and model.

A `Draft` computes each derived number once, leniently; `shardwise.legality` judges them and `shardwise.plan` keeps them.
So a rule can never look at another number than the one that runs. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.config import Job
from shardwise.families.facts import ModelFacts

DEFAULT_SEQUENCES = 16
MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # a forward of this size keeps the device busy without filling it
PLACEMENTS = {"CLUSTER": "DPT", "SPREAD": "TPD"}


@dataclass(frozen=True)
class World:
    """What there is to run on."""

    size: int
    device_type: str  # "cpu" | "cuda"
    local_size: int
    accelerator: str = ""  # e.g. torch.cuda.get_device_name()
    hosts: int = 1


class Derived(NamedTuple):
    """A number and the rule that gave it."""

    value: int
    rule: str


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def one_of(values: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def placement_order(strategy: str) -> str | None:
    """The axes D, P, T in order, right-most varying fastest; None when `strategy` does not hold each of them once."""
    order = PLACEMENTS.get(strategy.upper(), strategy.upper())
    return order if sorted(order) == ["D", "P", "T"] else None


def group_size(strategy: str) -> int | None:
    """N of a checkpoint strategy `group_N`; None for anything else."""
    prefix, _, count = strategy.partition("_")
    return int(count) if prefix == "group" and count.isdecimal() and int(count) > 0 else None


@dataclass(frozen=True)
class Draft:
    """Job, world and model together, with the numbers that follow from them, not yet judged."""

    job: Job
    world: World
    facts: ModelFacts

    @cached_property
    def split_degree(self) -> int:
        """Ranks that together hold one copy of the data axis' work: tensor x pipeline."""
        return self.job.parallel.tensor_parallel_degree * self.job.parallel.pipeline_parallel_degree

    @cached_property
    def data_axis(self) -> int:
        """SMP's D: replica x shard x context."""
        return max(1, self.world.size // self.split_degree)

    @cached_property
    def data_ranks(self) -> int:
        """Ranks that read different samples: replica x shard."""
        return max(1, self.data_axis // self.job.parallel.context_parallel_degree)

    @cached_property
    def sharded(self) -> int:
        """Ranks over which state is sharded: shard x context."""
        parallel = self.job.parallel
        if parallel.shard_optimizer_state or parallel.sharded_data_parallel_degree is None:
            return self.data_axis
        return parallel.sharded_data_parallel_degree

    @cached_property
    def zero1(self) -> bool:
        """Whether only optimizer state and the reduction of gradients are sharded."""
        return self.job.parallel.shard_optimizer_state and self.data_axis > 1

    @cached_property
    def compute(self) -> str:
        """Dtype of forward and backward."""
        asked = self.job.precision.compute
        return asked if asked != "auto" else {"cuda": "bf16"}.get(self.world.device_type, "fp32")

    @cached_property
    def chunked_loss(self) -> bool:
        """Whether the head runs inside the loss, so that logits never exist whole."""
        return self.facts.is_hugging_face and self.facts.chunkable_head and self.job.model.loss is None

    @cached_property
    def sequences(self) -> Derived:
        """Global sequences of one step."""
        training, length = self.job.training, self.job.data.sequence_length
        if training.sequences_per_step is not None:
            return Derived(training.sequences_per_step, "given")
        if training.tokens_per_step is not None:
            rule = f"tokens_per_step {training.tokens_per_step} / sequence_length {length}"
            return Derived(training.tokens_per_step // length, rule)
        size, count = training.microbatch_size, training.gradient_accumulation
        if size is not None and count is not None:
            rule = f"microbatch_size {size} x gradient_accumulation {count} x {self.data_ranks} data ranks"
            return Derived(size * count * self.data_ranks, rule)
        return Derived(DEFAULT_SEQUENCES, "default, on any number of ranks")

    @cached_property
    def sequences_per_rank(self) -> int:
        return -(-self.sequences.value // self.data_ranks)

    @cached_property
    def microbatch(self) -> Derived:
        """Sequences in one forward of one rank."""
        training, rows = self.job.training, self.sequences_per_rank
        share = f"{self.sequences.value} sequences / {self.data_ranks} data ranks = {rows} a rank"
        if training.microbatch_size is not None:
            return Derived(training.microbatch_size, "given")
        if training.gradient_accumulation is not None:
            count = training.gradient_accumulation
            return Derived(-(-rows // count), f"{share}, cut into gradient_accumulation {count}")
        limit = MICROBATCH_TOKENS.get(self.world.device_type, MICROBATCH_TOKENS["cuda"])
        length = self.job.data.sequence_length
        return Derived(even_cut(rows, max(1, limit // length)), f"{share}, cut to at most {limit} tokens of {length} each")

    @cached_property
    def accumulation(self) -> Derived:
        """Microbatches of one step on each rank."""
        asked = self.job.training.gradient_accumulation
        if asked is not None:
            return Derived(asked, "given")
        return Derived(self.needed_accumulation, f"{self.sequences_per_rank} a rank / microbatch {self.microbatch.value}")

    @cached_property
    def needed_accumulation(self) -> int:
        """Fewest microbatches that hold all sequences of a step."""
        return -(-self.sequences_per_rank // self.microbatch.value)

    @cached_property
    def padding_rows(self) -> int:
        """Rows of one step that repeat another row and are not counted."""
        return self.microbatch.value * self.accumulation.value * self.data_ranks - self.sequences.value


def even_cut(rows: int, limit: int) -> int:
    """The microbatch (<= `limit`) that cuts `rows` best: the largest divisor unless that is below half of what fits.

    A small divisor (1 for a prime number of rows) would cost many short forwards; then a cut into the fewest equal
    parts, with some padding rows in the last, is cheaper.
    """
    if rows <= limit:
        return rows
    divisor = max(d for d in divisors(rows) if d <= limit)
    return divisor if 2 * divisor >= limit else -(-rows // -(-rows // limit))
