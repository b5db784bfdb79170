"""Effects of a forward on parameters: writes, also those without a trace on the parameter (`weight.data.clamp_()`).

Others are put in their place or beside them, they are frozen or trained from then on, and hooks are put on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from shardwise._torch_compat.tracing import TorchDispatchMode
from shardwise._torch_compat.writes import storage_key, written_tensors

HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@dataclass(frozen=True)
class ForwardEffects:
    """Effects of a user's forward beside what it computes, which sharding, checkpointing or stages would lose.

    Attributes:
        refrozen: parameters that it freezes or has trained from then on.
        hooked: parameters on whose gradient it puts a hook.
        saves_state: it calls `state_dict`.
        marking_block: a block that returns a tensor with attributes; "" for none.
        global_tensor: where a block has left a tensor with a gradient in a global or on a class; "" for nowhere.
    """

    refrozen: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    saves_state: bool = False
    marking_block: str = ""
    global_tensor: str = ""

    def joined(self, other: ForwardEffects) -> ForwardEffects:
        """Return what either of two runs does."""
        return ForwardEffects(
            tuple(dict.fromkeys(self.refrozen + other.refrozen)),
            tuple(dict.fromkeys(self.hooked + other.hooked)),
            self.saves_state or other.saves_state,
            self.marking_block or other.marking_block,
            self.global_tensor or other.global_tensor,
        )


class ParameterWrites(TorchDispatchMode):
    """A mode that records which parameters operators write, by themselves, through a view or through `.data`.

    Attributes:
        replaced: names at which the forward put another parameter, or a first one.
        refrozen: parameters that the forward froze or had trained, until its end.
        hooked: parameters on whose gradient the forward put a hook.
        saves_state: whether it called `state_dict`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parameters: Mapping[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._trained: dict[str, bool] = {}
        self._written: set[str] = set()
        self.replaced: tuple[str, ...] = ()
        self.refrozen: tuple[str, ...] = ()
        self.hooked: tuple[str, ...] = ()
        self.saves_state = False

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Record what becomes of `parameters`, by name, from now on."""
        self._parameters = parameters
        self._names = {storage_key(tensor): name for name, tensor in parameters.items()}
        self._trained = {name: tensor.requires_grad for name, tensor in parameters.items()}

    def record_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the parameters of `module` with those that are watched; a hook of its forward."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        replaced = [name for name, tensor in self._parameters.items() if parameters.get(name) is not tensor]
        known = {id(tensor) for tensor in self._parameters.values()}
        new = [name for name, tensor in parameters.items() if id(tensor) not in known and name not in replaced]
        self.replaced = (*replaced, *new)
        self.refrozen = tuple(
            name for name, tensor in self._parameters.items() if tensor.requires_grad != self._trained[name]
        )

    @contextmanager
    def calls_recorded(self) -> Iterator[None]:
        """Inside, record hooks that are put on parameters, and calls of `state_dict`."""
        state_dict = nn.Module.state_dict

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.saves_state = True
            return state_dict(module, *args, **kwargs)

        with ExitStack() as stack:
            for name in HOOKS:
                recording = self._recording_hook(getattr(Tensor, name))
                stack.enter_context(mock.patch.object(Tensor, name, recording))
            stack.enter_context(mock.patch.object(nn.Module, "state_dict", recorded))
            yield

    def _recording_hook(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            self.hooked += tuple(name for name, parameter in self._parameters.items() if parameter is tensor)
            return register(tensor, hook)

        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            if (name := self._names.get(storage_key(tensor))) is not None:
                self._written.add(name)
        return func(*args, **(kwargs or {}))

    def written(self) -> tuple[str, ...]:
        """Return the names of the parameters that were written, or given other memory by `weight.data = ...`."""
        storages = {name: storage for storage, name in self._names.items()}
        replaced = {name for name, tensor in self._parameters.items() if storage_key(tensor) != storages[name]}
        return tuple(sorted(self._written | replaced))
