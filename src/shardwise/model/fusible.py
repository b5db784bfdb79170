"""Finds modules whose forward is line by line what one of Liger's kernels computes.

transformers writes its families out in full, so the same norm, MLP or rotation stands in many files. A module is taken
where the source of its forward is that of Llama's; a family that departs in one line is not. Nothing here needs Liger.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch import nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.llama import modeling_llama as llama

NORM, SWIGLU, GEGLU, ROTARY = "RMS norm", "SwiGLU", "GeGLU", "rotary positions"
ROTATION = "apply_rotary_pos_emb"  # what transformers' attention modules call, from their own file
RENAMES = "transformers.utils.deprecation"  # whose wrappers take former names of arguments and do nothing else


def fusible(model: nn.Module) -> dict[str, str]:
    """Return module name -> which kernel can compute it: NORM, SWIGLU, GEGLU, or ROTARY of an attention module."""
    kernels = {name: _kernel_of(module) for name, module in model.named_modules()}
    return {name: kernel for name, kernel in kernels.items() if kernel}


def bare_forward(module_class: type[nn.Module]) -> Any:
    """Return the class's forward, below wrappers that only know former names of its arguments."""
    forward = module_class.forward
    while getattr(forward, "__globals__", {}).get("__name__") == RENAMES:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def _kernel_of(module: Any) -> str:
    source = _source(type(module).forward)
    if source == _source(llama.LlamaRMSNorm.forward):
        return NORM
    if source == _source(llama.LlamaMLP.forward):
        activation = module.act_fn
        if isinstance(activation, (nn.SiLU, SiLUActivation)):
            return SWIGLU
        return GEGLU if isinstance(activation, GELUTanh) else ""  # the kernel has the approximation by tanh alone
    return ROTARY if _rotates(type(module)) else ""


def _rotates(module_class: type[nn.Module]) -> bool:
    """Tell whether its forward calls a rotation that is Llama's."""
    rotation = getattr(sys.modules[module_class.__module__], ROTATION, None)
    forward = bare_forward(module_class)
    code = getattr(forward, "__code__", None)
    calls = code is not None and ROTATION in code.co_names and not hasattr(forward, "__wrapped__")
    return calls and rotation is not None and _source(rotation) == _source(llama.apply_rotary_pos_emb)


@cache
def _source(function: Any) -> str:
    """Return the source of a function; empty where there is none to read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
