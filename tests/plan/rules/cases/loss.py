"""Cases of the rules in `plan/rules/loss.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, FLAT, case

PREFERENCE = {"path": "p", "format": "preference"}
CASES = {
    "factory-label-smoothing": case(
        {**FACTORY, "training": {"label_smoothing": 0.1}}, {"training": {"label_smoothing": 0.1}}, "its own loss"
    ),
    "factory-z-loss": case({**FACTORY, "training": {"z_loss": 1e-4}}, {"training": {"z_loss": 1e-4}}, "its own loss"),
    "sample-loss": case(
        {**FACTORY, "training": {"loss_reduction": "sample"}}, {"training": {"loss_reduction": "sample"}}, "model.loss"
    ),
    "objective-data": case(
        {"training": {"objective": "sft"}}, {"training": {"objective": "pretraining"}}, "sft is for conversations"
    ),
    "preference-objective": case(
        {"data": PREFERENCE}, {"data": PREFERENCE, "training": {"objective": "sft"}}, "what was chosen"
    ),
    "loss-chunk": case(
        {**FACTORY, "memory": {"loss_chunk_tokens": 8}},
        {"memory": {"loss_chunk_tokens": 8}},
        "loss_chunk_tokens=8",
        CPU4,
        FLAT,
        FACTS,
    ),
}
