"""Rules about Liger's fused kernels."""

from __future__ import annotations

from shardwise.job.devices import Feature
from shardwise.model.attention_choice import installed
from shardwise.plan.rules.rule import Rule

LIGER = "model.liger"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("liger-model", (LIGER,), "the model has to have something that Liger's kernels compute",
         lambda d: d.model.liger and not d.facts.fusible,
         fix="use false",
         because=lambda d: f"no module of {d.facts.family} is a norm, MLP or rotation that Liger's kernels compute"),
    Rule("liger-device", (LIGER, "parallel.device"), "Liger's kernels run on a GPU",
         lambda d: d.model.liger and not d.world.kind.supports(Feature.LIGER),
         fix="use false",
         because=lambda d: d.world.kind.refusal(Feature.LIGER)),
    Rule("liger-installed", (LIGER,), "Liger has to be installed",
         lambda d: d.model.liger and not d.world.is_described and not installed("liger_kernel"),
         fix="pip install 'shardwise[liger]', or use false",
         because=lambda d: "the package liger-kernel is not installed"),
    Rule("liger-compile", (LIGER, "model.compile"), "a compiled block has fused kernels of its own",
         lambda d: d.model.liger and d.model.compile,
         fix="use one of them"),
)
# fmt: on
