"""Cases of the rules in `plan/rules/traced_stages.py`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.facts import StageFacts
from tests.plan.rules.jobs import FACTS, case, staged

TRACED = replace(FACTS, stages=StageFacts(traced=True))

CASES = {
    "traced-modules": case(
        {**staged(), "memory": {"activation_checkpointing": "full"}},
        staged(),
        "use checkpointing none",
        facts=TRACED,
    ),
    "traced-schedule": case(staged(pipeline="zero_bubble"), staged(), "pipeline interleaved or simple", facts=TRACED),
}
