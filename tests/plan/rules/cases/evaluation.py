"""Cases of the rules in `plan/rules/evaluation.py`."""

from __future__ import annotations

from typing import Any

from tests.plan.rules.jobs import FLAT, case

PATIENT = {"early_stopping_patience": 2}
OFTEN = {"evaluate_every": 4}
OWN = {"model": {"factory": "a:b"}, "data": {"factory": "c:d"}}


def evaluated(training: dict[str, Any], **evaluation: Any) -> dict[str, Any]:
    """Return a job with keys of its evaluation."""
    return {"evaluation": evaluation, "training": training}


CASES = {
    "evaluation-sets": case(
        {**OWN, "evaluation": {"sets": {"other": "other.jsonl"}}}, OWN, "sets are text, read as data.path is",
        facts=FLAT,
    ),
    "evaluation-ema": case(
        {"evaluation": {"sets": {"ema": "a.jsonl"}}, "training": {"ema_decay": 0.9}},
        {"evaluation": {"sets": {"ema": "a.jsonl"}}},
        "name the set or the source otherwise",
    ),
    "evaluation-prompts": case(
        {"model": {"task": "masked_lm"}, "evaluation": {"prompts": ["a"]}}, {"evaluation": {"prompts": ["a"]}},
        "causal language models",
    ),
    "evaluation-answers": case(
        {"evaluation": {"answers": 8}}, {"data": {"format": "chat", "path": "a"}, "evaluation": {"answers": 8}},
        "set data.format to chat or prompt_completion",
    ),
    "evaluation-answers-all": case(
        {"data": {"format": "chat", "path": "a", "train_on": "all"}, "evaluation": {"answers": 8}},
        {"data": {"format": "chat", "path": "a", "train_on": "assistant"}, "evaluation": {"answers": 8}},
        "use another data.train_on",
    ),
    "evaluation-metric-answers": case(
        evaluated(OFTEN, metric="exact_match", **PATIENT), evaluated(OFTEN, metric="accuracy", **PATIENT),
        "set evaluation.answers",
    ),
    "evaluation-metric-set": case(
        evaluated(OFTEN, metric="validation_loss/books", **PATIENT),
        evaluated(OFTEN, metric="validation_loss/books", sets={"books": "a.jsonl"}, **PATIENT),
        "use a name of evaluation.sets or data.sources",
    ),
    "evaluation-metric": case(
        evaluated(OFTEN, metric="accuracy"), evaluated(OFTEN, metric="accuracy", **PATIENT), "nothing is judged by it"
    ),
    "evaluation-greater-is-better": case(
        evaluated(OFTEN, greater_is_better=True), evaluated(OFTEN, greater_is_better=True, **PATIENT),
        "set checkpoint.keep_best or evaluation.early_stopping_patience",
    ),
    "early-stopping": case(evaluated({}, **PATIENT), evaluated(OFTEN, **PATIENT), "set training.evaluate_every"),
    "early-stopping-threshold": case(
        evaluated(OFTEN, early_stopping_threshold=0.1), evaluated(OFTEN, early_stopping_threshold=0.1, **PATIENT),
        "no run ends early",
    ),
}  # fmt: skip
