"""Cases of the rules in `plan/rules/loss.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, FLAT, case

CASES = {
    "factory-label-smoothing": case(
        {**FACTORY, "training": {"label_smoothing": 0.1}}, {"training": {"label_smoothing": 0.1}}, "its own loss"
    ),
    "factory-z-loss": case({**FACTORY, "training": {"z_loss": 1e-4}}, {"training": {"z_loss": 1e-4}}, "its own loss"),
    "loss-chunk": case(
        {**FACTORY, "memory": {"loss_chunk_tokens": 8}},
        {"memory": {"loss_chunk_tokens": 8}},
        "loss_chunk_tokens=8",
        CPU4,
        FLAT,
        FACTS,
    ),
}
