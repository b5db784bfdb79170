"""Parameters in the plan's dtype, and buffers with them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan

HALVES = (torch.float16, torch.bfloat16)


class ParameterDtypes(Transform):
    """Master weights in the dtype of `plan.dtypes.parameters`, frozen ones in that of `model.dtype`."""

    name = "dtypes"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            convert(stage.model, inputs.plan)
            for name, parameter in stage.model.named_parameters():
                if kept := inputs.facts.kept_dtype(name):
                    parameter.data = parameter.data.to(getattr(torch, kept))


def convert(model: nn.Module, plan: Plan) -> None:
    """Convert parameters and buffers, except buffers that are in the compute dtype already, and complex tensors.

    A module that its author has halved computes with halves of its buffers too; wider ones would widen activations.
    Buffers that an initializer will fill keep a dtype of 16 bits: its rounding is part of the model (RecurrentGemma).
    """
    compute = torch_dtype(plan.dtypes.compute)
    kept: list[tuple[nn.Module, str, Tensor]] = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_complex() or buffer.dtype == compute or (buffer.is_meta and buffer.dtype in HALVES)
    ]
    complex_parameters = [(parameter, parameter.data) for parameter in model.parameters() if parameter.is_complex()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Complex modules are a new feature|Casting complex values to real")
        model.to(torch_dtype(plan.dtypes.parameters))
    for parameter, values in complex_parameters:  # of which `to` has left the real parts
        parameter.data = values
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other
    for module, name, buffer in kept:
        setattr(module, name, buffer)
