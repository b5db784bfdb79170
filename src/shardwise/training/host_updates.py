"""Optimizer state in host memory (`memory.offload_optimizer`): parameters are updated there, in copies of their own.

A unit is what one torch optimizer updates together: the parameters of a block. While backward goes on, the gradient and
the weights of a parameter are copied to the host as soon as its last reduction is done. With `optimizer.clip_norm` the
update waits for the norm of all gradients. Without it a thread updates a unit once its gradients are there, and keeps
the state before: it comes back if the step is skipped, or if the gradient changes after all (sums over tensor ranks or
tied stages, hooks, parameters that no rank has used). Then the update is made again, of the gradient as it is.

The parameters on the device are what the model has; a copy lives for one update, so that nothing can be stale. On a CPU
the same copies are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.autograd import version_of
from shardwise.job.devices import copies_aside
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.parallel.transforms.sharding import overlaps
from shardwise.plan.optimizer_offload import offloaded_parameters

Pair = tuple[ParameterEntry, nn.Parameter]
State = dict[str, Any]
FORGOTTEN = -1  # in the place of a tensor's version


class CopyStream:
    """Copies between a device and its host, beside what the device computes; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = copies_aside(device.type)
        self._device = device
        self._stream = accelerator.side_stream(device) if self.pinned else None

    def buffer(self, like: Tensor) -> Tensor:
        """Return host memory for a tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.pinned)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event | None:
        """Copy (target, source) pairs after what the device was given so far; the event says when they are there."""
        if self._stream is not None:
            self._stream.wait_stream(accelerator.current_stream(self._device))
        with torch.no_grad(), nullcontext() if self._stream is None else self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=self.pinned)
            return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Let what the device is given from now on come after the copies."""
        if self._stream is not None:
            accelerator.current_stream(self._device).wait_stream(self._stream)


