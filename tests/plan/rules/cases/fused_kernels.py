"""Cases of the rules in `plan/rules/fused_kernels.py`."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.rules.jobs import CUDA4, FACTS, case

FUSIBLE = replace(FACTS, fusible={"layers.0.norm": "RMS norm"})

CASES = {
    "liger-model": case({"model": {"liger": True}}, {}, "no module of gpt_neox"),
    "liger-device": case({"model": {"liger": True}}, {}, "the ranks run on cpu", facts=FUSIBLE),
    "liger-installed": case({"model": {"liger": True}}, {}, "shardwise[liger]", CUDA4, FUSIBLE),
    "liger-compile": case(
        {"model": {"liger": True, "compile": True}}, {"model": {"compile": True}}, "use one of them", CUDA4, FUSIBLE
    ),
}
