"""Dtypes by name, and the loss scaler of fp16.

Every dtype of a run is named in `Plan.dtypes`; nothing is cast by autocast or by defaults.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from shardwise._torch_compat.operators import multiplies
from shardwise.job.schema import LossScaleSection

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of `fp64`, `fp32`, `bf16` or `fp16`."""
    return DTYPES[name]


def without_instructions(compute: str, device_type: str) -> str:
    """Return a sentence's end that says that this processor cannot multiply `compute` itself; empty where it can."""
    dtype = DTYPES.get(compute)  # none is "auto", which is fp32 on a CPU
    if device_type != "cpu" or dtype is None or multiplies(dtype):
        return ""
    return (
        f"this processor has no instructions for products of {compute}; matrix products and attention are computed in "
        f"fp32 and rounded to {compute}, so that fp32 itself is faster here"
    )


def has_float8(device: torch.device) -> bool:
    """Return True if `device` has products of float8: from Ada (compute capability 8.9) and CDNA 3 (gfx94) on."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return re.match(r"gfx9[45]", torch.cuda.get_device_properties(device).gcnArchName) is not None
    return torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass
class LossScaler:
    """Static or dynamic loss scale with SMP's arguments. Every rank feeds it the same verdict, so ranks agree.

    The dynamic rule is the usual one of mixed-precision training (Micikevicius et al., arXiv 1710.03740, section 3.2)
    with hysteresis: `delayed_shift` overflows are tolerated before the scale shrinks.
    """

    settings: LossScaleSection
    scale: float = 1.0
    good_steps: int = 0
    hysteresis: int = 1

    @classmethod
    def of(cls, compute: str, settings: LossScaleSection) -> LossScaler:
        """Return a scaler of 1 that never moves, unless `compute` is fp16."""
        if compute != "fp16":
            return cls(settings.model_copy(update={"static": 1.0}))
        return cls(settings, settings.static or settings.init_scale, hysteresis=settings.delayed_shift)

    def update(self, overflow: bool) -> None:
        """Account for one step; call on every rank with the same `overflow`."""
        if self.settings.static is not None:
            return
        if overflow:
            self._shrink()
            return
        self.good_steps += 1
        if self.settings.consecutive_hysteresis:
            self.hysteresis = self.settings.delayed_shift
        if self.good_steps % self.settings.scale_window == 0:
            self.hysteresis = self.settings.delayed_shift
            self.scale *= self.settings.scale_factor

    def _shrink(self) -> None:
        self.good_steps = 0
        if self.hysteresis > 1:
            self.hysteresis -= 1
        else:
            self.scale = max(self.scale / self.settings.scale_factor, self.settings.min_scale)

    def exhausted(self) -> bool:
        """Return True if the scale can shrink no further, so that overflows will not stop by themselves."""
        return self.settings.static is None and math.isclose(self.scale, self.settings.min_scale)
