"""Rules about the batch: sequences of a step, microbatches and their number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwise.job.warmup_stages import WarmupStage
from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.rule import Rule
from shardwise.words import one_of

SCHEDULE = "training.batch_size_schedule"


def _token_fix(d: Draft) -> str:
    length, tokens = d.data.sequence_length, d.training.tokens_per_step or 0
    whole = tokens // length * length
    return f"use {one_of(size for size in (whole, whole + length) if size)}"


def _sizes_disagree(d: Draft) -> bool:
    tokens, sequences = d.training.tokens_per_step, d.training.sequences_per_step
    return tokens is not None and sequences is not None and tokens != sequences * d.data.sequence_length


def _accumulation_fix(d: Draft) -> str:
    if d.training.microbatch_size is not None:
        return f"use gradient_accumulation {d.needed_accumulation}, or leave it out"
    counts, asked = d.possible_accumulations, d.accumulation.value
    around = [count for count in counts if count < asked][-1:] + [count for count in counts if count > asked][:1]
    return f"use gradient_accumulation {one_of(around)}"


def without_end(stages: Sequence[WarmupStage]) -> list[int]:
    """Return the numbers of the stages that end nowhere, or in two places."""
    ends = [(stage.until_samples, stage.until_tokens) for stage in stages]
    return [number for number, (samples, tokens) in enumerate(ends) if (samples is None) == (tokens is None)]


def _without_end(d: Draft) -> list[int]:
    return without_end(d.training.batch_size_schedule)


def _empty_stages(d: Draft) -> list[int]:
    """The numbers of the stages of the batch size that are over before they begin."""
    ends = [stage.end(d.data.sequence_length) for stage in d.training.batch_size_schedule]
    return [number for number, end in enumerate(ends) if end <= d.step_sizes.stages[number].first_sample]


def _not_larger(d: Draft) -> list[tuple[int, int]]:
    """Sizes of steps that do not grow: of a stage, and of the one behind it."""
    return [(size, later) for size, later in pairwise(d.step_sizes.sizes) if later <= size]


def _smallest(d: Draft) -> int:
    return d.step_sizes.sizes[0]


def _is_never_over(d: Draft) -> bool:
    steps = d.steps.value  # 0: of data that has not been read
    return d.step_sizes.grow and 0 < steps <= d.step_sizes.stages[-1].first_step


def _may_couple_rows(d: Draft) -> bool:
    """Return whether rows change each other's numbers; True where a forward decides by values and was not tried."""
    return d.facts.rows_together or bool(d.facts.coupling_untried and d.facts.probe_failure)


