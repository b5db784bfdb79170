"""Rules about expert parallelism: which models, ranks and degrees can share experts."""

from __future__ import annotations

from math import gcd

from shardwise.job.axes import Axis
from shardwise.model.experts import indivisible
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule
from shardwise.words import divisors, one_of

DEGREE = "parallel.expert_parallel_degree"


def _common_degrees(d: Draft) -> list[int]:
    """Return the degrees that divide the data ranks and the experts of every layer."""
    return divisors(gcd(d.data_axis, *d.facts.expert_stacks.values()))


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("expert-ranks", (DEGREE,), "experts are shared among the data ranks, and has to divide their number",
         lambda d: d.data_axis % d.parallel.expert_parallel_degree,
         fix="use a divisor of the number of data ranks",
         because=lambda d: f"experts are shared among the {d.data_axis} data ranks, which it does not divide",
         use=lambda d: f"use {one_of(divisors(d.data_axis))}"),
    Rule("expert-model", (DEGREE,), "the model has to keep its experts in stacks that a router of transformers' calls",
         lambda d: d.parallel.expert_parallel_degree > 1 and not d.facts.supports(Axis.EXPERT).ok,
         fix="use 1",
         because=lambda d: d.facts.supports(Axis.EXPERT).reason),
    Rule("expert-number", (DEGREE,), "has to divide the experts of every layer",
         lambda d: indivisible(d.facts.expert_stacks, d.parallel.expert_parallel_degree),
         fix="use a divisor of the number of experts",
         because=lambda d: "does not divide the "
         f"{d.facts.expert_stacks[indivisible(d.facts.expert_stacks, d.parallel.expert_parallel_degree)]} experts of "
         f"{indivisible(d.facts.expert_stacks, d.parallel.expert_parallel_degree)}",
         use=lambda d: f"use {one_of(_common_degrees(d))}"),
)
# fmt: on
