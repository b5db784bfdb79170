"""Forwards in fp64 without the fp32 inside of them, and which models have no others in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WithoutNarrowing(TorchFunctionMode):
    """Leaves in fp64 what a model computes in fp32 whatever its own dtype is: norms, rotations, routers."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.dtype != torch.float64:
            return function(*args, **kwargs)
        if function is Tensor.float:
            return first
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*wide, **named)


def needs_fp32_weights(model: nn.Module) -> bool:
    """Return whether the forward of a transformers model fails in the dtype of its parameters, which is fp64.

    One may multiply what it has cast to fp32 by weights that transformers keeps in fp32.
    """
    if not getattr(model, "_keep_in_fp32_modules_strict", None):
        return False
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError:
        return True
    except Exception:  # this is no language model of tokens alone
        return False
    return False
