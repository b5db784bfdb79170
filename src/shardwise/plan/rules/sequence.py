"""Rules about sequence parallelism, which shares the positions between split layers among the tensor ranks."""

from __future__ import annotations

from shardwise.plan.rules.rule import Rule

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("sequence-model", ("parallel.sequence_parallel", "parallel.tensor_parallel_degree"),
         "between split layers the model works on each position by itself, from block to block",
         lambda d: d.sequence_parallel and not d.facts.sequence_parallel.ok,
         fix="use sequence_parallel false",
         because=lambda d: d.facts.sequence_parallel.reason),
)
# fmt: on
