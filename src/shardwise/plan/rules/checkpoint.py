"""Rules about the checkpoints of a run."""

from __future__ import annotations

from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle


def _unscored(d: Draft) -> bool:
    every, evaluations = d.job.checkpoint.every, d.training.evaluate_every
    return d.job.checkpoint.keep_best and (not every or not evaluations or every % evaluations != 0)


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"checkpoint-{key.replace('_', '-')}", f"checkpoint.{key}", "no checkpoint is written at intervals",
           lambda d: not d.job.checkpoint.every, "set checkpoint.every, or leave it out")
      for key in ("keep_last", "keep_every", "asynchronous")),
    Rule("checkpoint-keep-best", ("checkpoint.keep_best", "checkpoint.every", "training.evaluate_every"),
         "every checkpoint has to have a validation loss", _unscored,
         fix="set training.evaluate_every to a divisor of checkpoint.every"),
    idle("checkpoint-staging", "checkpoint.staging_bytes", "a synchronous checkpoint stages a few blocks only",
         lambda d: not d.job.checkpoint.asynchronous),
)
# fmt: on
