"""Nemotron-H Omni: its forward casts images to the dtype that the tower's config says, not to that of its weights."""

from __future__ import annotations

from torch import nn

from shardwise.model.family import Family


def _leave_images_as_they_come(model: nn.Module, sequence_length: int) -> None:
    """Let the tower's config say no dtype: the cast is none then, and images come in that of the job's products."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "vision_model":
            module.config.dtype = None


FAMILY = Family(("nemotron_h_omni",), settle=_leave_images_as_they_come)
