"""Rules about float8: device, packages, and layers that gain from it."""

from __future__ import annotations

from shardwise.job.devices import Feature
from shardwise.model.attention_choice import installed
from shardwise.model.float8 import float8_summary
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import one_of

FP8 = "precision.fp8"
FP8_COMPUTE = {"torchao": ("bf16",), "transformer_engine": ("bf16",), "emulate": ("bf16", "fp32")}
# What `shardwise run` puts in the place of Transformer Engine has its name, and not that of its compiled part.
FP8_PACKAGES = {"torchao": "torchao", "transformer_engine": "transformer_engine_torch"}
FP8_INSTALL = {
    "torchao": "pip install 'shardwise[fp8]'",
    "transformer_engine": "pip install 'transformer_engine[pytorch]', which compiles against the installed torch",
}


def _no_float8(d: Draft) -> bool:
    return d.precision.fp8 in FP8_PACKAGES and (d.world.float8 is False or not d.world.kind.supports(Feature.FLOAT8))


def _float8_device(d: Draft) -> str:
    device = d.world.accelerator or d.world.device_type
    return f"{device} has no products of float8; GPUs have them from Ada, Hopper and CDNA 3 on"


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"fp8-{key}", f"precision.fp8_{key}", "nothing is in float8", lambda d: d.precision.fp8 == "none",
           "set precision.fp8, or leave it out") for key in ("scaling", "layers", "all_gather")),
    Rule("fp8-transformer-engine", (FP8, "precision.fp8_scaling"), "Transformer Engine has one scale a tensor here",
         lambda d: d.precision.fp8 == "transformer_engine" and d.precision.fp8_scaling != "tensorwise",
         fix="use precision.fp8_scaling tensorwise, or precision.fp8 torchao"),
    Rule("fp8-transformer-engine-compile", (FP8, "model.compile"), "the compiler cannot see into Transformer Engine",
         lambda d: d.precision.fp8 == "transformer_engine" and d.model.compile,
         fix="use precision.fp8 torchao, or model.compile false"),
    Rule("fp8-gathered", ("precision.fp8_all_gather", "parallel.sharded_data_parallel_degree"),
         "only sharded parameters are gathered",
         lambda d: d.precision.fp8 != "none" and d.precision.fp8_all_gather and d.sharded == 1,
         fix="leave fp8_all_gather out, or shard over more ranks"),
    Rule("fp8-device", (FP8, "parallel.device"), "products of float8 need a device that has them", _no_float8,
         fix="use emulate, which shows the numbers on any device, or none",
         because=_float8_device),
    Rule("fp8-installed", (FP8,), "what multiplies has to be installed",
         lambda d: d.precision.fp8 in FP8_PACKAGES and not d.world.is_described
         and not installed(FP8_PACKAGES[d.precision.fp8]),
         fix="pip install 'shardwise[fp8]' for torchao, or use emulate",
         because=lambda d: f"the package {FP8_PACKAGES[d.precision.fp8]} is not installed",
         use=lambda d: f"{FP8_INSTALL[d.precision.fp8]}, or use emulate"),
    Rule("fp8-compute", (FP8, "precision.compute"), "what is not in float8 is in bf16, or in emulation in fp32",
         lambda d: d.precision.fp8 != "none" and d.compute not in FP8_COMPUTE[d.precision.fp8],
         fix="use precision.compute bf16",
         because=lambda d: f"this job computes in {d.compute}, and {d.precision.fp8} takes "
         f"{one_of(FP8_COMPUTE[d.precision.fp8])}",
         use=lambda d: f"use precision.compute {one_of(FP8_COMPUTE[d.precision.fp8])}"),
    Rule("fp8-gains", (FP8, "precision.fp8_scaling", "precision.fp8_layers"), "some linear layer has to be in float8",
         lambda d: d.precision.fp8 != "none" and all(d.float8_left.values()),
         fix="use precision.fp8 none, or fp8_layers all",
         because=lambda d: float8_summary(d.float8_left)),
)
# fmt: on
