"""Cases of the rules in `plan/rules/sequence.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import BRANCHED, CPU4, TWO, case

CASES = {
    "sequence-model": case(
        {"parallel": {**TWO, "sequence_parallel": True}}, {"parallel": TWO}, "not one chain", CPU4, BRANCHED
    ),
}
