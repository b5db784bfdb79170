"""The optimizer over this rank's own elements, and its learning-rate schedule.

Any elementwise class, of `torch.optim` or of the user's own, updates plain local tensors that share storage with the
model's (sharded) parameters: no DTensor dispatch per parameter, and each element is updated on every rank that holds it
and nowhere else. Optimizers of this package (`training/optimizers/`) know besides where these slices stand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.autograd import share_attributes
from shardwise._torch_compat.optimizers import fuses_on_gpu
from shardwise.job.objects import is_reference, user_code
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.optimizers import average_of, optimizer_class
from shardwise.job.schedules import FALLING, SHAPES, Moment, own_schedule_factor
from shardwise.model.parameter_optimizers import ParameterOptimizer, optimizer_of, optimizers_of_parameters
from shardwise.parallel.logical_state import averaged_weight
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry, TensorMap
from shardwise.training.host_updates import HostUpdates
from shardwise.training.optimizers.combined import CombinedOptimizer
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer

ONE_FOR_ALL: Mapping[str, ParameterOptimizer] = MappingProxyType({})


class ShardedOptimizer:
    """A `torch.optim` class, or one of the user's own, on the local slices of a TensorMap.

    `inner` is the torch optimizer; its parameters are `locals`, in the order of the map. Parameters of which this rank
    holds no element are left out. Tensors of fewer than two dims get no weight decay.

    Args:
        tensor_map: the parameters.
        settings: the class, its options, learning rate and weight decay.
        chosen: optimizer of each trained parameter of the model, by name; empty: that of `settings` for all.
        model: that the map is of, whose ranks an optimizer of this package may ask; None where tensors are whole.
    """

    def __init__(
        self,
        tensor_map: TensorMap,
        settings: OptimizerSection,
        chosen: Mapping[str, ParameterOptimizer] = ONE_FOR_ALL,
        model: ParallelModel | None = None,
    ) -> None:
        self.entries = list(tensor_map)
        self.host: HostUpdates | None = None  # of what is updated in host memory
        if model is not None and model.plan.offloaded_optimizer:
            self.host = HostUpdates(model)
        self.locals: list[tuple[ParameterEntry, nn.Parameter]] = [
            (entry, self._updated(entry))
            for entry in self.entries
            if entry.parameter.requires_grad and entry.local.numel()
        ]
        for entry, local in self.locals:
            share_attributes(entry.parameter, local)  # an optimizer of the user's own may read them
        self.gradient_bytes = 0  # of the last step
        self._is_averaged = False  # the parameters are what is evaluated
        self.average = average_of(settings.name, settings.options)
        self._name = settings.name
        self._learning_rate = settings.learning_rate
        devices = [local.device for _, local in self.locals if accelerator.on_accelerator(local)]
        device = devices[0] if devices else torch.device(accelerator.HOST)
        self.inner = self._make(optimizer_of(settings), chosen, device)
        if self.host is not None:
            self.host.beside(self.inner.state)
        if isinstance(self.inner, SliceOptimizer | CombinedOptimizer):
            self.inner.place({local: entry for entry, local in self.locals}, model)

    @classmethod
    def of(cls, model: ParallelModel) -> ShardedOptimizer:
        """Return the optimizer of a model's job, over its elements on this rank."""
        settings = model.plan.job.optimizer
        return cls(model.tensor_map, settings, optimizers_of_parameters(model.facts, settings), model)

    def _updated(self, entry: ParameterEntry) -> nn.Parameter:
        """Return what the torch optimizer updates: the local elements themselves, or their copy in host memory."""
        if self.host is not None and entry.name in self.host:
            return self.host.copy_of(entry.name)
        return nn.Parameter(entry.local, requires_grad=True)

    def _make(
        self, default: ParameterOptimizer, chosen: Mapping[str, ParameterOptimizer], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the torch optimizer; several are one. Every rank has those of the whole model, in the same order."""
        kinds = {own.kind: own for own in chosen.values()} or {default.kind: default}
        members = []
        for kind, own in kinds.items():
            of_kind = [pair for pair in self.locals if chosen.get(pair[0].name, default).kind == kind]
            on_device = [pair for pair in of_kind if self.host is None or pair[0].name not in self.host]
            member = make_torch_optimizer(own, list(self._torch_groups(on_device, default, chosen)), device)
            if isinstance(member, SliceOptimizer):
                trained = (entry.name for entry in self.entries if entry.parameter.requires_grad)
                member.names = {name for name in trained if chosen.get(name, default).kind == kind}
            members.append(member)
            if self.host is not None:
                for unit in self.host.units(of_kind, is_reference(own.name)):
                    groups = list(self._torch_groups(unit, default, chosen))
                    members.append(make_torch_optimizer(own, groups, torch.device(accelerator.HOST)))
                    self.host.add(unit, members[-1])
        return members[0] if len(members) == 1 else CombinedOptimizer(members)

    def _torch_groups(
        self,
        pairs: Sequence[tuple[ParameterEntry, nn.Parameter]],
        default: ParameterOptimizer,
        chosen: Mapping[str, ParameterOptimizer],
    ) -> Iterator[dict[str, Any]]:
        """Yield torch's groups: matrices ahead of tensors without weight decay, and each by its rates."""
        members: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
        for entry, local in sorted(pairs, key=lambda pair: len(pair[0].shape) < 2):
            own = chosen.get(entry.name, default)
            members.setdefault((len(entry.shape) >= 2, own.learning_rate, own.weight_decay), []).append(local)
        for (is_matrix, rate, decay), parameters in members.items():
            yield {
                "params": parameters,
                "weight_decay": decay if is_matrix else 0.0,
                "lr": rate,
                "initial_lr": rate,  # torch's word for the rate that a schedule multiplies
            }

    def gradients(self) -> Iterator[tuple[ParameterEntry, Tensor]]:
        """Yield entries with the local gradients of the last backward."""
        for entry, _ in self.locals:
            gradient = entry.local_gradient
            if gradient is not None:
                yield entry, gradient

    def begin(self, scale: float) -> None:
        """Begin a step, whose losses are scaled: what is in host memory is updated beside backward, if it can be."""
        if self.host is not None:
            self.host.begin(1.0 / scale)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the last backward."""
        gradients = [gradient for _, gradient in self.gradients()]
        if factor != 1.0 and gradients:
            copied = [] if self.host is None else self.host.copied(factor)
            torch._foreach_mul_(gradients, factor)
            for own in copied:
                own.scaled(factor)

    def step(self) -> None:
        """Update the local elements with the gradients that the parameters hold."""
        for entry, local in self.locals:
            if self.host is None or entry.name not in self.host:
                local.grad = entry.local_gradient
        sizes = (gradient.numel() * gradient.element_size() for _, gradient in self.gradients())
        self.gradient_bytes = sum(sizes)
        with user_code(f"optimizer.name={self._name!r}: step"):
            if self.host is not None:
                self.host.offer()
            self.inner.step()
            if self.host is not None:
                self.host.finish()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters be their averages inside, if there are some; afterwards they are as before, bit by bit.

        A save that is under way has to be settled first.
        """
        if self._is_averaged:
            yield
            return
        states = self.inner.state
        kept = [pair for pair in self.locals if self.average and self.average.key in states.get(pair[1], {})]
        before = [(entry.local, entry.local.clone()) for entry, _ in kept]
        for (_, local), (weight, _) in zip(kept, before, strict=True):
            assert self.average is not None
            state = states[local][self.average.key].to(weight.device)
            weight.copy_(averaged_weight(weight, state, self.average.factor))
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            for weight, value in before:
                weight.copy_(value)

    def zero_grad(self) -> None:
        """Drop gradients of parameters and locals.

        One without elements goes too: FSDP2 makes it as a view of its whole unit's gradients, which it would keep.
        """
        if self.host is not None:
            self.host.drop()
        for entry in self.entries:
            entry.parameter.grad = None
        for _, local in self.locals:
            local.grad = None

    def rates(self) -> list[float]:
        """Return the learning rate of each of torch's groups."""
        return [group["lr"] for group in self.inner.param_groups]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step; groups with one of their own keep its ratio to the job's."""
        for group in self.inner.param_groups:
            own = group.get("initial_lr", self._learning_rate)
            group["lr"] = rate * (own / self._learning_rate)

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state tensors on this rank."""
        return sum(value.numel() * value.element_size() for value in self._state_tensors())

    def host_bytes(self) -> int:
        """Return what of that is in host memory (`memory.offload_optimizer`)."""
        copies = [local for entry, local in self.locals if self.host is not None and entry.name in self.host]
        states = (value for local in copies for value in self.inner.state.get(local, {}).values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    def state_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of optimizer state beside this rank's elements, counters left out; the smallest first."""
        dtypes = {value.dtype for value in self._state_tensors() if value.dim()}
        return sorted(dtypes, key=lambda dtype: dtype.itemsize)

    def _state_tensors(self) -> Iterator[Tensor]:
        for state in self.inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def make_torch_optimizer(settings: ParameterOptimizer, groups: Any, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of `settings` over `groups`, fused where it offers that there and the job does not say.

    An empty rank (more ranks than rows) gets an optimizer over one empty tensor, so that it needs no special case.
    """
    made = optimizer_class(settings.name)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.options.items()}
    known = inspect.signature(made).parameters
    if "fused" in known and not {"fused", "foreach"} & options.keys():
        # torch's fused SGD fails where a parameter has its first gradient after others have momentum, and none of its
        # fused optimizers takes complex parameters.
        is_real = not any(parameter.is_complex() for group in groups for parameter in group["params"])
        is_fused = not accelerator.is_accelerator(device) or fuses_on_gpu(made)
        options["fused"] = is_fused and not options.get("momentum") and is_real
    groups = groups or [{"params": [nn.Parameter(torch.empty(0, device=device))]}]
    if "weight_decay" not in known:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    optimizer: torch.optim.Optimizer = made(groups, lr=settings.learning_rate, **options)
    return optimizer


def learning_rate(settings: OptimizerSection, step: int, steps: int, warmup: int) -> float:
    """Return the learning rate of `step` in 0..steps-1: `warmup` steps to the peak, then the schedule from there on.

    A schedule of the user's own says all.
    """
    peak = settings.learning_rate
    if is_reference(settings.schedule):
        return peak * own_schedule_factor(settings.schedule, step, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    shape = SHAPES[settings.schedule](settings, Moment(step, steps, warmup))
    floor = settings.final_learning_rate_ratio if settings.schedule in FALLING else 0.0
    return peak * (floor + (1.0 - floor) * shape)
