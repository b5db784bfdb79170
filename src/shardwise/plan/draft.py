"""Numbers that the legality table and the plan both read: the machine, and what follows from it, job and model.

A `Draft` computes each derived number once, leniently; `shardwise.plan.rules` judges them, `shardwise.plan` keeps them.
So a rule can never look at another number than the one that runs. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from shardwise.job.axes import DATA_LETTER, placed_axes, same_rows_ranks, spec_of
from shardwise.job.data_section import DataSection
from shardwise.job.devices import DeviceKind, device_kind, kernels_of
from shardwise.job.objects import is_reference
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.schema import (
    AdapterSection,
    Job,
    MemorySection,
    ModelSection,
    ParallelSection,
    PrecisionSection,
    TrainingSection,
)
from shardwise.job.tasks import TASKS, ModelTask
from shardwise.model.adapter_config import adapter_settings
from shardwise.model.attention_choice import AttentionNeeds, KernelChoice, choose_kernel
from shardwise.model.balance import balance, block_costs
from shardwise.model.facts import AttentionFacts, ModelFacts
from shardwise.model.float8 import left_out
from shardwise.plan.sequence_lengths import SequenceLengths, sequence_lengths
from shardwise.plan.step_sizes import StepSizes, microbatches_of, step_sizes
from shardwise.words import divisors, listed

DEFAULT_SEQUENCES = 16
FILLING = 4  # microbatches for each pipeline rank; the bubble is then below a fifth of a step
WARMUP_SHARE = 6  # a sixth of the steps; measured: with a tenth the loss of the default job still jumps
MOST_WARMUP = 2000  # 2 / (1 - beta2) for Adam's 0.999 (Ma and Yarats, arXiv 1910.04209)
PLACEMENTS = {"CLUSTER": "DPT", "SPREAD": "TPD"}
V_SCHEDULES = ("zbv", "dualpipev")  # stages go down the ranks and up again; two on each
SPLIT_SCHEDULES = ("zero_bubble", *V_SCHEDULES)  # weights' gradients are taken apart from those of activations


@dataclass(frozen=True)
class World:
    """The ranks, hosts and devices that there are to run on."""

    size: int
    device_type: str  # the name of a kind in `shardwise.job.devices`
    local_size: int
    accelerator: str = ""  # its name as its vendor gives it
    hosts: int = 1
    engine: bool = False  # can its ranks use the native engine (`shardwise.collectives.engine`)
    float8: bool | None = None  # do its devices multiply in float8; None: not known yet
    gpus: int = 0  # that the ranks of a host have; 0 on a CPU, and where it is not known
    is_described: bool = False  # of a cluster elsewhere, whose installed packages are not known here

    @property
    def kind(self) -> DeviceKind:
        """The record of what the ranks compute on."""
        return device_kind(self.device_type)

    @property
    def shares_gpus(self) -> bool:
        """True where several ranks of a host compute on one GPU."""
        return 0 < self.gpus < self.local_size

    @property
    def nccl_refusal(self) -> str:
        """The reason why NCCL cannot join these ranks; empty where it can."""
        if self.shares_gpus:
            return f"{self.local_size} ranks of a host share {self.gpus} GPU(s), and NCCL joins one rank of each"
        return "ranks of another host share a GPU, and NCCL joins one rank of each" if self.engine else ""


class DerivedNumber(NamedTuple):
    """A number and the rule that gave it."""

    value: int
    rule: str


def lookup(job: Job, key: str) -> Any:
    """Return the value at a dotted key."""
    return _getter(key)(job)


@cache
def _getter(key: str) -> Callable[[Job], Any]:
    return attrgetter(key)


@cache
def _default_job() -> Job:
    return Job.model_validate({})


@cache
def _default(key: str) -> Any:
    return lookup(_default_job(), key)


def changed(job: Job, *keys: str) -> list[str]:
    """Return those of the dotted keys whose value is not the default."""
    return [key for key in keys if lookup(job, key) != _default(key)]


def placement_order(strategy: str) -> str | None:
    """Return D, P and T in order, right-most varying fastest; None when `strategy` does not hold each of them once."""
    order = PLACEMENTS.get(strategy.upper(), strategy.upper())
    return order if sorted(order) == ["D", "P", "T"] else None


def group_size(strategy: str) -> int | None:
    """Return N of a checkpoint strategy `group_N`; None for anything else."""
    prefix, _, count = strategy.partition("_")
    return int(count) if prefix == "group" and count.isdecimal() and int(count) > 0 else None


class UnknownFacts(Exception):
    """A number was asked for that needs the model, before the model was looked at."""


@dataclass(frozen=True)
class Draft:
    """Job, world and model together, with the numbers that follow from them, not yet judged.

    `model_facts` None is a model that is not known yet: what needs it raises UnknownFacts.
    """

    job: Job
    world: World
    model_facts: ModelFacts | None = None
    training_sequences: int | None = None  # of the data, where it has been read

    @cached_property
    def facts(self) -> ModelFacts:
        if self.model_facts is None:
            raise UnknownFacts
        parallel = self.job.parallel
        return self.model_facts.for_degrees(parallel.tensor_parallel_degree, parallel.context_parallel_degree)

    @property
    def model(self) -> ModelSection:
        return self.job.model

    @cached_property
    def adapter(self) -> AdapterSection:
        """The job's section, with the keys of the directory from which it starts."""
        return adapter_settings(self.job.adapter)

    @property
    def parallel(self) -> ParallelSection:
        return self.job.parallel

    @property
    def memory(self) -> MemorySection:
        return self.job.memory

    @property
    def precision(self) -> PrecisionSection:
        return self.job.precision

    @property
    def training(self) -> TrainingSection:
        return self.job.training

    @property
    def optimizer(self) -> OptimizerSection:
        return self.job.optimizer

    @property
    def data(self) -> DataSection:
        return self.job.data

    @cached_property
    def split_degree(self) -> int:
        """Ranks that hold different parts of the model's modules: tensor x pipeline."""
        letters = PLACEMENTS["CLUSTER"].replace(DATA_LETTER, "")
        return math.prod(spec_of(axis).degree(self.job) or 1 for axis in placed_axes(letters))

    @cached_property
    def data_axis(self) -> int:
        """SMP's D: replica x shard x context."""
        return max(1, self.world.size // self.split_degree)

    @cached_property
    def data_ranks(self) -> int:
        """Ranks that read different samples: replica x shard."""
        return max(1, self.world.size // same_rows_ranks(self.job))

    @cached_property
    def sharded(self) -> int:
        """Ranks over which state is sharded: shard x context."""
        asked = self.parallel.sharded_data_parallel_degree
        return self.data_axis if self.parallel.shard_optimizer_state or asked is None else asked

    @property
    def sequence_parallel(self) -> bool:
        """True where tensor ranks share the sequence between split layers."""
        return self.parallel.sequence_parallel and self.parallel.tensor_parallel_degree > 1

    @cached_property
    def zero1(self) -> bool:
        """True where only optimizer state and the reduction of gradients are sharded."""
        return self.parallel.shard_optimizer_state and self.data_axis > 1

    @cached_property
    def heads_divide(self) -> bool:
        """True where the heads of a tensor rank can be shared among the context ranks."""
        tensor = 1 if self.facts.heads_whole else self.parallel.tensor_parallel_degree
        degree = tensor * self.parallel.context_parallel_degree
        return self.facts.attention_heads % degree == 0 and self.facts.key_value_heads % degree == 0

    @cached_property
    def stages(self) -> int:
        """Pipeline stages of all ranks."""
        return len(stage_ranks(self.parallel))

    @property
    def in_v(self) -> bool:
        """True where the stages go down the ranks and up again."""
        return self.parallel.pipeline_parallel_degree > 1 and self.parallel.pipeline in V_SCHEDULES

    @cached_property
    def partition(self) -> list[int]:
        """The stage of every block, not yet judged; of an automatic cut never decreasing, and no stage empty."""
        parallel, blocks = self.parallel, self.facts.blocks
        if not parallel.auto_partition:
            rest = -1 if parallel.default_partition is None else parallel.default_partition
            return [parallel.partition.get(block.name, rest) for block in blocks]
        costs, first, last = block_costs(
            self.facts, self.facts.positions(self.data.sequence_length), parallel.memory_weight
        )
        fixed = max(0, self.facts.stages.first_blocks - 1)  # of the first stage, which has one more
        sizes = balance(costs[fixed:], stage_ranks(parallel), first + sum(costs[:fixed]), last)
        sizes[:1] = [fixed + size for size in sizes[:1]]
        return [stage for stage, size in enumerate(sizes) for _ in range(size)]

    @cached_property
    def in_flight(self) -> int:
        """Most forwards that await their backward on one pipeline rank, the first."""
        return max(in_flight(self.parallel, count) for count in self.accumulations)

    @cached_property
    def compute(self) -> str:
        """Dtype of forward and backward."""
        asked = self.precision.compute
        return asked if asked != "auto" else self.world.kind.compute

    @property
    def normalisation(self) -> str:
        """The name of what divides the loss (plan/normalisation.py)."""
        return "pair" if self.job.reads_pairs else self.training.loss_reduction

    @cached_property
    def chunked_loss(self) -> bool:
        """True where the head runs inside the loss, so that logits never exist whole."""
        return self.facts.returns_logits and self.facts.chunkable_head and self.model.loss is None

    @property
    def uses_kernels(self) -> bool:
        """True where kernels of this project compute the model's attention."""
        return self.facts.attention_kernels.ok

    def attention_needs(self, layer: AttentionFacts) -> AttentionNeeds:
        """Return what one attention layer of this job needs of its kernel."""
        window = layer.window is not None and layer.window < self.data.sequence_length
        return AttentionNeeds(
            kernels_of(self.world.device_type),
            self.compute,
            self.job.isolates_documents or window,
            layer.bias,
            layer.softcap,
            layer.dropout,
            layer.head_size,
            layer.value_size,
        )

    @cached_property
    def attention_choices(self) -> tuple[tuple[AttentionFacts, KernelChoice | None], ...]:
        """Each attention layer with its kernel, None where the one asked for cannot do it; empty without kernels."""
        if not self.uses_kernels:
            return ()
        layers, alike = self.facts.attention, self.facts.attention_alike
        chosen = {
            number: choose_kernel(self.model.attention, self.attention_needs(layers[number])) for number in set(alike)
        }
        return tuple((layer, chosen[number]) for layer, number in zip(layers, alike))

    @cached_property
    def exact_dropout(self) -> bool:
        """True where attention dropout is equal on every layout: not where a fused kernel draws it."""
        if not self.uses_kernels:
            return self.model.attention == "eager"
        return all(choice.kernel.dropout == "exact" for _, choice in self.attention_choices if choice)

    @property
    def task(self) -> ModelTask:
        """The record of the job's task."""
        return TASKS[self.model.task]

    @property
    def reads_files(self) -> bool:
        """True where samples are rows that name files of images or of sound."""
        return self.task.reads_files and self.data.factory is None

    @property
    def generates_text(self) -> bool:
        """True for a causal language model of Hugging Face, which can continue a prompt."""
        return self.model.task == "causal_lm" and self.model.factory is None

    @property
    def balances(self) -> bool:
        """True where a loss balances the experts."""
        asked = self.job.router.balancing_loss
        return self.facts.adds_balancing_loss if asked == "auto" else asked != "none"

    @cached_property
    def float8_left(self) -> dict[str, str]:
        """Each linear layer of the blocks -> why it is not in float8; empty where it is."""
        everything = self.precision.fp8_layers == "all"
        scaling = "" if everything else self.precision.fp8_scaling
        return left_out(self.facts, scaling, self.parallel.tensor_parallel_degree)

    @cached_property
    def sequences(self) -> DerivedNumber:
        """Global sequences of one step."""
        training, length = self.training, self.data.sequence_length
        if training.sequences_per_step is not None:
            return DerivedNumber(training.sequences_per_step, "given")
        if training.tokens_per_step is not None:
            rule = f"tokens_per_step {training.tokens_per_step} / sequence_length {length}"
            return DerivedNumber(training.tokens_per_step // length, rule)
        size, count = training.microbatch_size, training.gradient_accumulation
        if size is not None and count is not None:
            rule = f"microbatch_size {size} x gradient_accumulation {count} x {self.data_ranks} data ranks"
            return DerivedNumber(size * count * self.data_ranks, rule)
        return DerivedNumber(DEFAULT_SEQUENCES, "default, on any number of ranks")

    @cached_property
    def step_sizes(self) -> StepSizes:
        """The sizes of the steps, of which `sequences` is the last."""
        return step_sizes(self.training, self.data.sequence_length, self.sequences.value)

    @cached_property
    def sequence_lengths(self) -> SequenceLengths:
        """The lengths of the sequences, of which `data.sequence_length` is the last."""
        return sequence_lengths(self.training, self.data.sequence_length)

    @cached_property
    def sequences_per_rank(self) -> int:
        return -(-self.sequences.value // self.data_ranks)

    @cached_property
    def rows_of_stages(self) -> list[int]:
        """Sequences a rank in a step of each stage of the batch size."""
        return [-(-size // self.data_ranks) for size in self.step_sizes.sizes]

    @cached_property
    def accumulations(self) -> list[int]:
        """Microbatches of a step on each rank in each stage of the batch size."""
        smaller = self.step_sizes.sizes[:-1]
        return [
            *(microbatches_of(size, self.microbatch.value, self.data_ranks) for size in smaller),
            self.accumulation.value,
        ]

    @cached_property
    def microbatch(self) -> DerivedNumber:
        """Sequences in one forward of one rank."""
        training, rows = self.training, self.sequences_per_rank
        share = f"{self.sequences.value} sequences / {self.data_ranks} data ranks = {rows} a rank"
        if training.microbatch_size is not None:
            return DerivedNumber(training.microbatch_size, "given")
        if training.gradient_accumulation is not None:
            count = training.gradient_accumulation
            return DerivedNumber(-(-rows // count), f"{share}, cut into gradient_accumulation {count}")
        if self.step_sizes.grow:
            every, rows = self.rows_of_stages, math.gcd(*self.rows_of_stages)
            share = f"a divisor of {listed(map(str, every))} sequences a rank, {rows}"
        limit = self.world.kind.microbatch_tokens
        most, rule = max(1, limit // self.data.sequence_length), f"of at most {limit} tokens (or one sequence)"
        if (degree := self.parallel.pipeline_parallel_degree) > 1:
            pieces = FILLING * degree
            most = min(most, max(1, min(self.rows_of_stages) // pieces))
            rule = f"{rule}, {pieces} or more to fill {degree} pipeline ranks"
        return DerivedNumber(even_cut(rows, most), f"{share}, in pieces {rule}")

    @cached_property
    def accumulation(self) -> DerivedNumber:
        """Microbatches of one step on each rank."""
        asked = self.training.gradient_accumulation
        if asked is not None:
            return DerivedNumber(asked, "given")
        rule = f"{self.sequences_per_rank} sequences a rank / microbatch {self.microbatch.value}"
        return DerivedNumber(self.needed_accumulation, rule)

    @cached_property
    def needed_accumulation(self) -> int:
        """Fewest microbatches that hold all sequences of a step."""
        return -(-self.sequences_per_rank // self.microbatch.value)

    @cached_property
    def possible_accumulations(self) -> list[int]:
        """Numbers of microbatches that leave none empty, whatever the microbatch."""
        rows = self.sequences_per_rank
        return sorted({-(-rows // size) for size in range(1, rows + 1)})

    @cached_property
    def steps(self) -> DerivedNumber:
        """Optimizer steps; 0 for epochs of data that has not been read."""
        epochs, size = self.training.epochs, self.training_sequences
        if epochs is None:
            return DerivedNumber(self.training.steps, "training.steps")
        if size is None:
            return DerivedNumber(0, f"training.epochs {epochs}: known once the data is read")
        sizes = self.step_sizes
        steps = sizes.steps_for(epochs * size)
        left = epochs * size - sizes.samples_before(steps - 1)
        a_step = listed(map(str, sizes.sizes))
        rule = f"{epochs} epoch{'s' * (epochs > 1)} x {size:,} training sequences / {a_step} a step"
        return DerivedNumber(steps, f"{rule}, the last step with {left}" if left < sizes.of(steps - 1) else rule)

    @cached_property
    def warmup(self) -> DerivedNumber:
        """Steps of linear warm-up."""
        asked, steps = self.optimizer.warmup_steps, self.steps.value
        if is_reference(self.optimizer.schedule):
            return DerivedNumber(0, "a schedule of the job's own has its own warm-up")
        if asked != "auto":
            return DerivedNumber(asked, "given")
        if (ratio := self.optimizer.warmup_ratio) is not None:
            return DerivedNumber(math.ceil(ratio * steps), f"warmup_ratio {ratio:g} of {steps:,} steps")
        rule = f"warmup_steps auto: a sixth of {steps:,} steps, at most {MOST_WARMUP:,}"
        return DerivedNumber(min(steps // WARMUP_SHARE, MOST_WARMUP), rule)

    @cached_property
    def padding_rows(self) -> int:
        """Rows of one step that repeat another row and are not counted."""
        return self.padding_of_stages[-1]

    @cached_property
    def padding_of_stages(self) -> list[int]:
        """The same in each stage of the batch size."""
        stages = zip(self.accumulations, self.step_sizes.sizes, strict=True)
        return [self.microbatch.value * count * self.data_ranks - size for count, size in stages]


def stages_of_a_rank(parallel: ParallelSection) -> int:
    """Return the pipeline stages on each rank, `virtual_pipeline_degree` where it is given."""
    return parallel.virtual_pipeline_degree or (2 if parallel.pipeline in V_SCHEDULES else 1)


def stage_ranks(parallel: ParallelSection) -> tuple[int, ...]:
    """Return the pipeline rank of every stage: in turns around the ranks, or down the ranks and up again."""
    ranks = range(parallel.pipeline_parallel_degree)
    down = (*ranks, *reversed(ranks)) if parallel.pipeline in V_SCHEDULES else (*ranks, *ranks)
    return tuple(down[stage % len(down)] for stage in range(len(ranks) * stages_of_a_rank(parallel)))


def in_flight(parallel: ParallelSection, microbatches: int, rank: int = 0) -> int:
    """Return the most forwards of a stage that await their backward on pipeline rank `rank`.

    All of them for `simple`; one for each rank that is behind, and its own, for 1F1B (arXiv 2104.04473, section 2.2.1);
    with virtual stages its warm-up and one (section 2.2.2, as torch's schedules build it). In a V equally many on every
    rank: one for each stage (arXiv 2401.10241, section 6), and for DualPipeV one more, whose forward goes before the
    backward that would make room for it.
    """
    ranks, virtual = parallel.pipeline_parallel_degree, stages_of_a_rank(parallel)
    if parallel.pipeline == "simple":
        return microbatches
    if parallel.pipeline in V_SCHEDULES:
        return min(microbatches * virtual, virtual * ranks + (parallel.pipeline == "dualpipev"))
    if virtual == 1:
        return min(microbatches, ranks - rank)
    round_size = microbatches // max(1, microbatches // ranks)
    apart = 1 if parallel.pipeline == "zero_bubble" else 2  # steps by which a rank's warm-up is longer than the next's
    return min(microbatches * virtual, (virtual - 1) * round_size + apart * (ranks - 1 - rank) + 1)


def even_cut(rows: int, limit: int) -> int:
    """Return the microbatch that cuts `rows` best: their largest divisor up to `limit`, unless below half of it.

    A small divisor (1 for a prime number of rows) would cost many short forwards; then a cut into the fewest equal
    parts, with some padding rows in the last, is cheaper.
    """
    if rows <= limit:
        return rows
    divisor = max(d for d in divisors(rows) if d <= limit)
    return divisor if 2 * divisor >= limit else -(-rows // -(-rows // limit))
