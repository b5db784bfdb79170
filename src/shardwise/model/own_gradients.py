"""Notices gradients that a forward computes its own way: a trace keeps what is computed, and of these nothing.

They are hooks on modules and on activations, autograd functions of the user's, and parameters that are frozen for a
part of the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
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
        with freezing_recorded(names):
            yield lambda: names[0] if names else ""
    finally:
        Function.apply, Tensor.register_hook = apply, register_hook  # type: ignore[method-assign]


@contextmanager
def freezing_recorded(names: list[str]) -> Iterator[None]:
    """Inside, add to `names` whenever code of the user's changes whether parameters are trained."""
    attribute: Any = Tensor.requires_grad
    of_tensor, of_module = Tensor.requires_grad_, nn.Module.requires_grad_

    def note(holder: Any, value: bool, frame: Any) -> None:
        parameters = holder.parameters() if isinstance(holder, nn.Module) else [holder]
        changed = any(isinstance(known, nn.Parameter) and known.requires_grad != value for known in parameters)
        if changed and not f"{frame.f_globals['__name__']}.".startswith(PLAIN):
            names.append("parameters that it freezes or unfreezes")

    def set_attribute(tensor: Tensor, value: bool) -> None:
        note(tensor, value, sys._getframe(1))
        attribute.__set__(tensor, value)

    def recorded_tensor(tensor: Tensor, value: bool = True) -> Tensor:
        note(tensor, value, sys._getframe(1))
        return of_tensor(tensor, value)

    def recorded_module(module: nn.Module, value: bool = True) -> nn.Module:
        note(module, value, sys._getframe(1))
        return of_module(module, value)

    with (
        mock.patch.object(Tensor, "requires_grad", property(attribute.__get__, set_attribute)),
        mock.patch.object(Tensor, "requires_grad_", recorded_tensor),
        mock.patch.object(nn.Module, "requires_grad_", recorded_module),
    ):
        yield
