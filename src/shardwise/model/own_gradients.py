"""Notices gradients that a forward computes its own way: a trace keeps what is computed, and of these nothing.

They are hooks on modules and on activations, and autograd functions of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise._torch_compat.modules import is_backward_hook

PLAIN = ("torch.", "transformers.", "shardwise.")  # modules whose functions have the gradients of what they compute


@contextmanager
def own_gradients_found() -> Iterator[Callable[[], str]]:
    """Yield a function that names what was met of them inside, "" for nothing."""
    names: list[str] = []
    apply, register_hook = vars(Function)["apply"], Tensor.register_hook

    def recorded_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if is_backward_hook(cls):
            names.append("a backward hook of a module")
        elif not cls.__module__.startswith(PLAIN):
            names.append(f"the autograd function {cls.__name__}")
        return apply.__get__(None, cls)(*args, **kwargs)  # a method of Python's, or of C from torch 2.14 on

    def recorded_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        names.append("a hook on an activation")
        return register_hook(tensor, hook)

    Function.apply, Tensor.register_hook = classmethod(recorded_apply), recorded_hook  # type: ignore[assignment,method-assign]
    try:
        yield lambda: names[0] if names else ""
    finally:
        Function.apply, Tensor.register_hook = apply, register_hook  # type: ignore[method-assign]
