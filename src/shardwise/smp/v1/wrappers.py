"""Wrappers between a DistributedModel and the model: scripts of 2021 and 2022 count them, and bring one of their own.

Theirs is a module that halves its model's weights and casts what goes in and comes out. It is not a part of the model:
weights have the names without it. The model below it is distributed, and it is called around that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn


class DataParallelWrapper:
    """`DistributedModel.module` under `ddp`, where SMP has one wrapper more: `.module` is the script's module.

    Scripts of 2021 and 2022 count the wrappers (`model.module.module.transformer`); there is nothing in this one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


class _Called(BaseException):
    """Leaves a wrapper's forward at the call of its model.

    No Exception: the wrapper's own `except` is for its errors.
    """


class CastingWrapper:
    """A script's module around its model, such as `FP16_Module`.

    Attributes:
        outer: the script's module.
        name: of the model in it.
    """

    def __init__(self, outer: nn.Module, name: str) -> None:
        self.outer, self.name = outer, name

    @classmethod
    def around(cls, module: nn.Module) -> CastingWrapper | None:
        """Return `module` as a wrapper, if it is one.

        It holds one module and nothing else then, and its state dict has names of its own making.
        """
        children = list(module.named_children())
        tensors = list(module.parameters(recurse=False)) + list(module.buffers(recurse=False))
        alone = len(children) == 1 and not tensors and type(module).state_dict is not nn.Module.state_dict
        return cls(module, children[0][0]) if alone else None

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.outer.get_submodule(self.name)

    def hold(self, model: nn.Module) -> None:
        """Put `model` in the place of the one that is there."""
        self.outer.add_module(self.name, model)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return what the wrapper gives its model."""
        arguments: list[Any] = []

        def take(*positional: Any, **named: Any) -> None:
            arguments.extend((positional, named))
            raise _Called

        with suppress(_Called):
            self._forward(take, args, kwargs)
        return (arguments[0], arguments[1]) if arguments else (args, kwargs)

    def output(self, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Any:
        """Return what the wrapper makes of its model's output `value`."""
        return self._forward(lambda *positional, **named: value, args, kwargs)

    def _forward(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.outer.__dict__[self.name] = model  # found before the module of that name
        try:
            return self.outer.forward(*args, **kwargs)
        finally:
            del self.outer.__dict__[self.name]
