"""Modules that keep, count and mark things beside their parameters. Rows of `tests/habits/table.py`."""

from __future__ import annotations

import functools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce

from tests.habits.building import POSITIONS, WIDTH, Residual, Stack
from tests.habits.modules import Orthogonal

CACHE: dict[int, Tensor] = {}
LOSSES: list[Tensor] = []


@functools.lru_cache
def places(count: int) -> Tensor:
    return torch.arange(count)


class CachingResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        if POSITIONS not in CACHE:
            CACHE[POSITIONS] = torch.arange(POSITIONS)
        shift = (CACHE[POSITIONS] + places(POSITIONS)).to(x.dtype)
        return super().forward(x + 0.01 * shift[:, None])


class CachesInGlobals(Stack):
    """A forward that fills caches of its file: a dict, and `functools.lru_cache`."""

    block = CachingResidual


class LossyResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        LOSSES.append(self.down(self.up(x)).square().mean((1, 2)))
        return x


class LossesInGlobals(Stack):
    """Blocks append losses to a list of their file."""

    block = LossyResidual

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.clear()
        result = super().forward(x) + 0.1 * sum(LOSSES)[:, None]  # type: ignore[index]
        LOSSES.clear()
        return result


class CountedHook(Stack):
    """A hook on a gradient that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[int] = []

        def scale(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * (0.5 if len(calls) < 3 else 1.0)

        self.last.weight.register_hook(scale)


class LockedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class Locked(Stack):
    """Locks, open files, writers of logs: what Python cannot copy."""

    block = LockedResidual


class KeptGenerator(Stack):
    """A generator as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = (0.5 for _ in range(100))


class ClosedOver(Stack):
    """A function that has captured a parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.first.weight
        self.project: Callable[[Tensor], Tensor] = lambda x: x @ weight.t()

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + self.project(x))


class PatchedForwards(Stack):
    """Forwards of blocks that are wrapped in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = _times(block.forward, 0.9)


def _times(forward: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * factor


class DerivedAttribute(Stack):
    """A tensor of the constructor that was made from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.start = self.first.weight.detach()

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + x @ self.start.to(x.dtype))


class DerivedNumber(Stack):
    """A number of the constructor that was made from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.first.weight.detach().norm())

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x) * self.scale


class DerivedBesideValues(Orthogonal):
    """A tensor that was made from a parameter, beside a parametrization that needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"start": self.first.weight.detach() * 2.0}

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + x @ self.kept["start"].to(x.dtype))


class SharedBesideValues(Orthogonal):
    """A tensor in a parameter's memory, beside a parametrization that needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"start": self.first.weight.detach()}

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + x @ self.kept["start"].to(x.dtype))


class DrawnAttribute(Stack):
    """A tensor and numbers that the constructor draws and keeps."""

    def __init__(self) -> None:
        order, drawn, shift = torch.randperm(WIDTH), random.random(), numpy.random.normal()
        super().__init__()
        self.order, self.drawn, self.shift = order, drawn, shift

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x[..., self.order] * self.drawn + self.shift)


class SharedMemory(Stack):
    """Two parameters of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.data = self.first.weight.data


class LateHook(Stack):
    """A hook that the first forward puts on a parameter."""

    handle: Any = None

    def read_out(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return super().read_out(x)


class LateParameter(Stack):
    """A parameter that the first forward makes."""

    gain: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)

    def read_out(self, x: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.full((WIDTH,), 1.1, dtype=x.dtype))
        return super().read_out(x * self.gain)


class Unfreezing(Stack):
    """A forward that trains a block from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.blocks[0].requires_grad_(self.calls > 2)
        return super().forward(x)


class MarkingResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        depth = getattr(x, "depth", 0)
        result: Any = super().forward(x) * (1 + 0.1 * depth)
        result.depth = depth + 1
        return result  # type: ignore[no-any-return]


class MarkedTensors(Stack):
    """Blocks that hand on numbers as attributes of tensors."""

    block = MarkingResidual


class StateReading(Stack):
    """A forward that reads its state dict."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.state_dict(keep_vars=True)["blocks.1.up.weight"].square().sum()


class WrittenOutputs(Stack):
    """A module that writes into what a block has returned."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number != 1:
                x += 0.5
        return x


class SchedulingResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2:
            self.up.weight.data.mul_(0.5)
        return super().forward(x)


class LateWrites(Stack):
    """Blocks that write a parameter in a later step."""

    block = SchedulingResidual


class CountingSteps(Stack):
    """A forward that counts its calls, and is no chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run_blocks(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x + super().run_blocks(x) * (1.0 if self.calls < 100 else 0.5)


class FlaggedResidual(Residual):
    def forward(self, x: Tensor, is_first: bool = False) -> tuple[Tensor, bool]:  # type: ignore[override]
        return super().forward(x) * (0.9 if is_first else 1.0), not is_first


class FlagsBetweenBlocks(Stack):
    """Blocks that hand on a flag beside hidden states, and a module that reads the last."""

    block = FlaggedResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        is_first = True
        for block in self.blocks:
            x, is_first = block(x, is_first)
        return x * (2.0 if is_first else 0.5)


class ShiftedResidual(Residual):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0.5 * shift)


class DetachedBetweenBlocks(Stack):
    """Blocks that are given what the first layer made, without its gradient."""

    block = ShiftedResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        shift = x.detach()
        for block in self.blocks:
            x = block(x, shift)
        return x


class CountedResidual(Residual):
    depth = 0

    def forward(self, x: Tensor) -> Tensor:
        CountedResidual.depth += 1
        return super().forward(x) * (1 + 0.1 * CountedResidual.depth)


class CountingBlocks(Stack):
    """Blocks that count on their class how deep they are."""

    block = CountedResidual

    def forward(self, x: Tensor) -> Tensor:
        CountedResidual.depth = 0
        return super().forward(x)


class TypeCountedResidual(CountedResidual):
    def forward(self, x: Tensor) -> Tensor:
        type(self).depth += 1
        return Residual.forward(self, x) * (1 + 0.1 * type(self).depth)


class CountingTypes(CountingBlocks):
    """The same by `type(self)`, which is no class of the user's where blocks are sharded."""

    block = TypeCountedResidual

    def forward(self, x: Tensor) -> Tensor:
        TypeCountedResidual.depth = 0
        return Stack.forward(self, x)


class ScaledResidual(Residual):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 1 + 0.1 * x.shape[1]
        return super().forward(x)


class NumbersOnBlocks(Stack):
    """A module that reads numbers which its blocks keep on themselves."""

    block = ScaledResidual

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x) * sum(block.scale for block in self.blocks)


class ReachingResidual(Residual):
    parent: Callable[[], Any]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x @ self.parent().first.weight.t()


class ReachedParents(Stack):
    """Blocks that reach the module around them by a weak reference."""

    block = ReachingResidual

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.parent = weakref.ref(self)


class ReducingResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized():
            all_reduce(x.detach().mean())
        return super().forward(x)


class ImportedCollectives(Stack):
    """Collectives in forward, imported by name."""

    block = ReducingResidual
