"""What the modules of habits are built of, and the data and loss that train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, INNER, POSITIONS, SAMPLES = 6, 13, 4, 40


class Rows:
    """Samples x [P, H] with a label [H]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator)
        self.y = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class TimedRows(Rows):
    """The same with a time."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "time": torch.tensor(4097.0 + index % 3)}


def squared_error(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Return (sum over the counted samples, how many)."""
    each = (output - batch.labels.to(output.dtype)).square().mean(-1)
    return (each * batch.counted).sum(), batch.counted.sum()


class Residual(nn.Module):
    """A block: [B, P, H] -> [B, P, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """A chain of three blocks between two linear layers: [B, P, H] -> [B, H]."""

    block: Any = Residual

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.read_out(self.run_blocks(self.first(x)))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def read_out(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x.mean(1))
        return result
