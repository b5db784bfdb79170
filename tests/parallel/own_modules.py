"""Modules of one's own whose ranks use different parameters or blocks, their data and loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Rows:
    """Rows [4, H] whose first element has the sign of every second rank's turn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(20, 4, WIDTH, generator=generator)
        self.y = torch.randn(20, WIDTH, generator=generator)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    row = (output - batch.labels.to(output.dtype)).square().mean(-1)
    return (row * batch.counted).sum(), batch.counted.sum()


class Feed(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.up(h).tanh())


class Either(nn.Module):
    """A block of which the data chooses one half; a third is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        chosen = self.a if bool(h[0, 0, 0] > 0) else self.b
        return h + chosen(h).tanh()


class Net(nn.Module):
    """Blocks between two projections."""

    block: type[nn.Module] = Feed

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        return self.outlet(h.mean(1))


class ChosenParameters(Net):
    """The data chooses parameters of each block."""

    block = Either


class Ignoring(nn.Module):
    """A block that makes nothing of what it is given beside hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, beside: Tensor) -> Tensor:
        return h + self.inner(h).tanh()


class IgnoredArgument(Net):
    """Every block is given what a layer makes of the rows, and no block uses it: the layer has no gradient."""

    block = Ignoring

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, beside = self.inlet(x), self.beside(x)
        for block in self.blocks:
            h = block(h, beside)
        return self.outlet(h.mean(1))


class ChosenBlocks(Net):
    """The data chooses the first or the second block, and whether the last runs."""

    def forward(self, x: Tensor) -> Tensor:
        first = bool(x[0, 0, 0] > 0)
        h = self.blocks[2](self.blocks[0 if first else 1](self.inlet(x)))
        if first:
            h = self.blocks[3](h)
        return self.outlet(h.mean(1))


class SkippedBlock(Net):
    """The last block never runs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x)
        for block in self.blocks[:-1]:
            h = block(h)
        return self.outlet(h.mean(1))


class ChosenOrder(Net):
    """The data chooses the order of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x)
        for block in self.blocks if bool(x[0, 0, 0] > 0) else list(self.blocks)[::-1]:
            h = block(h)
        return self.outlet(h.mean(1))


class LateOrder(Net):
    """The data chooses the order of the blocks from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.inlet(x)
        for block in self.blocks if self.calls <= 2 or bool(x[0, 0, 0] > 0) else list(self.blocks)[::-1]:
            h = block(h)
        return self.outlet(h.mean(1))


class LateRepetition(Net):
    """From the second step on, the data chooses whether the last block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        if self.calls > 2 and bool(x[0, 0, 0] > 0):
            h = self.blocks[3](h)
        return self.outlet(h.mean(1))


class LateClamped(Net):
    """The forward writes a parameter, but not when it is looked at before the start."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            with torch.no_grad():
                self.outlet.weight.clamp_(-0.1, 0.1)
        result: Tensor = super().forward(x)
        return result


class Backless(torch.autograd.Function):
    """Has a backward that raises."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyError("gate")


class FailsInBackward(Net):
    """Its backward raises."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Backless.apply(super().forward(x))
        return result
