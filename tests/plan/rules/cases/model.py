"""Cases of the rules in `plan/rules/model.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import CPU4, DROPPING, FACTS, case

CASES = {
    "one-model": case({"model": {"path": "m", "config": "c"}}, {"model": {"path": "m"}}, "keep one"),
    "model-loss": case({"model": {"loss": "a:b"}}, {"model": {"factory": "a:b", "loss": "a:c"}}, "model.loss=a:b"),
    "model-factory-arguments": case(
        {"model": {"factory_arguments": {"x": 1}}},
        {"model": {"factory": "a:b", "factory_arguments": {"x": 1}}},
        "'x': 1",
    ),
    "factory-task": case(
        {"model": {"factory": "a:b", "task": "masked_lm"}}, {"model": {"config": "c", "task": "masked_lm"}}, "own head"
    ),
    "remote-code": case(
        {"model": {"trust_remote_code": True}}, {"model": {"path": "m", "trust_remote_code": True}}, "model.path"
    ),
    "layer-drop": case({}, {}, "gpt_neox drops blocks at random (LayerDrop)", CPU4, DROPPING, FACTS),
}
