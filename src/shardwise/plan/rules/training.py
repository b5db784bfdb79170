"""Rules about the batch: sequences of a step, microbatches and their number."""

from __future__ import annotations

from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.rule import Rule
from shardwise.words import one_of


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
         "a forward that decides by values for rows together is given its microbatches by the job, not by the layout",
         lambda d: d.facts.couples_rows and d.training.microbatch_size is None
         and d.data_ranks * d.accumulation.value > 1,
         fix="set training.microbatch_size",
         because=lambda d: f"{d.facts.definition} decides by values of all rows that are together, and of the "
         f"{d.sequences.value} rows of a step that would be those that a rank happens to have",
         use=lambda d: f"set training.microbatch_size, such as {d.microbatch.value}: it is then the same on every "
         "layout"),
)
# fmt: on
