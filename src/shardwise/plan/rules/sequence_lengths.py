"""Rules about the warm-up of the sequence length: its stages, and what can be cut into shorter sequences."""

from __future__ import annotations

from itertools import pairwise

from shardwise.plan.draft import Draft
from shardwise.plan.rules.data import data_from_factory
from shardwise.plan.rules.rule import Rule
from shardwise.plan.rules.training import without_end
from shardwise.words import divisors, one_of

SCHEDULE, LENGTH = "training.sequence_length_schedule", "data.sequence_length"
CONTEXT_DEGREE, PIPELINE_DEGREE = "parallel.context_parallel_degree", "parallel.pipeline_parallel_degree"


def _without_end(d: Draft) -> list[int]:
    return without_end(d.training.sequence_length_schedule)


def _first_steps(d: Draft) -> list[int]:
    """The first step of each stage: it begins with the stage's first sample or behind it."""
    return [d.step_sizes.steps_for(stage.first_sample) for stage in d.sequence_lengths.stages]


def _empty_stages(d: Draft) -> list[tuple[int, int]]:
    """The numbers of the stages that are over before a step of theirs begins, and the sample with which it would."""
    pairs = enumerate(pairwise(_first_steps(d)))
    return [(number, d.step_sizes.samples_before(step)) for number, (step, later) in pairs if later <= step]


def _uneven(d: Draft) -> list[int]:
    """Lengths that do not divide a sample."""
    return [length for length in d.sequence_lengths.lengths if d.data.sequence_length % length]


def _not_longer(d: Draft) -> list[tuple[int, int]]:
    """Lengths that do not grow: of a stage, and of the one behind it."""
    return [(length, later) for length, later in pairwise(d.sequence_lengths.lengths) if later <= length]


def _is_never_over(d: Draft) -> bool:
    steps = d.steps.value  # 0: of data that has not been read
    return d.sequence_lengths.grow and 0 < steps <= _first_steps(d)[-1]


def _chunks(d: Draft) -> int:
    """Chunks into which the context ranks cut a sequence; one where it is whole."""
    degree = d.parallel.context_parallel_degree
    return 1 if degree == 1 else 2 * degree


def _unchunked(d: Draft) -> list[int]:
    """Lengths, shorter than a sample, that the context ranks would have to pad."""
    return [length for length in d.sequence_lengths.lengths[:-1] if length % _chunks(d)]


def _divisors(d: Draft) -> str:
    shorter = [length for length in divisors(d.data.sequence_length)[:-1] if length % _chunks(d) == 0]
    return f"use {one_of(shorter)}" if shorter else f"leave it out, or use another {LENGTH}"


def _has_other_hidden_states(d: Draft) -> bool:
    """Return whether a stage hands on something whose shape for shorter sequences is not known."""
    stages = d.facts.stages
    known = not stages.hidden or stages.has_flat_boundaries
    return not (known or (len(stages.hidden) == 2 and stages.hidden[0] == d.data.sequence_length))


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("sequence-length-end", (SCHEDULE,), "each stage of the sequence length has an end", _without_end,
         fix="give each stage one of until_samples and until_tokens",
         because=lambda d: f"number {_without_end(d)[0]} of them is over after samples, or after tokens"),
    Rule("sequence-length-factory", (SCHEDULE, "data.factory", "model.task"),
         "samples of a data.factory, and of files, are not cut",
         lambda d: d.sequence_lengths.grow and (data_from_factory(d) or d.reads_files),
         fix="let the factory return shorter samples, or leave it out"),
    Rule("sequence-length-rows", (SCHEDULE, "data.format"),
         "conversations and pairs are trained on whole, and their parts would lack the prompt",
         lambda d: d.sequence_lengths.grow and d.data.has_rows,
         fix="leave it out"),
    Rule("sequence-length-spans", (SCHEDULE, "model.task"), "a sample with spans left out is one text",
         lambda d: d.sequence_lengths.grow and d.model.task == "seq2seq_lm",
         fix="leave it out, or use model.task causal_lm or masked_lm"),
    Rule("sequence-length-divides", (SCHEDULE, LENGTH), "a sample is cut into sequences of one length, without a rest",
         _uneven,
         fix="use divisors of data.sequence_length",
         because=lambda d: f"{_uneven(d)[0]} does not divide {d.data.sequence_length}",
         use=_divisors),
    Rule("sequence-length-grows", (SCHEDULE, LENGTH),
         "sequences grow from stage to stage, and are whole samples behind the last", _not_longer,
         fix="put shorter sequences first, all of them shorter than data.sequence_length",
         because=lambda d: f"sequences of {_not_longer(d)[0][0]} tokens are followed by {_not_longer(d)[0][1]}, and "
         f"they have to grow, at last to {d.data.sequence_length}"),
    Rule("sequence-length-order", (SCHEDULE, "training.sequences_per_step"),
         "each stage of the sequence length has a step", _empty_stages,
         fix="give ends that grow from stage to stage, by a step at least; they count all samples of the run",
         because=lambda d: f"number {_empty_stages(d)[0][0]} of them is over before its first step begins, with sample "
         f"{_empty_stages(d)[0][1]}",
         use=lambda d: f"use until_samples of at least {_empty_stages(d)[0][1] + 1} there; they count all samples of "
         "the run"),
    Rule("sequence-length-run", (SCHEDULE, "training.steps", "training.epochs"),
         "the run goes on behind the last stage",
         _is_never_over,
         fix="use earlier ends, or more steps",
         because=lambda d: f"the run has {d.steps.value} steps, and whole samples begin with step "
         f"{_first_steps(d)[-1]}"),
    Rule("sequence-length-context", (SCHEDULE, CONTEXT_DEGREE),
         "each context rank has two equal chunks of a short sequence, since padding of all would make a step larger",
         _unchunked,
         fix="use multiples of twice the context degree",
         because=lambda d: f"{_unchunked(d)[0]} is no multiple of {_chunks(d)}, two chunks for each of "
         f"{d.parallel.context_parallel_degree} context ranks",
         use=_divisors),
    Rule("sequence-length-pipeline", (SCHEDULE, PIPELINE_DEGREE),
         "what travels between stages has the positions of a sequence, and its size follows from theirs",
         lambda d: d.sequence_lengths.grow and d.parallel.pipeline_parallel_degree > 1 and _has_other_hidden_states(d),
         fix="use pipeline_parallel_degree 1, or leave it out"),
    Rule("sequence-length-graphs", (SCHEDULE, "model.cuda_graphs"), "a graph is captured for sequences of one length",
         lambda d: d.sequence_lengths.grow and d.model.cuda_graphs,
         fix="use cuda_graphs false"),
)
# fmt: on
