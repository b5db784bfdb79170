"""Rules about the dtype of forward and backward, and the scaled loss of fp16."""

from __future__ import annotations

from shardwise.job.schema import LossScaleSection
from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.rule import Rule, idle

SCALE = "precision.loss_scale"
DYNAMIC_SCALE = tuple(f"{SCALE}.{name}" for name in LossScaleSection.model_fields if name != "static")

BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def _narrow(d: Draft) -> str:
    """Return a frozen weight that would be kept in fewer bits than forward computes in; empty where there is none."""
    kept = ((name, d.facts.kept_dtype(name)) for name in d.facts.weight_dtypes)
    return next((name for name, dtype in kept if dtype and BITS.get(dtype, 0) < BITS[d.compute]), "")


def _obstacle(d: Draft) -> str:
    """Return why the model's own code does not train in this job's compute dtype; empty where it does."""
    return d.facts.unfit_dtypes.get("bf16" if BITS[d.compute] == 16 else d.compute, "")


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("weights-factory", ("model.dtype", "model.factory"), "it is of models of transformers",
         lambda d: d.model.dtype is not None and d.model.factory is not None,
         fix="leave model.dtype out; the module's own parameters become masters"),
    Rule("weights-file", ("model.dtype",), "a dtype of files needs files",
         lambda d: d.model.dtype == "file" and d.model.path is None,
         fix="give model.path, or use fp32 or bf16"),
    Rule("weights-compute", ("model.dtype", "precision.compute"),
         "weights that are not trained are kept in as many bits as forward computes in, or more",
         lambda d: d.model.dtype is not None and _narrow(d),
         fix="use precision.compute bf16, or leave model.dtype out",
         because=lambda d: f"{_narrow(d)} is not trained and would be kept in {d.facts.kept_dtype(_narrow(d))}, and "
         f"this job computes in {d.compute}"),
    Rule("transformers-dtype", ("precision.compute",), "the model's own code has to train in that dtype",
         _obstacle,
         fix="use fp32",
         because=lambda d: f"transformers' own code of {d.facts.family} {_obstacle(d)} in {d.compute}"),
    Rule("grouped-fp64", ("precision.compute",), "grouped products of experts do not compute in fp64",
         lambda d: d.compute == "fp64" and d.facts.experts_grouped,
         fix="use fp32, or experts_implementation eager in the model's config"),
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
