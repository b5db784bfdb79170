"""`DistributedModel.cpu()` of a distributed model: whole weights on the CPU in its module, until training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.modules import load_hooks, persistent_buffers
from shardwise.parallel.model import ParallelModel

HOST = torch.device("cpu")


class HostWeights:
    """Whole weights in the place of the distributed ones, which wait where they are.

    Meanwhile the modules are as if FSDP2 had never been there: of their own classes, to be converted and loaded like
    any other. A forward of one of them brings the distributed weights back first: it may be that of a part.

    Args:
        module: the script's module.
        parallel: the engine's model of it, whose gathered parameters are released.
        whole: whole tensors on the CPU, by name.
        before_forward: called before a forward of one of the modules.
    """

    def __init__(
        self,
        module: nn.Module,
        parallel: ParallelModel,
        whole: Mapping[str, Tensor],
        before_forward: Callable[[], None],
    ) -> None:
        self.parallel = parallel
        self._module = module
        self._weights: dict[str, Tensor] = dict(whole)
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._exit = ExitStack()
        self._lend()
        for part in self._modules():
            self._exit.callback(part.register_forward_pre_hook(lambda *_: before_forward(), prepend=True).remove)

    def weights(self) -> dict[str, Tensor]:
        """Return whole tensors by name, persistent buffers too; those of modules on this rank are the modules' own."""
        return self._weights | dict(persistent_buffers(self._module))

    def take_back(self) -> None:
        """Put the distributed weights into their places, with the values that the whole ones have by now."""
        for entry in self.parallel.tensor_map:
            entry.store(self._weights[entry.name].detach().to(entry.local.device))
        for module, leaf, distributed in self._buffers:
            whole = module.get_buffer(leaf)
            if whole is not distributed:
                distributed.copy_(whole)
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
        """Turn FSDP2 off: it takes what a conversion or a loading has left for its own parameters."""
        hooks = load_hooks(module)
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                self._exit.callback(hooks.__setitem__, key, hook)
                del hooks[key]
        sharded_class = type(module)
        if isinstance(module, FSDPModule):
            self._exit.callback(setattr, module, "__class__", sharded_class)
            module.__class__ = sharded_class.__mro__[sharded_class.__mro__.index(FSDPModule) + 1]

    def _swap(self, module: nn.Module, leaf: str, value: Tensor) -> None:
        self._exit.callback(setattr, module, leaf, getattr(module, leaf))
        setattr(module, leaf, value)
