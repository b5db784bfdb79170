"""Cases of the rules in `plan/rules/dtypes.py`."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, case

KEPT = {"embed_in.weight": "bfloat16"}
NARROW = replace(FACTS, frozen=frozenset(KEPT), weight_dtypes=KEPT)

CASES = {
    "weights-factory": case({"model": {**FACTORY["model"], "dtype": "bf16"}}, FACTORY, "models of transformers"),
    "weights-file": case({"model": {"dtype": "file"}}, {"model": {"dtype": "bf16"}}, "give model.path, or use fp32"),
    "weights-compute": case(
        {"model": {"dtype": "bf16"}, "precision": {"compute": "fp32"}},
        {"model": {"dtype": "bf16"}, "precision": {"compute": "bf16"}},
        "embed_in.weight is not trained and would be kept in bfloat16, and this job computes in fp32",
        CPU4,
        NARROW,
    ),
    "transformers-dtype": case(
        {"precision": {"compute": "fp16"}},
        {"precision": {"compute": "fp32"}},
        "gives gradients that are not finite in fp16; use fp32",
        CPU4,
        replace(FACTS, unfit_dtypes={"bf16": "gives gradients that are not finite"}),
    ),
    "grouped-fp64": case(
        {"precision": {"compute": "fp64"}},
        {"precision": {"compute": "fp32"}},
        "grouped products of experts do not compute in fp64; use fp32, or experts_implementation eager",
        CPU4,
        replace(FACTS, experts_grouped=True),
    ),
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
