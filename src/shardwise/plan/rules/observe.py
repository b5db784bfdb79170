"""Rules about what is recorded: the profiler's steps and the sample at the end."""

from __future__ import annotations

from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle


def _bad_range(d: Draft) -> bool:
    steps = d.job.observe.profile
    return steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= (d.steps.value or steps[1]))


def _no_sample(d: Draft) -> bool:
    return not (d.job.observe.sample and d.generates_text)


def _no_sample_tokens(d: Draft) -> bool:
    return _no_sample(d) and not d.job.evaluation.prompts


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("profile", ("observe.profile", "training.steps"), "profile is [first, last], counted from 1 to training.steps",
         _bad_range,
         fix="use two steps from 1 to training.steps",
         use=lambda d: f"use e.g. [{max(1, d.steps.value - 1)}, {max(1, d.steps.value)}]"),
    *(idle(f"hang-{key}", f"observe.hang_{key}", "observe.hang_report is off, so nothing takes too long",
           lambda d: not d.job.observe.hang_report, "leave it out")
      for key in ("medians", "seconds")),
    *(idle(f"sample-{key}", f"observe.sample_{key}", "no sample is generated: only a causal language model of Hugging "
           "Face can, where observe.sample is on", is_unused, "leave it out")
      for key, is_unused in (("prompt", _no_sample), ("tokens", _no_sample_tokens))),
)
# fmt: on
