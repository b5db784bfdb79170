"""torch's own operators replaced in the dispatcher, for models that multiply and add wherever they like."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

Kernel = Callable[..., Any]


def replace_operators(kernels: Mapping[str, Kernel]) -> torch.library.Library:
    """Take `kernels`, by the name of their operator, for CPU tensors. torch's own come back when the result goes."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library