def _coupling(d: Draft) -> str:
    if d.facts.drops_by_microbatch:
        return "drops of tensors without rows in their first dim, so that dropout depends on the rows together"
    if d.facts.couples_rows:
        return "or its loss gives other numbers for rows together than for each of them"
    if d.facts.draws_numbers:
        return "or its loss draws random numbers for the rows of a microbatch together"
    return f"decides by values, maybe for rows together, which could not be tried ({d.facts.coupling_untried})"


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("epochs-steps", ("training.epochs", "training.steps"), "the length of a run is counted in one of them",
         lambda d: d.training.epochs is not None and changed(d.job, "training.steps"),
         fix="leave one of the two out"),
    Rule("tokens-per-step", ("training.tokens_per_step", "data.sequence_length"), "a step holds whole sequences",
         lambda d: (d.training.tokens_per_step or 0) % d.data.sequence_length,
         fix="use a multiple of data.sequence_length",
         use=_token_fix),
    Rule("step-size", ("training.tokens_per_step", "training.sequences_per_step", "data.sequence_length"),
         "tokens_per_step is sequences_per_step x sequence_length", _sizes_disagree,
         fix="give one of the first two"),
    Rule("batch-size-end", (SCHEDULE,), "each stage of the batch size has an end", _without_end,
         fix="give each stage one of until_samples and until_tokens",
         because=lambda d: f"number {_without_end(d)[0]} of them is over after samples, or after tokens"),
    Rule("batch-size-tokens", (SCHEDULE, "data.factory"), "samples of a data.factory have no tokens",
         lambda d: d.data.factory is not None and any(s.until_tokens for s in d.training.batch_size_schedule),
         fix="give until_samples"),
    Rule("batch-size-order", (SCHEDULE,), "each stage of the batch size has a step", _empty_stages,
         fix="give until_samples that grow from stage to stage; they count all samples of the run",
         because=lambda d: f"number {_empty_stages(d)[0]} of them is over before it begins, with sample "
         f"{d.step_sizes.stages[_empty_stages(d)[0]].first_sample}",
         use=lambda d: "use until_samples of at least "
         f"{d.step_sizes.stages[_empty_stages(d)[0]].first_sample + 1} there; they count all samples of the run"),
    Rule("batch-size-grows", (SCHEDULE, "training.sequences_per_step"),
         "steps grow from stage to stage, and are largest behind the last", _not_larger,
         fix="put smaller steps first, all of them smaller than training.sequences_per_step",
         because=lambda d: f"a step of {_not_larger(d)[0][0]} sequences is followed by one of {_not_larger(d)[0][1]}, "
         f"and steps have to grow, at last to {d.sequences.value}"),
    Rule("batch-size-run", (SCHEDULE, "training.steps", "training.epochs"), "the run goes on behind the last stage",
         _is_never_over,
         fix="use earlier ends, or more steps",
         because=lambda d: f"the run has {d.steps.value} steps, and steps of {d.sequences.value} sequences begin with "
         f"step {d.step_sizes.stages[-1].first_step}"),
    Rule("batch-size-ranks", (SCHEDULE,), "every data rank has to have a sequence at every stage",
         lambda d: d.step_sizes.grow and _smallest(d) < d.data_ranks <= d.sequences.value,
         fix="begin with more sequences a step, or use fewer workers",
         because=lambda d: f"a step of {_smallest(d)} sequences leaves some of the {d.data_ranks} data ranks idle",
         use=lambda d: f"begin with at least {d.data_ranks} sequences a step, or use at most {_smallest(d)} workers"),
    Rule("batch-size-microbatch", (SCHEDULE, "training.microbatch_size", "training.gradient_accumulation"),
         "a microbatch is at most a rank's share of a step at every stage",
         lambda d: d.step_sizes.grow and d.rows_of_stages[0] < d.microbatch.value <= d.sequences_per_rank,
         fix="use a smaller microbatch, or begin with more sequences a step",
         because=lambda d: f"a step of {_smallest(d)} sequences gives each data rank {d.rows_of_stages[0]}, and a "
         f"microbatch has {d.microbatch.value} at every stage",
         use=lambda d: f"use training.microbatch_size {d.rows_of_stages[0]} or less, or begin with at least "
         f"{d.microbatch.value * d.data_ranks} sequences a step"),
    Rule("idle-ranks", ("training.sequences_per_step",), "every data rank has to have a sequence",
         lambda d: d.sequences.value < d.data_ranks,
         fix="use more sequences a step, or fewer workers",
         because=lambda d: f"a step of {d.sequences.value} sequences leaves some of the {d.data_ranks} data ranks idle",
         use=lambda d: f"use at least {d.data_ranks} sequences a step, or at most {d.sequences.value} workers"),
    Rule("microbatch", ("training.microbatch_size",), "a microbatch is at most a rank's share of a step",
         lambda d: d.microbatch.value > d.sequences_per_rank,
         fix="use a smaller microbatch, or more sequences a step",
         because=lambda d: f"a step of {d.sequences.value} sequences gives each data rank {d.sequences_per_rank}",
         use=lambda d: f"use at most {d.sequences_per_rank}, or more sequences a step"),
    Rule("accumulation", ("training.microbatch_size", "training.gradient_accumulation"),
         "the microbatches of a step hold all its sequences, and none of them is empty",
         lambda d: d.accumulation.value != d.needed_accumulation,
         fix="leave one of the two out",
         because=lambda d: f"{d.accumulation.value} microbatches of {d.microbatch.value} do not fit the "
         f"{d.sequences_per_rank} sequences a rank ({d.sequences.value} a step / {d.data_ranks} data ranks)",
         use=_accumulation_fix),
    Rule("coupled-rows", ("training.microbatch_size",),
         "which rows are together in a microbatch is given by the job, not by the layout, where they change each "
         "other's numbers",
         lambda d: _may_couple_rows(d) and d.training.microbatch_size is None
         and d.data_ranks * d.accumulation.value > 1,
         fix="set training.microbatch_size",
         because=lambda d: f"{d.facts.definition or d.facts.family} {_coupling(d)}, and of the {d.sequences.value} "
         "rows of a step those would be together that a rank happens to have",
         use=lambda d: f"set training.microbatch_size, such as {d.microbatch.value}: it is then the same on every "
         "layout"),
)
# fmt: on
