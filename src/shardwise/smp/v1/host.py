"""`DistributedModel.cpu()` of a distributed model: whole weights on the CPU in its module, until training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat import load_hooks
from shardwise.checkpoint.state import persistent_buffers
from shardwise.parallel.model import ParallelModel
from shardwise.smp.v1.process import state
from shardwise.smp.v1.weights import HOST, whole_weights

if TYPE_CHECKING:
    from shardwise.smp.v1.model import DistributedModel


class HostWeights:
    """Whole weights in the place of the distributed ones, which wait where they are.

    Meanwhile the modules are as if FSDP2 had never been there: of their own classes, to be converted and loaded like
    any other. A forward of one of them brings the distributed weights back first: it may be that of a part.

    Args:
        model: the distributed model. Collective over the ranks that hold it together.

    Raises:
        MessageError: one of the ranks will not come.
    """

    def __init__(self, model: DistributedModel) -> None:
        self.parallel: ParallelModel = model.require_parallel()
        self._module = model.get_module()
        self._weights: dict[str, Tensor] = dict(whole_weights(model, "model.cpu"))
        model.release()
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._exit = ExitStack()
        self._lend()
        for module in self._modules():
            self._exit.callback(module.register_forward_pre_hook(lambda *_: model.come_back(), prepend=True).remove)

    def weights(self) -> dict[str, Tensor]:
        """Whole tensors by name, persistent buffers too; those of modules that are here are the modules' own."""
        return self._weights | dict(persistent_buffers(self._module))

    def take_back(self) -> None:
        """The distributed weights into their places, with the values that the whole ones have by now."""
        for entry in self.parallel.tensor_map:
            entry.store(self._weights[entry.name].detach().to(entry.local.device))
        for module, leaf, before in self._buffers:
            current = module.get_buffer(leaf)
            if current is not before:
                before.copy_(current)
        self._exit.close()

    def _modules(self) -> Iterator[nn.Module]:
        return iter({inner: None for part in self.parallel.parts for inner in part.module.modules()})

    def _lend(self) -> None:
        entries = {id(entry.parameter): entry for entry in self.parallel.tensor_map}
        for entry in entries.values():
            whole = nn.Parameter(self._weights[entry.name], requires_grad=entry.parameter.requires_grad)
            self._weights |= dict.fromkeys((entry.name, *entry.aliases), whole)
        for module in self._modules():
            self._leave_fsdp(module)
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                self._swap(module, leaf, self._weights[entries[id(parameter)].name])
            for leaf, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if not buffer.is_meta:
                    self._buffers.append((module, leaf, buffer))
                    self._swap(module, leaf, buffer.to(HOST))

    def _leave_fsdp(self, module: nn.Module) -> None:
        """FSDP2 takes what a conversion or a loading has left for its own parameters."""
        hooks = load_hooks(module)
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                self._exit.callback(hooks.__setitem__, key, hook)
                del hooks[key]
        kind = type(module)
        if isinstance(module, FSDPModule):
            self._exit.callback(setattr, module, "__class__", kind)
            module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]

    def _swap(self, module: nn.Module, leaf: str, value: Tensor) -> None:
        self._exit.callback(setattr, module, leaf, getattr(module, leaf))
        setattr(module, leaf, value)


class Host:
    """A part of DistributedModel, which has the attributes."""

    host: HostWeights | None
    parallel: ParallelModel | None

    def cpu(self) -> Any:
        """The model on the host; where it is distributed, all its weights are gathered there, as in SMP.

        Then `get_module()` has whole parameters and buffers on the CPU, with stages those of this rank's, and
        `state_dict()` reads them. Collective over the ranks that hold the model together. What training goes on with
        stays on the device: the next step or forward, of `get_module()` too, optimizer step, `cuda()`,
        `load_state_dict` or partial save takes the weights back, with what was changed in them meanwhile; every rank
        has to change the same.

        Raises:
            MessageError: one of these ranks does not call it.
        """
        if self.parallel is None:
            return super().cpu()  # type: ignore[misc]
        if self.host is None:
            model: Any = self
            self.host = HostWeights(model)
        return self

    def come_back(self) -> None:
        """Where `cpu()` has lent whole weights: the distributed ones again."""
        if self.host is not None:
            self.host.take_back()
            self.host = None

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`cuda()` and `to(device)` after `cpu()` bring the distributed weights, and no whole ones, to the device."""
        if self.host is not None and change(torch.empty(0)).device.type == state.device.type != HOST.type:
            self.come_back()
            return self
        return super()._apply(change, recurse)  # type: ignore[misc]
