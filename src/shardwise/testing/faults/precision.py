"""Faults of dtypes: numbers of 16 bits where wider ones were promised, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.kernels import loss
from shardwise.parallel.transforms import sharding
from shardwise.testing.faults.patching import Fault, hooked, wrapped
from shardwise.training.objectives import language_modelling
from shardwise.training.optimizer import ShardedOptimizer


def _policy(**dtypes: torch.dtype) -> Fault:
    """Let FSDP2 have other dtypes."""

    def wrapper(original: Callable[..., Any], plan: Any) -> MixedPrecisionPolicy:
        planned = original(plan)
        kept = {"param_dtype": planned.param_dtype, "reduce_dtype": planned.reduce_dtype}
        return MixedPrecisionPolicy(**{**kept, **dtypes})

    return lambda: wrapped(sharding, "_mixed_precision", wrapper)


def _coarse_module() -> AbstractContextManager[None]:
    """Let one module of a block give numbers of 16 bits."""

    def rounded(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.bfloat16().to(output.dtype)

    return hooked("1.mlp", rounded)


def _loss_dtype() -> AbstractContextManager[None]:
    return wrapped(loss, "loss_dtype", lambda original, dtype: torch.bfloat16)


def _rounded_after_update(tensors: Callable[[ShardedOptimizer], Any]) -> Fault:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        for tensor in tensors(self):
            tensor.data.copy_(tensor.data.bfloat16())

    return lambda: wrapped(ShardedOptimizer, "step", wrapper)


def _moments(optimizer: ShardedOptimizer) -> list[Tensor]:
    states = optimizer.inner.state.values()
    return [value for state in states for name, value in state.items() if name.startswith("exp_avg")]


def _without_term(**terms: float) -> Fault:
    """Leave a term out of the loss."""

    def wrapper(original: Callable[..., Any], self: Any, model: Any) -> None:
        original(self, model)
        self.terms = self.terms._replace(**terms)

    return lambda: wrapped(language_modelling.LanguageModelling, "__init__", wrapper)


PRECISION_FAULTS: dict[str, Fault] = {
    "coarse_reduction": _policy(reduce_dtype=torch.bfloat16),
    "wide_compute": _policy(param_dtype=torch.float32),
    "half_compute": _policy(param_dtype=torch.float16),
    "coarse_module": _coarse_module,
    "coarse_loss": _loss_dtype,
    "coarse_master_weights": _rounded_after_update(lambda optimizer: [entry.local for entry, _ in optimizer.locals]),
    "coarse_moments": _rounded_after_update(_moments),
    "missing_z_loss": _without_term(z_loss=0.0),
    "missing_smoothing": _without_term(smoothing=0.0),
}
