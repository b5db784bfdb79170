"""Cases of the rules in `plan/rules/loss.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.job.schema import AdapterSection
from shardwise.model.adapter_config import adapter_settings
from shardwise.model.adapters import with_adapters
from tests.plan.rules.cases.adapters import LINEARS
from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, FLAT, case

PREFERENCE = {"path": "p", "format": "preference"}
CHAT = {"path": "p", "format": "chat"}
SAVED = str(Path(__file__).parents[1] / "adapter_with_saved_modules")


def preference(**training: Any) -> dict[str, Any]:
    """Keys of a job of preferences."""
    return {"data": PREFERENCE, "training": training}


CASES = {
    "factory-label-smoothing": case(
        {**FACTORY, "training": {"label_smoothing": 0.1}}, {"training": {"label_smoothing": 0.1}}, "its own loss"
    ),
    "factory-z-loss": case({**FACTORY, "training": {"z_loss": 1e-4}}, {"training": {"z_loss": 1e-4}}, "its own loss"),
    "sample-loss": case(
        {**FACTORY, "training": {"loss_reduction": "sample"}}, {"training": {"loss_reduction": "sample"}}, "model.loss"
    ),
    "objective-data": case(
        {"data": CHAT, "training": {"objective": "dpo"}}, {"data": PREFERENCE}, "rows of chosen and rejected"
    ),
    "dpo-loss": case(preference(objective="sft", dpo={"loss": "ipo"}), preference(dpo={"loss": "ipo"}), "dpo alone"),
    "dpo-beta": case(preference(objective="sft", dpo={"beta": 0.5}), preference(dpo={"beta": 0.5}), "dpo alone"),
    "dpo-label-smoothing": case(
        preference(objective="sft", dpo={"label_smoothing": 0.1}), preference(dpo={"label_smoothing": 0.1}), "dpo alone"
    ),
    "dpo-length-normalised": case(
        preference(objective="sft", dpo={"length_normalised": True}),
        preference(dpo={"length_normalised": True}),
        "dpo alone",
    ),
    "dpo-precompute-reference": case(
        preference(objective="sft", dpo={"precompute_reference": True}),
        preference(dpo={"precompute_reference": True}),
        "dpo alone",
    ),
    "ipo-smoothing": case(
        preference(dpo={"loss": "ipo", "label_smoothing": 0.1}), preference(dpo={"loss": "ipo"}), "no labels to smooth"
    ),
    "pair-label-smoothing": case(
        preference(label_smoothing=0.1),
        preference(objective="sft", label_smoothing=0.1),
        "training.dpo.label_smoothing",
    ),
    "pair-z-loss": case(preference(z_loss=1e-4), preference(objective="sft", z_loss=1e-4), "no cross-entropy"),
    "pair-loss-reduction": case(
        preference(loss_reduction="sample"), preference(objective="sft", loss_reduction="sample"), "a mean over pairs"
    ),
    "pair-factory": case(
        {**FACTORY, "data": PREFERENCE}, {"data": PREFERENCE}, "logits of a language model of transformers"
    ),
    "reference-adapter": case(
        {"data": PREFERENCE, "adapter": {"path": SAVED}},
        {"data": CHAT, "adapter": {"path": SAVED}},
        "export --merge",
        CPU4,
        with_adapters(LINEARS, adapter_settings(AdapterSection(path=SAVED))),
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
