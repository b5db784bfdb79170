"""Cases of the rules in `plan/rules/optimizer.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

CASES = {
    "optimizer-name": case({"optimizer": {"name": "AdamX"}}, {"optimizer": {"name": "Adam"}}, "did you mean 'Adam"),
    "optimizer-usable": case({"optimizer": {"name": "LBFGS"}}, {"optimizer": {"name": "SGD"}}, "closure"),
    "optimizer-elementwise": case(
        {"optimizer": {"name": "Adafactor"}},
        {"optimizer": {"name": "Adafactor"}, "parallel": {"sharded_data_parallel_degree": 1}},
        "cut over 4 ranks",
    ),
    "optimizer-options": case(
        {"optimizer": {"options": {"beta": [0.9, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "no option 'beta'; did you mean 'betas'?",
    ),
    "optimizer-values": case(
        {"optimizer": {"options": {"betas": [2.0, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "Invalid beta",
    ),
    "weight-decay": case(
        {"optimizer": {"name": "Rprop", "weight_decay": 0.2}}, {"optimizer": {"name": "Rprop"}}, "no weight decay"
    ),
    "warmup": case(
        {"optimizer": {"warmup_steps": 10}, "training": {"steps": 10}},
        {"optimizer": {"warmup_steps": 9}, "training": {"steps": 10}},
        "use at most 9 warmup_steps",
    ),
    "own-schedule": case(
        {"optimizer": {"schedule": "tests.training.user_code:halved", "warmup_steps": 2}},
        {"optimizer": {"schedule": "tests.training.user_code:halved"}},
        "has its own warm-up",
    ),
    "final-learning-rate": case(
        {"optimizer": {"schedule": "constant", "final_learning_rate_ratio": 0.5}},
        {"optimizer": {"schedule": "linear", "final_learning_rate_ratio": 0.5}},
        "linear or cosine",
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("optimizer-elementwise", {"optimizer": {"name": "tests.training.user_code:WholeTensors"}}, CPU4, FACTS),
    ("optimizer-options", {"optimizer": {"options": {"lr": 1.0}}}, CPU4, FACTS),
    (
        "optimizer-elementwise",
        {"optimizer": {"name": "Adafactor"}, "parallel": {"shard_optimizer_state": True}},
        CPU4,
        FACTS,
    ),
]
