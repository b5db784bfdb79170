"""Cases of the rules in `plan/rules/attention.py`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.job.capability import refused
from shardwise.model.facts import AttentionFacts
from tests.plan.rules.jobs import CPU4, FACTS, KERNELS, case

CASES = {
    "factory-attention": case(
        {"model": {"factory": "a:b", "attention": "sdpa"}}, {"model": {"attention": "sdpa"}}, "attention=sdpa"
    ),
    "attention-family": case(
        {"model": {"attention": "blockwise"}},
        {"model": {"attention": "blockwise"}},
        "xlm is not among the families; use auto, sdpa or eager",
        CPU4,
        replace(FACTS, attention_kernels=refused("xlm is not among the families")),
        KERNELS,
    ),
    "attention-kernel": case(
        {"model": {"attention": "sdpa"}},
        {"model": {"attention": "blockwise"}},
        "layers.0.attn: it has no soft cap on scores; use auto, blockwise or eager",
        CPU4,
        replace(KERNELS, attention=(AttentionFacts("layers.0.attn", 8, 8, softcap=True),)),
    ),
    "attention-overflow": case(
        {"model": {"attention": "eager"}, "precision": {"compute": "fp16"}},
        {"model": {"attention": "eager"}, "precision": {"compute": "bf16"}},
        "overflow above 65504; use model.attention auto or sdpa, or precision.compute bf16",
    ),
}
