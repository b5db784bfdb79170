"""Cases of the rules in `plan/rules/dtypes.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import case

CASES = {
    "cast-float-arguments": case(
        {"precision": {"cast_float_arguments": True}},
        {"model": {"factory": "a:b"}, "precision": {"compute": "bf16", "cast_float_arguments": True}},
        "computes in 16 bits",
    ),
    "loss-scale": case(
        {"precision": {"loss_scale": {"scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"scale_window": 10}}},
        "precision.loss_scale={'scale_window': 10}: only fp16 scales its loss, and this job computes in fp32",
    ),
    "static-loss-scale": case(
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8, "scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8}}},
        "leave static out",
    ),
    "loss-scale-range": case(
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 2, "min_scale": 4}}},
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 4, "min_scale": 4}}},
        "at most 2",
    ),
}
