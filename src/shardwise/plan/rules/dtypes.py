"""Rules about the dtype of forward and backward, and the scaled loss of fp16."""

from __future__ import annotations

from shardwise.job.schema import LossScaleSection
from shardwise.plan.draft import changed
from shardwise.plan.rules.rule import Rule, idle

SCALE = "precision.loss_scale"
DYNAMIC_SCALE = tuple(f"{SCALE}.{name}" for name in LossScaleSection.model_fields if name != "static")

# fmt: off
RULES: tuple[Rule, ...] = (
    idle("cast-float-arguments", "precision.cast_float_arguments",
         "it is for a module of model.factory that computes in 16 bits",
         lambda d: d.model.factory is None or d.compute not in ("bf16", "fp16")),
    Rule("loss-scale", ("precision.compute", SCALE), "only fp16 scales its loss",
         lambda d: d.compute != "fp16" and changed(d.job, SCALE),
         fix="use precision.compute fp16, or leave precision.loss_scale out",
         because=lambda d: f"only fp16 scales its loss, and this job computes in {d.compute}"),
    Rule("static-loss-scale", (SCALE,), "a static scale never changes, so the keys of the dynamic one do nothing",
         lambda d: d.precision.loss_scale.static is not None and changed(d.job, *DYNAMIC_SCALE),
         fix="leave static out, or the other keys"),
    Rule("loss-scale-range", (f"{SCALE}.init_scale", f"{SCALE}.min_scale"), "the first scale is not below the smallest",
         lambda d: d.precision.loss_scale.init_scale < d.precision.loss_scale.min_scale,
         fix="raise init_scale or lower min_scale",
         use=lambda d: f"use a min_scale of at most {d.precision.loss_scale.init_scale}"),
)
# fmt: on
