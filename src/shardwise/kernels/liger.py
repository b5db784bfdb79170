"""Liger's Triton kernels (Hsu et al., arXiv 2410.10989) in place of a model's norms, gated MLPs and rotary positions.

A module keeps its class, its names and its parameters; its forward is replaced on the instance, below everything that
tensor parallelism, checkpointing and FSDP2 put around it. `model/fusible.py` says which modules. The loss stays ours
(kernels/loss.py): it is chunked as Liger's is, and can be split by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from shardwise.model.fusible import GEGLU, NORM, ROTARY, ROTATION, SWIGLU, bare_forward


def use_liger(model: nn.Module, kinds: Mapping[str, str], kernels: Any = None) -> None:
    """Let the modules that `kinds` names run Liger's kernels.

    Args:
        model: changed in place, on the meta device or not.
        kinds: as `fusible` gives them.
        kernels: has `liger_rms_norm`, `liger_swiglu`, `liger_geglu` and `liger_rope`; unset: Liger's own.
    """
    if kernels is None:
        from liger_kernel.transformers import functional

        kernels = functional
    makers: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
        NORM: lambda module, kernels: partial(_norm, module, kernels.liger_rms_norm),
        SWIGLU: lambda module, kernels: partial(_gated, module, kernels.liger_swiglu),
        GEGLU: lambda module, kernels: partial(_gated, module, kernels.liger_geglu),
        ROTARY: lambda module, kernels: _with_rotation(module, kernels.liger_rope),
    }
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        module.forward = makers[kind](module, kernels)  # type: ignore[method-assign]


def _norm(module: Any, kernel: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    """Computed in fp32 and cast before the weight, as Llama does; the gradient that arrives is left as it is."""
    return kernel(hidden_states, module.weight, module.variance_epsilon, 0.0, "llama", False)


def _gated(module: Any, kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernel(module.gate_proj(x), module.up_proj(x)))
    return output


def _with_rotation(module: nn.Module, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The module's own forward, in which the rotation's name means the kernel; other modules keep theirs."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return kernel(q, k, cos, sin)

    own = bare_forward(type(module))
    names = {**own.__globals__, ROTATION: rotate}
    rotated = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    rotated.__kwdefaults__ = own.__kwdefaults__
    return MethodType(rotated, module)
