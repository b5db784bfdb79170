"""Cases of the rules in `plan/rules/optimizer.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

TEN = {"steps": 10}

SHAPES = {"embed_in.weight": (10, 10), "layers.0.weight": (4, 4), "layers.0.bias": (4,), "layers.1.weight": (4, 4)}
NAMED = replace(FACTS, parameter_shapes=SHAPES, frozen=frozenset({"layers.1.weight"}))
HIDDEN = replace(NAMED, linears={"layers.0": (4, 4)})


def grouped(*groups: tuple[str, dict[str, Any]], **optimizer: Any) -> dict[str, Any]:
    """Return a job with groups of one pattern each."""
    return {"optimizer": {"groups": [{"parameters": [name], **keys} for name, keys in groups], **optimizer}}


WHOLE = "tests.training.user_code:WholeTensors"
MUON = {"name": "Muon"}
SLOW, DECAYED = {"learning_rate": 1e-5}, {"weight_decay": 0.2}
CASES = {
    "optimizer-name": case({"optimizer": {"name": "AdamX"}}, {"optimizer": {"name": "Adam"}}, "did you mean 'Adam"),
    "optimizer-usable": case({"optimizer": {"name": "LBFGS"}}, {"optimizer": {"name": "SGD"}}, "closure"),
    "optimizer-elementwise": case(
        {"optimizer": {"name": WHOLE}},
        {"optimizer": {"name": WHOLE}, "parallel": {"sharded_data_parallel_degree": 1}},
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
    "schedule-free": case(
        {"optimizer": {"name": "ScheduleFreeAdamW"}},
        {"optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant"}},
        "use schedule constant",
    ),
    "ema-twice": case(
        {"optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant"}, "training": {"ema_decay": 0.9}},
        {"training": {"ema_decay": 0.9}},
        "leave training.ema_decay out",
    ),
    "groups-keys": case(
        grouped(("embed_in", {})),
        grouped(("embed_in", SLOW)),
        "a learning rate, a weight decay or an optimizer of its own",
        CPU4,
        NAMED,
    ),
    "groups-optimizer": case(
        grouped(("embed_in", {"optimizer": "AdamX"})),
        grouped(("embed_in", {"optimizer": "SGD"})),
        "AdamX",
        CPU4,
        NAMED,
    ),
    "muon-matrices": case(
        grouped(("layers.0", {"optimizer": "Muon"})),
        grouped(("layers.0.weight", {"optimizer": "Muon"})),
        "layers.0.bias has shape [4]",
        CPU4,
        HIDDEN,
    ),
    "muon-idle": case({"optimizer": MUON}, {"optimizer": MUON}, "use AdamW", CPU4, NAMED, HIDDEN),
    **{
        f"adamw-{key.replace('_', '-')}": case(
            {"optimizer": {"adamw": {key: value}}},
            {"optimizer": {**MUON, "adamw": {key: value}}},
            "Muon leaves",
            CPU4,
            HIDDEN,
        )
        for key, value in {"learning_rate": 1e-4, "weight_decay": 0.2, "options": {"betas": [0.9, 0.95]}}.items()
    },
    "groups-match": case(
        grouped(("embed_inn", SLOW)), grouped(("embed_in", SLOW)), "did you mean 'embed_in'?", CPU4, NAMED
    ),
    "groups-trained": case(
        grouped(("layers.1", SLOW)),
        grouped(("layers.[01]", SLOW)),
        "nothing is trained of the group of 'layers.1'",
        CPU4,
        NAMED,
    ),
    "groups-apart": case(
        grouped(("layers", SLOW), ("embed_in", SLOW), (".*weight", DECAYED)),
        grouped(("layers", SLOW), ("embed_in", DECAYED)),
        "embed_in.weight is in groups[1] and in groups[2]",
        CPU4,
        NAMED,
    ),
    "groups-decay": case(
        grouped((".*bias", DECAYED)),
        grouped((".*bias", SLOW)),
        "group of '.*bias' would act on no tensor",
        CPU4,
        NAMED,
    ),
    "warmup": case(
        {"optimizer": {"warmup_steps": 10}, "training": {"steps": 10}},
        {"optimizer": {"warmup_steps": 9}, "training": {"steps": 10}},
        "use at most 9 warmup_steps",
    ),
    "warmup-ratio": case(
        {"optimizer": {"warmup_steps": 2, "warmup_ratio": 0.1}},
        {"optimizer": {"warmup_ratio": 0.1}},
        "leave one of the two out",
    ),
    "own-schedule-ratio": case(
        {"optimizer": {"schedule": "tests.training.user_code:halved", "warmup_ratio": 0.1}},
        {"optimizer": {"schedule": "tests.training.user_code:halved"}},
        "has its own warm-up",
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
    "schedule-decay_steps": case(
        {"optimizer": {"decay_steps": 2}},
        {"optimizer": {"schedule": "warmup_stable_decay", "decay_steps": 2}},
        "only the schedule warmup_stable_decay has decay_steps",
    ),
    "schedule-decay_type": case(
        {"optimizer": {"decay_type": "cosine"}},
        {"optimizer": {"schedule": "warmup_stable_decay", "decay_type": "cosine"}},
        "use schedule warmup_stable_decay",
    ),
    "schedule-cycles": case(
        {"optimizer": {"cycles": 3}}, {"optimizer": {"schedule": "cosine_with_restarts", "cycles": 3}}, "has cycles"
    ),
    "schedule-milestones": case(
        {"optimizer": {"milestones": {2: 0.5}}},
        {"optimizer": {"schedule": "piecewise", "warmup_steps": 2, "milestones": {2: 0.5}}},
        "use schedule piecewise",
    ),
    "decay-length": case(
        {"optimizer": {"schedule": "warmup_stable_decay", "warmup_steps": 4, "decay_steps": 7}, "training": TEN},
        {"optimizer": {"schedule": "warmup_stable_decay", "warmup_steps": 4, "decay_steps": 6}, "training": TEN},
        "4 steps of warm-up and 7 of decay are more than 10; use at most 6 decay_steps",
    ),
    "milestones": case(
        {"optimizer": {"schedule": "piecewise"}},
        {"optimizer": {"schedule": "piecewise", "warmup_steps": 2, "milestones": {2: 0.5}}},
        "give some, such as",
    ),
    "milestones-reached": case(
        {"optimizer": {"schedule": "piecewise", "milestones": {10: 0.5}}, "training": TEN},
        {"optimizer": {"schedule": "piecewise", "milestones": {9: 0.5}}, "training": TEN},
        "use steps from 1 to 9",
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("groups-decay", grouped(("layers", DECAYED), name="Rprop", weight_decay=0), CPU4, NAMED),
    ("optimizer-values", {"optimizer": {"name": "AdamWBf16", "options": {"betas": [0.9, 0.999]}}}, CPU4, FACTS),
    ("optimizer-options", {"optimizer": {"options": {"lr": 1.0}}}, CPU4, FACTS),
    (
        "optimizer-elementwise",
        {"optimizer": {"name": WHOLE}, "parallel": {"shard_optimizer_state": True}},
        CPU4,
        FACTS,
    ),
]
