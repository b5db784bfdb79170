"""Modules with one habit of building, as scripts train them beside plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.construct import drawing_from
from tests.habits import keeping, modules
from tests.habits.building import POSITIONS, WIDTH

ROWS, STEPS, EXACT = 8, 3, 1e-9
FLOOR = 0.1  # of what errors are relative to


def make_module(name: str) -> nn.Module:
    with drawing_from(1):
        module: nn.Module = getattr(modules if hasattr(modules, name) else keeping, name)()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    return module


def run_rows(name: str, module: Any, x: Tensor, label: Tensor) -> Tensor:
    """Return the loss of some rows."""
    times = (torch.full((len(x),), 4098.0),) if name == "TimedStack" else ()
    output = module(x, *times)
    penalty = torch.zeros(())
    if isinstance(output, tuple):
        output, parameters = output
        penalty = 0.01 * torch.stack([parameter.square().sum() for parameter in parameters]).sum()
    return (output - label).square().mean() + penalty


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def train_plainly(name: str, parts: int) -> nn.Module:
    """Return the module as plain torch trains it, on the mean loss of `parts` of each batch."""
    module = make_module(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [run_rows(name, module, *rows) for rows in zip(*(value.chunk(parts) for value in make_batch(step)))]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return module


def train_with_statistics(name: str, ranks: int, shared: bool) -> nn.Module:
    """Return the module as ranks train it that each read buffers of their own; `shared`: of the first, step by step."""
    module = make_module(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    buffers = [_buffers(module)] * ranks
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, rows in enumerate(zip(*(value.chunk(ranks) for value in make_batch(step)))):
            module.load_state_dict(buffers[rank], strict=False)
            (run_rows(name, module, *rows) / ranks).backward()
            buffers[rank] = _buffers(module)
        buffers = buffers[:1] * ranks if shared else buffers
        optimizer.step()
    return module


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal_parameters(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Compare the weights of a script's model with the parameters of a module that plain torch has trained."""
    for name, expected in module.named_parameters():
        if expected.numel():
            error = (weights[name] - expected).abs().max() / expected.abs().max().clamp(min=FLOOR)
            assert error < EXACT, name
