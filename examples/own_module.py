"""Train a module of your own: any `nn.Module`, any map-style data set, a loss as (sum, count).

    cd examples && python own_module.py

The module is built on the meta device and initialized by `reset_parameters()` of its parts, as torch's own have it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from shardwise import load_job, train

JOB = {
    "model": {"factory": "own_module:Regressor", "factory_arguments": {"width": 64}, "loss": "own_module:squares"},
    "data": {"factory": "own_module:Sines", "factory_arguments": {"count": 4096}},
    "training": {"steps": 100, "sequences_per_step": 64},
    "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.0},
    "output": "runs/own_module",
}


class Regressor(nn.Module):
    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(1, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(  # repeated blocks are found by structure; each is sharded by itself
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:  # its arguments are the keys of a sample: [B, 1] -> [B, 1]
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.outlet(hidden)


class Sines:
    """Samples are dicts of tensors; `labels` go to the batch, everything else to the module."""

    def __init__(self, count: int) -> None:
        self.x = torch.linspace(-3, 3, count)[torch.randperm(count, generator=torch.Generator().manual_seed(0))]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index, None], "labels": self.x[index, None].sin()}


def squares(output, batch) -> tuple[Tensor, Tensor]:  # padding rows of an uneven batch are not counted
    return ((output - batch.labels).square().squeeze(1) * batch.counted).sum(), batch.counted.sum()


if __name__ == "__main__":  # workers import this file; only the first process starts them
    print(train(load_job(JOB, sys.argv[1:])))
