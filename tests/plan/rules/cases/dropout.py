"""Cases of the rules in `plan/rules/dropout.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import case

CASES = {
    "factory-dropout": case({"model": {"factory": "a:b", "dropout": 0}}, {"model": {"dropout": 0}}, "dropout=0"),
}
