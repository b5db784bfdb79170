"""Rules about parameters that are not trained."""

from __future__ import annotations

from shardwise.model.parameter_patterns import matching_parameters, modules_of
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, spelling


def _unmatched(d: Draft) -> list[str]:
    return [pattern for pattern in d.model.freeze if not matching_parameters(d.facts, pattern)]


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("freeze-matches", ("model.freeze",), "each pattern has to match the whole name of a parameter or a module",
         lambda d: d.model.freeze and _unmatched(d),
         fix="use a name of the model's",
         because=lambda d: f"{_unmatched(d)[0]!r} matches no parameter and no module",
         use=lambda d: spelling(_unmatched(d)[0], modules_of(d.facts))),
    Rule("freeze-all", ("model.freeze",), "something has to be left to train",
         lambda d: d.model.freeze and d.facts.frozen >= d.facts.parameter_shapes.keys(),
         fix="freeze fewer modules"),
)
# fmt: on
