"""Habits that only make sense among others, in the form of `tests/habits/modules.py`, so that they compose.

Each is a `Stack` whose blocks call `super()`: a drawn module inherits from several, and so do its blocks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.building import POSITIONS, WIDTH, Residual, Stack

# ---- layers of blocks


class LayerNormedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class LayerNormed(Stack):
    block = LayerNormedResidual


class ConvolvedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.convolution(x.transpose(1, 2)).transpose(1, 2))


class Convolved(Stack):
    block = ConvolvedResidual


class EmbeddedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places(torch.arange(x.shape[1], device=x.device)))


class Embedded(Stack):
    block = EmbeddedResidual


class RecurrentResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.recurrence(x)[0])


class Recurrent(Stack):
    """torch's recurrent layers keep a plain list of their parameters."""

    block = RecurrentResidual


class DroppingResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class DroppingNothing(Stack):
    block = DroppingResidual


class AveragingResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x).masked_fill(~self.mask, 0.0)


class CountingBuffers(Stack):
    """Buffers of integers and booleans."""

    block = AveragingResidual


class CheckpointedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class CheckpointsItself(Stack):
    """`torch.utils.checkpoint` inside of the blocks."""

    block = CheckpointedResidual


class ReentrantResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


class ReentersItself(Stack):
    """The same with reentry."""

    block = ReentrantResidual


class SteepnessResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        inner = x if x.requires_grad else x.detach().requires_grad_()
        result = super().forward(inner)
        if not result.requires_grad:
            return result
        (slope,) = torch.autograd.grad(result.sum(), inner, create_graph=True)
        return result + 0.1 * slope


class SecondOrder(Stack):
    """Gradients of gradients in forward."""

    block = SteepnessResidual


# ---- parameters of unusual kinds


class ListedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.full((WIDTH,), 1.0 + 0.1 * number) for number in range(2))
        self.shifts = nn.ParameterDict({"before": torch.zeros(WIDTH), "after": torch.full((WIDTH,), 0.1)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gains[0] + self.shifts["before"]
        return super().forward(x) * self.gains[1] + self.shifts["after"]


class ListsOfParameters(Stack):
    """`ParameterList` and `ParameterDict`."""

    block = ListedResidual


class UnusedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Parameter(torch.full((WIDTH,), 0.2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Unused(Stack):
    """Parameters that nothing uses."""

    block = UnusedResidual


# ---- ties and frozen parameters


class TiedEnds(Stack):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class SharedLayer(Stack):
    """Blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = self.blocks[0].up


class CopiedBlocks(Stack):
    """Blocks are deep copies of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(3))


class FrozenBlock(Stack):
    """A block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenLayers(Stack):
    """Some weights of each block, and what comes before them, have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        for block in self.blocks:
            block.down.bias.requires_grad_(False)


class FrozenRows(Stack):
    """A hook keeps rows as they are."""

    def __init__(self) -> None:
        super().__init__()
        keep = torch.arange(WIDTH) % 2
        self.last.weight.register_hook(lambda gradient: gradient * keep.to(gradient.dtype)[:, None])


# ---- what is read elsewhere


class NeighbourReading(Stack):
    """The module reads a parameter of a block."""

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x) * (1 + 0.1 * self.blocks[1].down.bias.sum())


class OwnPenaltyResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class OwnPenalty(Stack):
    """Blocks read their own parameters."""

    block = OwnPenaltyResidual


class WeightReading(Stack):
    """A product with the transposed weight of another layer."""

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + x @ self.first.weight.t())


# ---- values of constructors and those that forward changes


class DrawnByHand(Stack):
    """Draws from torch's generator in the constructor."""

    computed = ("offset",)

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.arange(WIDTH) * 0.1)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + self.offset) * self.table


class Clamped(Stack):
    """Forward clamps a weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class WithoutGradients(Stack):
    """A part runs without gradients."""

    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            rest = self.last(x)
        return super().run_blocks(x + 0.1 * rest)


# ---- experts


class RoutedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach()[0, 0, 0] > 0) + int(x.detach()[0, 0, 1] > 0)
        return super().forward(x + torch.tanh(self.experts[chosen](x)))


class ConditionalExperts(Stack):
    """The data choose which expert of a block runs."""

    block = RoutedResidual


# ---- how blocks are called: one of these, or of `tests/habits/modules.py`, in a module


class TupleResidual(Residual):
    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x * scale)
        return x, x.square().mean((1, 2))


class Tuples(Stack):
    """Blocks return tuples."""

    block = TupleResidual

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x, extra = block(x, 1.0 + 0.1 * number)
            total = total + extra
        return self.read_out(x) + 0.1 * total[:, None]


class DictResidual(Residual):
    def forward(self, states: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"hidden": super().forward(states["hidden"]), "depth": states["depth"] + 1}


class Dicts(Stack):
    """Blocks take and return dicts."""

    block = DictResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        states: dict[str, Any] = {"hidden": x, "depth": 0}
        for block in self.blocks:
            states = block(states)
        result: Tensor = states["hidden"] * states["depth"]
        return result


@dataclass
class BlockOutput:
    """An object that blocks return."""

    hidden: Tensor
    sizes: list[Tensor]


class ObjectResidual(Residual):
    def forward(self, x: Tensor) -> BlockOutput:  # type: ignore[override]
        x = super().forward(x)
        return BlockOutput(x, [x.abs().mean()])


class Objects(Stack):
    """Blocks return objects."""

    block = ObjectResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            output = block(x)
            x = output.hidden / (1 + output.sizes[0])
        return x


class Skipping(Stack):
    """The data choose which blocks run."""

    def forward(self, x: Tensor) -> Tensor:
        self.chosen = (x[0, 0, :3] > -0.5).tolist()
        return super().forward(x)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, is_chosen in zip(self.blocks, self.chosen, strict=True):
            x = block(x) if is_chosen else x
        return x


class EarlyExit(Stack):
    """The data choose after which block forward ends."""

    def forward(self, x: Tensor) -> Tensor:
        self.depth = 1 + int(x[0, 0, 0] > 0) + int(x[0, 1, 0] > 0)
        return super().forward(x)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


class Backwards(Stack):
    """Blocks run in another order than they stand."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Repeated(Stack):
    """A block runs twice."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(self.blocks[0](x))


class EncodingResidual(Residual):
    def encode(self, x: Tensor) -> Tensor:
        return self(x) * 0.5 + 0.5 * self.down(self.up(x))


class OtherMethods(Stack):
    """The module calls another method of its blocks than forward."""

    block = EncodingResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)
        return x


class CachingResidual(Residual):
    def forward(self, x: Tensor, cache: dict[int, Tensor], number: int) -> Tensor:  # type: ignore[override]
        x = super().forward(x + cache.get(number - 1, 0.0))
        cache[number] = x.detach() * 0.1
        return x


class Caches(Stack):
    """Blocks fill a cache by number."""

    block = CachingResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        cache: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x = block(x, cache, number)
        return x


class DenselyConnected(Stack):
    """Each block is given what all before it have returned."""

    def run_blocks(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(torch.stack(outputs).mean(0)))
        return outputs[-1]


class Split(Stack):
    """The blocks run on halves of the hidden states' positions."""

    def run_blocks(self, x: Tensor) -> Tensor:
        early, late = x[:, :2], x[:, 2:]
        for block in self.blocks:
            x = block(torch.cat([early, late], 1))
            early, late = x[:, 2:], x[:, :2]
        return x
