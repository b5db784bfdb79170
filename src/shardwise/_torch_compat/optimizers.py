"""Optimizers: what their fused forms run on, what schedulers have put on them, and Muon's iterations."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon


def fuses_on_gpu(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return True if the class's fused form runs on a GPU: torch 2.11 refuses Adagrad's there, at the first step."""
    return "cuda_unsupported=True" not in inspect.getsource(optimizer_class)


def follow_schedulers(optimizer: Any) -> None:
    """Let a step of `optimizer` be its new class's where a learning-rate scheduler was made before that.

    torch's schedulers put a function on the object that calls the step of the class it then had, past this one. One
    takes its place that tells them the same. No public names: their marks (torch 2.11 to 2.13).
    """
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        return
    del optimizer.step
    own = type(optimizer).step

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return own(optimizer, *args, **kwargs)

    told: Any = step
    told._wrapped_by_lr_sched = True
    optimizer.step = step


def zeropower_via_newtonschulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return what torch's Muon makes of a matrix, in bf16. No public name (torch 2.11 to 2.14)."""
    iterations: Any = _muon._zeropower_via_newtonschulz  # type: ignore[attr-defined]
    result: Tensor = iterations(matrix, coefficients, steps, eps)
    return result
