"""Checkpointed activations in host memory between forward and backward (parallel/activation_offload.py)."""

from __future__ import annotations

from shardwise.model.facts import ModelFacts
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class OffloadedActivations(Transform):
    """Each stage's mover of activations, which `checkpointing` calls where it keeps the input of a checkpoint."""

    name = "offload"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        memory = plan.job.memory
        return memory.offload_activations and memory.activation_checkpointing != "none"

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            stage.offload = ActivationOffload(inputs.device, inputs.plan.job.memory.activation_loading_horizon)