class HostParameter:
    """A parameter's place in host memory.

    Attributes:
        copy: what the optimizer updates; its state is beside it.
        is_late: its gradient changes after backward's reduction.
    """

    def __init__(self, entry: ParameterEntry, is_late: bool, stream: CopyStream) -> None:
        self.entry, self.is_late = entry, is_late
        self.copy = nn.Parameter(stream.buffer(entry.local), requires_grad=True)
        self._gradient = stream.buffer(entry.local)
        self._stream = stream
        self._arrived: torch.Event | None = None
        self._seen: tuple[Tensor, int] | None = None  # the gradient that was copied, and its version
        self._before: State | None = None  # the state before an update that is not settled
        self._kept: dict[str, Tensor] = {}  # its tensors' memory, from step to step

    @property
    def is_copied(self) -> bool:
        """True where the gradient, as it now is, has been copied."""
        gradient = self.entry.local_gradient
        if gradient is None or self._seen is None:
            return False
        copied, version = self._seen
        return _place(gradient) == _place(copied) and version_of(gradient) == version

    @property
    def is_begun(self) -> bool:
        """True where a gradient of this step has been copied, or is being."""
        return self._seen is not None

    @property
    def is_updated(self) -> bool:
        """True where an update has been made that is not settled."""
        return self._before is not None

    def fetch(self) -> None:
        """Begin to copy the gradient and the weights."""
        gradient = self.entry.local_gradient
        assert gradient is not None
        self._seen = gradient, version_of(gradient)
        self._arrived = self._stream.copy([(self._gradient, gradient), (self.copy.detach(), self.entry.local)])

    @property
    def storage(self) -> int:
        """The storage of the gradient: that of all gradients of a unit of FSDP2, which have one version together."""
        gradient = self.entry.local_gradient
        assert gradient is not None
        return _place(gradient)[0]

    def seen_again(self) -> None:
        """Note that the gradient is still what was copied, whatever its version; unless it was forgotten."""
        assert self._seen is not None
        if self._seen[1] != FORGOTTEN:
            self._seen = self._seen[0], version_of(self._seen[0])

    def forget(self) -> None:
        """Note that the gradient is no longer what was copied."""
        assert self._seen is not None
        self._seen = self._seen[0], FORGOTTEN

    def scaled(self, factor: float) -> None:
        """Note that the gradient, which was copied, has been multiplied; so is the copy, unless the update had it."""
        gradient = self.entry.local_gradient
        assert gradient is not None
        self._seen = gradient, version_of(gradient)
        if not self.is_updated:
            self.arrive()
            self.multiply(factor)

    def multiply(self, factor: float) -> None:
        """Multiply the copy of the gradient."""
        if factor != 1.0:
            self._gradient.mul_(factor)

    def arrive(self) -> None:
        """Wait for the copies."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def offer(self) -> None:
        """Let the next step of the optimizer update the copy."""
        self.copy.grad = self._gradient

    def withdraw(self) -> None:
        """Let the optimizer leave the copy as it is."""
        self.copy.grad = None

    def keep(self, state: State) -> None:
        """Keep the state before an update."""
        before = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                kept = self._kept.get(key)
                if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                    kept = self._kept[key] = torch.empty_like(value)
                before[key] = kept.copy_(value)
        self._before = before

    def take_back(self, state: State) -> None:
        """Let the state be as before the update that is not settled."""
        before, self._before, self._seen = self._before, None, None
        assert before is not None
        for key in [key for key in state if key not in before]:
            del state[key]  # made by this update
        for key, value in before.items():
            if isinstance(value, Tensor):
                state[key].copy_(value)
            else:
                state[key] = value

    def settle(self) -> None:
        """Forget what was copied, and what was before the update."""
        self._before = self._seen = None
        self.withdraw()

    def returned(self) -> tuple[Tensor, Tensor]:
        """Return the weights on the device and what they become."""
        return self.entry.local, self.copy.detach()

    @property
    def bytes(self) -> int:
        """Bytes of the copies, and of the state that is kept."""
        own = (self.copy, self._gradient, *self._kept.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in own)


class HostUnit:
    """Parameters that one optimizer updates together, and where a step has come to with them."""

    def __init__(self, parameters: list[HostParameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer = parameters, optimizer
        self.waits_for = 0  # gradients that have not come yet
        self.update: Future[None] | None = None  # beside backward


class HostUpdates:
    """The parameters of a rank that are updated in host memory.

    Args:
        model: whose plan says how many of them are.
    """

    def __init__(self, model: ParallelModel) -> None:
        plan, names = model.plan, [entry.name for entry in model.tensor_map]
        chosen = offloaded_parameters(model.facts, names, float(plan.job.memory.offload_optimizer))
        entries = [entry for entry in map(model.tensor_map.__getitem__, chosen) if entry.local.numel()]
        late = set(chosen) if overlaps(plan) else _changed_after_reduction(model)
        self._stream = CopyStream(model.device)
        self._own = {entry.name: HostParameter(entry, entry.name in late, self._stream) for entry in entries}
        self._block_of = model.facts.block_of
        self._units: list[HostUnit] = []
        self._unit_of: dict[str, HostUnit] = {}
        self._states: MutableMapping[Any, State] = {}
        self._factor: float | None = None  # on the gradients of the step that is under way
        self._alike: dict[int, list[HostParameter]] = {}  # what this step has copied, by the gradients' storage
        self._returns = False  # an update is settled at once
        self._thread = ThreadPoolExecutor(1, "shardwise-host-updates") if plan.updates_in_backward else None
        _watch_reductions(model, self._own, WeakMethod(self._reduced))

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def copy_of(self, name: str) -> nn.Parameter:
        """Return the copy of a parameter, which the optimizer updates."""
        return self._own[name].copy

    def units(self, pairs: Iterable[Pair], as_one: bool) -> Iterator[list[Pair]]:
        """Yield those of some parameters that are updated here, in units: block by block, or all as one."""
        units: dict[str, list[Pair]] = {}
        own = {entry.name: (entry, local) for entry, local in pairs if entry.name in self._own}
        for name in [name for name in self._own if name in own]:
            units.setdefault("" if as_one else self._block_of.get(name, ""), []).append(own[name])
        yield from units.values()

    def add(self, pairs: Iterable[Pair], optimizer: torch.optim.Optimizer) -> None:
        """Say which optimizer updates a unit."""
        unit = HostUnit([self._own[entry.name] for entry, _ in pairs], optimizer)
        self._units.append(unit)
        self._unit_of |= {own.entry.name: unit for own in unit.parameters}
        optimizer.register_step_pre_hook(lambda *_: _arrive(unit))
        optimizer.register_step_post_hook(lambda *_: self._settle(unit))

    def beside(self, states: MutableMapping[Any, State]) -> None:
        """Say where the optimizers keep their state."""
        self._states = states

    @property
    def bytes(self) -> int:
        """Bytes of copies of weights and gradients, and of state that is kept."""
        return sum(own.bytes for own in self._own.values())

    def begin(self, factor: float) -> None:
        """Begin a step; `factor` is on its gradients unless they are clipped."""
        self._factor = factor
        self._alike.clear()
        for unit in self._units:
            unit.waits_for = sum(not own.is_late for own in unit.parameters)

    def copied(self, factor: float) -> list[HostParameter]:
        """Return what need not be copied again once the gradients are multiplied by `factor`."""
        self._join()
        self._stream.join()  # copies that are under way read the gradients as they are
        copied = [own for own in self._own.values() if own.is_copied]
        return [own for own in copied if not own.is_updated or factor == self._factor]

    def offer(self) -> None:
        """Let the next step of the optimizers update what is not updated yet."""
        self._join()
        self._returns = True
        for own in self._own.values():
            if own.is_updated and not own.is_copied:
                own.take_back(self._states[own.copy])
            if own.is_updated or own.entry.local_gradient is None:
                own.withdraw()
                continue
            if not own.is_copied:
                own.fetch()
            own.offer()

    def finish(self) -> None:
        """Let the model have the parameters as they are now."""
        self._returns, self._factor = False, None
        self._stream.join()

    def drop(self) -> None:
        """Take back updates that are not settled, of a step that is not taken."""
        self._join()
        self._factor = None
        for own in self._own.values():
            if own.is_updated:
                own.take_back(self._states[own.copy])
            own.settle()

    def _reduced(self, name: str) -> None:
        """Copy a gradient that is complete, and update its unit if it was the last of it."""
        if self._factor is None:
            return
        own, unit = self._own[name], self._unit_of[name]
        alike = self._alike.setdefault(own.storage, [])
        is_first = not own.is_begun and not own.is_late
        if is_first:
            own.fetch()
            alike.append(own)
            unit.waits_for -= 1
        elif own.is_begun:  # it has come before, and is another by now
            own.forget()
        for other in alike:  # FSDP2 has added to this gradient alone
            other.seen_again()
        if is_first and unit.waits_for == 0 and self._thread is not None:
            unit.update = self._thread.submit(self._update, unit, self._factor)

    def _update(self, unit: HostUnit, factor: float) -> None:
        """Update a unit while backward goes on; the thread's work."""
        for own in unit.parameters:
            if not own.is_late:
                own.arrive()
                own.multiply(factor)
                own.keep(self._states.get(own.copy, {}))
                own.offer()
        unit.optimizer.step()
        for own in unit.parameters:
            own.withdraw()

    def _join(self) -> None:
        for unit in self._units:
            update, unit.update = unit.update, None
            if update is not None:
                update.result()

    def _settle(self, unit: HostUnit) -> None:
        """Copy the weights of a unit back, if its step is taken; the hook behind its optimizer's step."""
        if not self._returns:
            return
        taken = [own for own in unit.parameters if own.entry.local_gradient is not None]
        self._stream.copy(own.returned() for own in taken)
        for own in unit.parameters:
            own.settle()


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins; torch keeps the Python object of a storage that is alive."""
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def _arrive(unit: HostUnit) -> None:
    for own in unit.parameters:
        own.arrive()


def _changed_after_reduction(model: ParallelModel) -> set[str]:
    """Return the names of parameters whose gradients are not complete when FSDP2 or autograd is done with them."""
    summed = (name for names, _ in model.partial for name in names)
    known = model.tensor_map.names
    return {known[name] for name in (*summed, *model.unsharded, *model.tied, *model.gradient_hooks) if name in known}


def _watch_reductions(model: ParallelModel, names: Iterable[str], reduced: WeakMethod[Callable[[str], None]]) -> None:
    """Call `reduced` with a name when autograd or FSDP2 has the gradient of a step's last microbatch."""
    holders: dict[int, list[ModelPart]] = {}
    for part in model.parts:
        for parameter in part.module.parameters():
            holders.setdefault(id(parameter), []).append(part)
    for name in names:
        parameter = model.tensor_map[name].parameter
        parameter.register_post_accumulate_grad_hook(_hook(name, holders[id(parameter)], reduced))


def _hook(name: str, parts: list[ModelPart], reduced: WeakMethod[Callable[[str], None]]) -> Callable[[Tensor], None]:
    """Return what tells that a gradient is there, if the backward of the parts that have it is the last."""

    def hook(_: Tensor) -> None:
        call = reduced()
        if call is not None and all(part.completes for part in parts):
            call(name)

    return hook
