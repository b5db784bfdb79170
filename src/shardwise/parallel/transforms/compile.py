"""torch.compile of each block."""

from __future__ import annotations

import warnings

import torch

from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan

CUDA_GRAPHS = "reduce-overhead"  # torch's name for a compiled region in CUDA graphs


class CompiledBlocks(Transform):
    """Each block's forward compiled, below checkpointing and FSDP2's hooks, which then see one opaque region."""

    name = "compile"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.job.model.compile

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        # The choice of a kernel follows from its arguments alone: where it is traced, its cache may be left out.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        mode = CUDA_GRAPHS if inputs.plan.job.model.cuda_graphs else None
        for stage in build.stages:
            for block in stage.blocks(inputs.facts):
                block.forward = torch.compile(block.forward, mode=mode)  # type: ignore[method-assign]
