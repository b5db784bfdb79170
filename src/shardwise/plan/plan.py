"""The Plan: what will run. Every value the job left open is derived here, and keeps the rule that gave it.

`resolve` is the one way from a Job to a Plan. It asks `shardwise.plan.rules` first, so a Plan that exists is legal;
everything downstream (layout, parallelize, data, training) reads the Plan and derives nothing itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shardwise.errors import require_type
from shardwise.job.axes import Axis, axis_degrees, data_axes, row_axes, state_axes
from shardwise.job.devices import CPU, CUDA
from shardwise.job.mixture import is_weighted, weights_by_sample
from shardwise.job.objects import is_reference
from shardwise.job.schema import Job, ParallelSection
from shardwise.job.sources import require_job
from shardwise.model.facts import ModelFacts
from shardwise.model.float8 import float8_summary
from shardwise.model.parameter_optimizers import optimizers_of_parameters
from shardwise.plan.draft import (
    SPLIT_SCHEDULES,
    V_SCHEDULES,
    Draft,
    World,
    changed,
    lookup,
    placement_order,
    stage_ranks,
)
from shardwise.plan.normalisation import NORMALISATIONS
from shardwise.plan.orthogonalization import NOTHING, Cost, Orthogonalization, orthogonalization
from shardwise.plan.rules import check
from shardwise.plan.rules.optimizer import optimizer_sections
from shardwise.plan.sequence_lengths import SequenceLengths
from shardwise.plan.step_sizes import StepSizes, microbatches_of
from shardwise.words import listed

__all__ = ["Dtypes", "Plan", "World", "collective_algorithm", "precheck", "resolve"]

OFFLOADS = ("memory.offload_activations", "memory.offload_parameters", "memory.offload_optimizer")
REFERENCE_OBJECTIVES = ("dpo",)  # whose loss compares with a model that is not trained


@dataclass(frozen=True)
class Dtypes:
    """ "fp64", "fp32", "bf16" or "fp16" for each role."""

    parameters: str
    compute: str
    reduction: str
    optimizer: str
    loss: str


@dataclass(frozen=True)
class Plan:
    """The plan of a run: what runs on which ranks, in which parts, in which dtypes."""

    job: Job
    world: World
    stages: tuple[tuple[str, ...], ...]  # names of the blocks of each pipeline stage; none without a pipeline
    stage_ranks: tuple[int, ...]  # the pipeline rank of each stage
    degrees: dict[Axis, int]  # of every axis; their product is world.size, but for `expert`, a second view of ranks
    placement: str  # D, P and T in order, right-most varying fastest
    dtypes: Dtypes
    steps: int  # optimizer steps of the run
    training_sequences: int | None  # of one of its epochs; None where it counts steps
    sequence_length: int  # tokens of a sample
    sequence_lengths: SequenceLengths  # of all steps, of which sequence_length is the last
    sequences_per_step: int  # global, of the steps behind any warm-up of the batch size
    step_sizes: StepSizes  # of all steps, of which sequences_per_step is the last
    microbatch: int  # sequences in one forward of one rank
    accumulation: int  # microbatches of one step on each rank, of those of sequences_per_step
    warmup_steps: int  # of the learning rate
    backend: str  # "gloo" | "shardwise" | "nccl" | "xccl"
    objective: str  # "pretraining" | "sft" | "dpo"
    normalisation: str  # the name of one of plan/normalisation.py
    sequence_parallel: bool  # hidden states are in parts between the split layers of blocks
    zero1: bool  # parameters gathered through the step; gradients' reduction and optimizer state sharded
    chunked_loss: bool  # the head runs inside the loss
    rules: dict[str, str]  # the rule behind each derived value
    notes: tuple[str, ...]  # sentences a user should read before the run
    float8: tuple[str, ...] = ()  # names of the linear layers that multiply in float8
    attention: str = ""  # kernel, or `auto` for a choice by call; empty where attention is transformers' own
    exact_dropout: bool = True  # attention dropout is equal on every layout
    balancing_coefficient: float = 0.0  # of the routers' balancing loss over the step; 0: there is none
    collectives: str = "flat"  # how they cross hosts: flat, two_level, direct or measured
    context_method: str = ""  # how attention reaches the other parts of a sequence; empty where it is whole
    sources: str = ""  # of the data and their shares; empty where there is one corpus
    orthogonalized: dict[str, str] = field(default_factory=dict)  # parameter of Muon's -> the way of its matrices
    orthogonalization: Cost = NOTHING  # of a rank in a step, in the mean
    optimizers: str = ""  # which of several optimizers updates what; empty where there is one
    offloaded_optimizer: str = ""  # the share of the optimizer's state in host memory; empty where there is none
    updates_in_backward: bool = False  # what is in host memory is updated while backward goes on
    reference: str = ""  # of a preference loss: "adapters_off" | "copy" | "precomputed"; empty: the objective has none

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return math.prod(self.degrees[axis] for axis in row_axes())

    @property
    def state_ranks(self) -> int:
        """Ranks over which parameters, gradients and optimizer state are sharded."""
        return math.prod(self.degrees[axis] for axis in state_axes())

    @property
    def positions(self) -> int:
        """Positions of a sample on one rank."""
        return self.positions_of(self.sequence_length)

    def positions_of(self, length: int) -> int:
        """Return the positions of a sequence on one rank; a split sequence is padded to two chunks a rank."""
        context = self.degrees[Axis.CONTEXT]
        return length if context == 1 else 2 * -(-length // (2 * context))

    @property
    def total_sequences(self) -> int | None:
        """Sequences of all epochs, the last of which may leave its last step ragged; None where steps are counted."""
        epochs, size = self.job.training.epochs, self.training_sequences
        return None if epochs is None or size is None else epochs * size

    def sequences_of(self, step: int) -> int:
        """Return the sequences of a step: all of them, or what the last epoch has left."""
        size, total = self.step_sizes.of(step), self.total_sequences
        return size if total is None else min(size, total - self.step_sizes.samples_before(step))

    def accumulation_of(self, step: int) -> int:
        """Return the microbatches of a step on each rank."""
        return self.accumulation_for(self.step_sizes.of(step))

    @property
    def accumulations(self) -> list[int]:
        """Microbatches of a step on each rank in each stage of the batch size."""
        return [self.accumulation_for(size) for size in self.step_sizes.sizes]

    def accumulation_for(self, sequences: int) -> int:
        """Return the microbatches on each rank of a step of so many sequences, one of those that steps have."""
        whole = sequences == self.sequences_per_step
        return self.accumulation if whole else microbatches_of(sequences, self.microbatch, self.data_ranks)

    @property
    def splits_backward(self) -> bool:
        """True where the gradients of weights are taken apart from those of activations, and later."""
        return self.degrees[Axis.PIPELINE] > 1 and self.job.parallel.pipeline in SPLIT_SCHEDULES

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in order; none without a pipeline."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    @property
    def in_v(self) -> bool:
        """True where the stages go down the ranks and up again."""
        return bool(self.stages) and self.job.parallel.pipeline in V_SCHEDULES

    @property
    def holds_whole(self) -> bool:
        """True where parameters stay gathered and gradients whole until the end of a step."""
        return self.zero1 or self.splits_backward

    @property
    def adds_whole(self) -> bool:
        """True where gradients stay whole until a step's last microbatch though nothing else asks for it.

        One rank has all of each, so that reducing it would only copy it. Offloaded ones would fill the device.
        """
        is_alone = self.needs_fsdp and self.state_ranks == 1
        return is_alone and not (self.holds_whole or self.job.memory.offload_parameters)

    @property
    def keeps_between_microbatches(self) -> bool:
        """True where parameters in the compute dtype stay from a microbatch to the next; the root's always do where
        this rank `adds_whole`."""
        return self.adds_whole and not self.job.parallel.reshard_after_forward

    @property
    def keeps_last_unit(self) -> bool:
        """True where the unit that forward gathers last stays gathered for backward.

        Backward begins with it and has nothing to hide a gather behind. A pipeline's forwards may be several ahead."""
        return self.degrees[Axis.PIPELINE] == 1

    @property
    def gathers_float8(self) -> bool:
        """True where the weights of float8 layers are gathered in float8."""
        return bool(self.float8) and self.job.precision.fp8_all_gather

    @property
    def masks_whole(self) -> bool:
        """True where attention has a mask of all queries and keys; our blocks make it for one block."""
        auto = self.attention == "auto" and self.world.device_type == "cpu"
        return not (auto or self.attention in ("blockwise", "flex"))

    @property
    def masks_rows(self) -> bool:
        """True where attention computes all keys of each of its queries, under a mask."""
        method = self.context_method
        hides = self.job.isolates_documents or self.job.reads_pairs or method == "all_gather"
        return self.masks_whole and hides and method != "ring"

    @property
    def keeps_float_arguments(self) -> bool:
        """True where arguments of a user's blocks that are not made from weights keep their dtype."""
        is_users = self.job.model.factory is not None
        return is_users and self.dtypes.compute in ("bf16", "fp16") and not self.job.precision.cast_float_arguments

    @property
    def needs_fsdp(self) -> bool:
        """True where FSDP2 has work: several data ranks, a compute dtype of its own, or parameters on the host."""
        ranks = math.prod(self.degrees[axis] for axis in data_axes())
        return ranks > 1 or self.dtypes.compute != self.dtypes.parameters or self.job.memory.offload_parameters

    @property
    def leaves_experts(self) -> bool:
        """True where each expert is on one rank alone, in its own dtype: FSDP2 would only copy its gradients."""
        ranks = math.prod(self.degrees[axis] for axis in (*data_axes(), Axis.TENSOR))
        is_alone = 1 < ranks == self.degrees[Axis.EXPERT]
        return is_alone and self.dtypes.compute == self.dtypes.parameters and not self.job.memory.offload_parameters

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON or YAML."""
        degrees = {str(axis): degree for axis, degree in self.degrees.items()}
        return asdict(self) | {"job": self.job.model_dump(mode="json"), "degrees": degrees, "notes": list(self.notes)}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for plans that run the same computation; what is shown and where it is written does not count."""
        data = self.to_dict()
        for key in ("rules", "notes"):
            del data[key]
        for key in ("output", "observe", "launch", "checkpoint"):
            del data["job"][key]
        for key in ("timeout_seconds", "max_restarts"):
            del data["job"]["parallel"][key]
        del data["world"]["gpus"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _shard_rule(draft: Draft) -> str:
    if draft.zero1:
        rule = f"shard_optimizer_state: all {draft.data_axis} data ranks"
    elif draft.parallel.sharded_data_parallel_degree is None:
        rule = f"sharded_data_parallel_degree unset: all {draft.data_axis} data ranks"
    else:
        rule = "sharded_data_parallel_degree given"
    context = draft.parallel.context_parallel_degree
    return rule if context == 1 else f"{rule}; / context degree {context}"


# The rule behind the degree of each axis.
DEGREE_RULES: dict[Axis, Callable[[Draft], str]] = {
    Axis.REPLICA: lambda draft: f"{draft.data_axis} data ranks / shard degree {draft.sharded}",
    Axis.SHARD: _shard_rule,
    Axis.CONTEXT: lambda draft: "context_parallel_degree",
    Axis.TENSOR: lambda draft: "tensor_parallel_degree",
    Axis.PIPELINE: lambda draft: "pipeline_parallel_degree",
    Axis.EXPERT: lambda draft: f"expert_parallel_degree, among the {draft.data_axis} data ranks",
}


def precheck(job: Job, world: World) -> None:
    """Raise LegalityError for what is wrong whatever the model is, before time goes into data and model."""
    check(Draft(job, world))


def resolve(job: Job, world: World, facts: ModelFacts, training_sequences: int | None = None) -> Plan:
    """Derive everything the job left open.

    Args:
        job, world, facts: what the user asks, and what there is to do it with.
        training_sequences: of the data, on which the steps of `training.epochs` depend; None: it has not been read.

    Raises:
        ConfigError: an argument is of another type.
        LegalityError: the combination of the job's keys cannot run.
    """
    require_job(job, "resolve")
    require_type(world, World, "world", "shardwise.launch.expected_world.expected_world(job, None) is this machine's")
    require_type(facts, ModelFacts, "facts", "shardwise.training.setup.study(job) gives those of the job's model")
    draft = Draft(job, world, facts, training_sequences)
    check(draft)
    rules: dict[str, str] = {}
    muon = orthogonalization(draft)
    return Plan(
        job=job,
        world=world,
        stages=_stages(draft, rules),
        stage_ranks=stage_ranks(job.parallel) if draft.parallel.pipeline_parallel_degree > 1 else (),
        degrees=_degrees(draft, rules),
        placement=_placement(draft, rules),
        dtypes=_dtypes(draft, rules),
        training_sequences=None if job.training.epochs is None else training_sequences,
        sequence_length=job.data.sequence_length,
        sequence_lengths=draft.sequence_lengths,
        backend=_backend(draft, rules),
        collectives=_collectives(draft, rules),
        objective=_objective(draft, rules),
        normalisation=draft.normalisation,
        sequence_parallel=draft.sequence_parallel,
        zero1=draft.zero1,
        chunked_loss=draft.chunked_loss,
        notes=tuple(_notes(draft)),
        float8=_float8(draft, rules),
        attention=_attention(draft, rules),
        exact_dropout=draft.exact_dropout,
        balancing_coefficient=_balancing(draft, rules),
        context_method=_context_method(draft, rules),
        reference=_reference(draft, rules),
        sources=_sources(draft, rules),
        orthogonalized={} if muon is None else muon.ways,
        orthogonalization=NOTHING if muon is None else muon.cost,
        optimizers=_optimizers(draft, muon, rules),
        offloaded_optimizer=_offloaded_optimizer(draft, rules),
        updates_in_backward=bool(draft.memory.offload_optimizer) and not _updates_wait(draft),
        step_sizes=draft.step_sizes,
        **_batch(draft, rules),
        rules=rules | _switch_rules(draft),
    )


def _sources(draft: Draft, rules: dict[str, str]) -> str:
    """The sources with their shares of the first samples, or their passes."""
    data = draft.data
    if not data.sources:
        return ""
    if not is_weighted(data):
        rules["sources"] = "passes of each in an epoch"
        return ", ".join(f"{source.label} x {source.repeat or 1:g}" for source in data.sources)
    stages = weights_by_sample(data)
    later = [f"from sample {start:,} on {_shares(weights)}" for start, weights in stages[1:]]
    rules["sources"] = "; ".join(["shares of the samples, within one sample of any 1,000", *later])
    return _shares(stages[0][1])


def _shares(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * weight / sum(weights.values()):.4g}%" for name, weight in weights.items())


def _degrees(draft: Draft, rules: dict[str, str]) -> dict[Axis, int]:
    degrees = axis_degrees(draft.job, draft.world.size)
    rules |= {str(axis): DEGREE_RULES[axis](draft) for axis in degrees}
    return degrees


def _context_method(draft: Draft, rules: dict[str, str]) -> str:
    if draft.parallel.context_parallel_degree == 1:
        return ""
    asked = draft.parallel.context_parallel_method
    if asked != "auto":
        rules["context_method"] = "context_parallel_method given"
        return asked
    if draft.facts.split_forward is not None:
        rules["context_method"] = "context_parallel_method auto: blocks are split, and inputs are not"
        return "all_gather"
    if draft.heads_divide and not draft.facts.own_attention_arguments:
        rules["context_method"] = "context_parallel_method auto: the heads divide"
        return "ulysses"
    rules["context_method"] = "context_parallel_method auto: ulysses cannot share these heads"
    return "all_gather"


BALANCED_OVER = {  # tokens of a balancing loss, by `router.balancing_loss`
    "auto": "all tokens of a step",
    "global": "all tokens of a step",
    "layer": "all tokens of a step, layer by layer",
    "sequence": "each sequence and layer",
    "model": "each microbatch",
}


def _balancing(draft: Draft, rules: dict[str, str]) -> float:
    if not draft.facts.routers:
        return 0.0
    if not draft.balances:
        rules["balancing_loss"] = "router.balancing_loss none, or auto and the model adds none"
        return 0.0
    asked = draft.job.router.balancing_coefficient
    source = "router_aux_loss_coef of the model's config" if asked is None else "router.balancing_coefficient"
    rules["balancing_loss"] = f"over {BALANCED_OVER[draft.job.router.balancing_loss]}, times {source}"
    return draft.facts.balancing_coefficient if asked is None else asked


def _float8(draft: Draft, rules: dict[str, str]) -> tuple[str, ...]:
    if draft.precision.fp8 == "none":
        return ()
    rules["float8"] = float8_summary(draft.float8_left)
    return tuple(name for name, reason in draft.float8_left.items() if not reason)


def _attention(draft: Draft, rules: dict[str, str]) -> str:
    if not draft.uses_kernels:
        rules["attention"] = f"transformers' own: {draft.facts.attention_kernels.reason}"
        return ""
    kernels: dict[str, str] = {}  # name -> the reason of the first layer that has it
    for _, choice in draft.attention_choices:
        if choice is not None:
            kernels.setdefault(choice.kernel.name, choice.reason)
    rules["attention"] = "; ".join(f"{name} ({reason})" for name, reason in kernels.items())
    return draft.model.attention


def _stages(draft: Draft, rules: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    if draft.parallel.pipeline_parallel_degree == 1:
        return ()
    weight = draft.parallel.memory_weight
    rules["stages"] = (
        f"auto_partition: the costliest stage costs least, {weight:g} memory and {1 - weight:g} compute"
        if draft.parallel.auto_partition
        else "partition and default_partition given"
    )
    rules["stages"] += "; they go down the ranks and up again" if draft.in_v else ""
    placed: list[list[str]] = [[] for _ in range(draft.stages)]
    for block, stage in zip(draft.facts.blocks, draft.partition, strict=True):
        placed[stage].append(block.name)
    return tuple(map(tuple, placed))


def _placement(draft: Draft, rules: dict[str, str]) -> str:
    strategy = draft.parallel.placement_strategy
    rules["placement"] = f"placement_strategy {strategy}; the right-most letter varies fastest with the rank"
    order = placement_order(strategy)
    assert order is not None  # the rule "placement" has judged it
    return order


def _dtypes(draft: Draft, rules: dict[str, str]) -> Dtypes:
    compute = draft.compute
    wide = "fp64" if compute == "fp64" else "fp32"
    auto = draft.precision.compute == "auto"
    rules["compute"] = f"precision.compute auto on {draft.world.device_type}" if auto else "precision.compute given"
    rules |= {
        "parameters": f"master weights are {wide} under {compute} compute",
        "reduction": f"gradients are summed in {wide} whatever computes them",
        "optimizer": "as the master weights",
        "loss": f"softmax and sums in {wide}",
    }
    return Dtypes(parameters=wide, compute=compute, reduction=wide, optimizer=wide, loss=wide)


def _batch(draft: Draft, rules: dict[str, str]) -> dict[str, int]:
    derived = {
        "steps": draft.steps,
        "sequences_per_step": draft.sequences,
        "microbatch": draft.microbatch,
        "accumulation": draft.accumulation,
        "warmup_steps": draft.warmup,
    }
    rules |= {key: number.rule for key, number in derived.items()}
    rules["sequence_length"] = "data.sequence_length"
    if draft.sequence_lengths.grow:
        rules["sequence_length_schedule"] = "given; each sample is cut into sequences of so many tokens"
    if draft.step_sizes.grow:
        counts = listed(map(str, draft.accumulations), most=len(draft.accumulations))
        last = draft.step_sizes.stages[-1].first_step
        rules["batch_size_schedule"] = f"given; microbatches a rank: {counts}; the last stage from step {last:,} on"
    return {key: number.value for key, number in derived.items()}


def _objective(draft: Draft, rules: dict[str, str]) -> str:
    asked = draft.training.objective
    if asked != "auto":
        rules["objective"] = "training.objective given"
        return asked
    of_data = ", ".join(draft.data.row_formats) or draft.data.format
    rules["objective"] = f"training.objective auto: data.format {of_data}"
    return draft.job.objective


def _reference(draft: Draft, rules: dict[str, str]) -> str:
    if draft.job.objective not in REFERENCE_OBJECTIVES:
        return ""
    if draft.training.dpo.precompute_reference:
        rules["reference"] = "training.dpo.precompute_reference: run once for all pairs, ahead of the first step"
        return "precomputed"
    if draft.adapter.kind != "none" and not draft.adapter.modules_to_save:
        rules["reference"] = "the model under the adapters, which is run without them ahead of each step"
        return "adapters_off"
    rules["reference"] = "the model as training starts, a frozen copy sharded alike, run ahead of each step"
    return "copy"


def _optimizers(draft: Draft, muon: Orthogonalization | None, rules: dict[str, str]) -> str:
    if muon is not None:
        rules["optimizers"] = muon.rule
        return muon.summary
    counts = Counter(own.name for own in optimizers_of_parameters(draft.facts, draft.optimizer).values())
    if len(counts) < 2:
        return ""
    rules["optimizers"] = "tensors by optimizer, as optimizer.groups says"
    return "; ".join(f"{name}: {count}" for name, count in counts.items())


def _offloaded_optimizer(draft: Draft, rules: dict[str, str]) -> str:
    share = float(draft.memory.offload_optimizer)
    if not share:
        return ""
    chosen = "all" if share == 1 else "whole tensors from the last block to the first"
    when = "beside backward; the state before is kept until the gradients are known to be finite"
    if waits := _updates_wait(draft):
        when = f"after backward: {waits}"
    rules["offloaded_optimizer"] = f"memory.offload_optimizer: {chosen}; updated {when}"
    return f"{share:.3g} of a rank's parameters"


def _updates_wait(draft: Draft) -> str:
    """Return why updates in host memory wait for the end of backward; empty where they do not."""
    if draft.optimizer.clip_norm is not None:
        return "optimizer.clip_norm needs the norm first"
    if any(is_reference(section.name) for section in optimizer_sections(draft)):
        return "a class of your own is called once a step"
    if draft.parallel.pipeline_parallel_degree > 1 and draft.parallel.pipeline in SPLIT_SCHEDULES:
        return "gradients of weights come at its end"
    cpus = draft.world.device_type == "cpu" and draft.world.hosts > 1
    return "between CPUs gradients are under way until its end" if cpus else ""


def _backend(draft: Draft, rules: dict[str, str]) -> str:
    asked = draft.parallel.ddp_dist_backend
    device = draft.world.device_type
    if asked != "auto":
        rules["backend"] = "ddp_dist_backend given"
        return asked
    rules["backend"] = f"ddp_dist_backend auto on {device}"
    if device != CPU:
        refusal = draft.world.nccl_refusal if device == CUDA else ""
        rules["backend"] += f": {refusal}; the engine moves their tensors through the host's memory" if refusal else ""
        return "shardwise" if refusal else draft.world.kind.backend
    rules["backend"] += ", the engine is usable" if draft.world.engine else ""
    return "shardwise" if draft.world.engine else "gloo"


def _collectives(draft: Draft, rules: dict[str, str]) -> str:
    algorithm, rules["collectives"] = collective_algorithm(draft.parallel, _backend(draft, {}), draft.world)
    return algorithm


def collective_algorithm(parallel: ParallelSection, backend: str, world: World) -> tuple[str, str]:
    """Return how collectives cross hosts, and the rule that says so."""
    asked = parallel.collective_algorithm
    if world.hosts == 1 or world.local_size == 1:
        return "flat", "all ranks are on one host" if world.hosts == 1 else "each host has one rank"
    if asked != "auto":
        return asked, "collective_algorithm given"
    if backend != "gloo":
        return "flat", f"collective_algorithm auto: {backend} chooses for itself"
    return "measured", f"collective_algorithm auto on gloo: timed at start, {world.hosts} hosts of {world.local_size}"


def _switch_rules(draft: Draft) -> dict[str, str]:
    chunk, asked = draft.memory.loss_chunk_tokens, draft.parallel.shard_optimizer_state
    chunked = f"head {draft.facts.head!r} runs inside the loss, on {chunk} rows at once"
    return {
        "normalisation": NORMALISATIONS[draft.normalisation].sentence,
        "hang_report": _hang_rule(draft),
        "sequence_parallel": f"sequence_parallel is {_on(draft.parallel.sequence_parallel)}, "
        f"{draft.parallel.tensor_parallel_degree} tensor ranks",
        "zero1": f"shard_optimizer_state is {_on(asked)}, {draft.data_axis} data ranks",
        "chunked_loss": chunked if draft.chunked_loss else _whole_logits(draft),
    }


def _hang_rule(draft: Draft) -> str:
    observe = draft.job.observe
    if not observe.hang_report:
        return "observe.hang_report is off"
    return f"after {observe.hang_medians:g} median steps and {observe.hang_seconds:g} s the launcher says who is where"


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _whole_logits(draft: Draft) -> str:
    if not draft.facts.returns_logits:
        return "a module of model.factory returns its own output"
    if draft.model.loss is not None:
        return "model.loss takes the whole output"
    return f"the last operation of {draft.facts.family} is not a plain output projection"


def _notes(draft: Draft) -> Iterator[str]:
    yield from _batch_notes(draft)
    yield from _source_notes(draft)
    yield from _parallel_notes(draft)
    yield from _memory_notes(draft)
    yield from _model_notes(draft)


def _batch_notes(draft: Draft) -> Iterator[str]:
    if draft.padding_rows:
        rows = draft.padding_rows + draft.sequences.value
        yield (
            f"{draft.padding_rows} of {rows} rows of a step are padding, computed but not counted: "
            f"{draft.sequences.value} sequences do not divide evenly over {draft.data_ranks} data ranks x "
            f"{draft.accumulation.value} microbatches of {draft.microbatch.value}."
        )
    for size, padding in zip(draft.step_sizes.sizes[:-1], draft.padding_of_stages):
        if padding:
            yield (
                f"training.batch_size_schedule: {padding} of {padding + size} rows of its steps of {size} sequences "
                "are padding, computed but not counted."
            )
    yield from _row_notes(draft)


def _row_notes(draft: Draft) -> Iterator[str]:
    facts, is_open = draft.facts, draft.training.microbatch_size is None
    is_spread = is_open and draft.data_ranks * draft.accumulation.value > 1  # in a way that the job does not say
    if facts.coupling_untried and is_spread:
        yield (
            f"Whether rows of a microbatch change each other's numbers was not tried: {facts.coupling_untried}. If "
            "they do (means over rows, losses between rows, random draws), set training.microbatch_size."
        )
    if facts.keeps_statistics and is_spread:
        yield (
            f"{facts.definition} takes statistics of the rows of a microbatch, which has {draft.microbatch.value} on "
            "this layout; training.microbatch_size makes it the same on every layout."
        )


def _source_notes(draft: Draft) -> Iterator[str]:
    if draft.job.checkpoint.change_sources:
        yield (
            "checkpoint.change_sources: the run goes on from a checkpoint of other data.sources or weights; each "
            "source goes on where the checkpoint has it, a new one begins, and from there on these shares hold."
        )


def _parallel_notes(draft: Draft) -> Iterator[str]:
    if draft.parallel.tensor_parallel_degree > 1 and draft.facts.heads_whole:
        yield (
            f"{draft.facts.heads_whole}: every tensor rank has all heads, and activations between linear layers whose "
            "outputs are gathered after each. Weights and their products are divided."
        )
    workers = draft.parallel.workers
    if workers not in (None, draft.world.local_size):
        yield f"parallel.workers={workers} is not used: the launcher started {draft.world.local_size} here."
    if draft.parallel.shard_optimizer_state and not draft.zero1:
        yield "parallel.shard_optimizer_state saves nothing: there is one data rank."
    asked = draft.parallel.collective_algorithm
    runs, why = collective_algorithm(draft.parallel, _backend(draft, {}), draft.world)
    if asked not in ("auto", runs):
        yield f"parallel.collective_algorithm={asked} does nothing: {why}."
    if draft.parallel.sequence_parallel and not draft.sequence_parallel:
        yield "parallel.sequence_parallel saves nothing: there is one tensor rank."
    if draft.sharded == 1:
        is_plain = draft.data_axis == 1 and draft.compute in ("fp32", "fp64")  # else a gathered block is a copy
        for key in changed(draft.job, *["parallel.reshard_after_forward"] * is_plain, "parallel.prefetch_depth"):
            yield f"{key}={lookup(draft.job, key)} does nothing: no parameter is sharded."


def _memory_notes(draft: Draft) -> Iterator[str]:
    if draft.world.device_type == "cpu":
        for key in changed(draft.job, *OFFLOADS):
            yield f"{key} saves nothing on a CPU, whose own memory is the host's; the copies are made."
    if draft.parallel.expert_parallel_degree > 1 and draft.memory.activation_checkpointing != "none":
        keeps = draft.memory.keep_expert_rows
        how = "kept for backward, and exchanged once" if keeps else "exchanged again in backward; routes are kept"
        yield f"memory.keep_expert_rows={str(keeps).lower()}: rows of checkpointed blocks' experts are {how}."
    if not draft.memory.offload_activations:
        for key in changed(draft.job, "memory.activation_loading_horizon"):
            yield f"{key}={lookup(draft.job, key)} does nothing without memory.offload_activations."


def _cast_arguments(draft: Draft) -> str:
    if draft.precision.cast_float_arguments:
        return f"every float argument of the module and its blocks is cast to {draft.compute}"
    of_module = f", and of the module's {', '.join(draft.facts.cast_arguments)}" if draft.facts.cast_arguments else ""
    return f"of the blocks' arguments what is made from weights is cast to {draft.compute}{of_module}; others stay"


def _model_notes(draft: Draft) -> Iterator[str]:
    if unread := draft.facts.unread_weights:
        yield (
            f"model.path={draft.model.path!r}: this model has no place for {listed(unread)}, which its files hold; "
            "where they belong to it, its config says otherwise than its weights."
        )
    if draft.model.factory is not None and draft.compute in ("bf16", "fp16"):
        yield f"precision.cast_float_arguments={draft.precision.cast_float_arguments}: {_cast_arguments(draft)}."
    if draft.precision.fp8 == "emulate":
        yield "precision.fp8=emulate shows the numbers of float8 and none of its speed: products run in fp32."
    if draft.precision.fp8 == "torchao" and not draft.model.compile:
        yield "precision.fp8=torchao without model.compile: casts are not fused, and eat most of what products gain."
    if draft.compute == "fp64" and draft.facts.experts_looped:
        yield "precision.compute=fp64: experts are computed one after the other (eager); grouped products have no fp64."
    if not draft.chunked_loss:
        yield f"Logits exist whole: {_whole_logits(draft)}."
    if draft.facts.has_attention_dropout and not draft.exact_dropout:
        yield (
            "Attention dropout runs inside a fused kernel, whose random numbers depend on the layout; "
            "model.attention=eager makes it equal on every layout."
        )
