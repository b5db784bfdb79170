"""Optimizers of this package by themselves: the plain forms of the oracle and of torch, and what they keep."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.job.optimizers import optimizer_class
from shardwise.kernels import block_codes
from shardwise.observe.memory import LiveBytes
from shardwise.testing.oracle_optimizers import PLAIN, dynamic_values
from shardwise.training.optimizers import slice_optimizer
from shardwise.training.optimizers.adamw_blocks import AdamW8bit, BlockwiseAdamW

SHAPES = [(40, 300), (33,), (4, 70, 90), (8, 8), (5, 3000), ()]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PLAIN if name != "Muon"),  # which has tests of its own
    ("AdamW8bit", {"block_size": 96, "betas": (0.8, 0.9), "eps": 1e-6}),
    ("AdamWFp8", {"block_size": 96}),
    ("Adafactor", {"eps": (1e-6, 1e-2), "d": 2.0, "beta2_decay": -0.5}),
    ("ScheduleFreeAdamW", {"betas": (0.95, 0.99), "r": 0.5, "weight_lr_power": 1.0}),
]


@pytest.mark.parametrize("name, options", CASES)
def test_numbers_are_those_of_the_plain_form(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    made, plain = (kind(p, lr=0.1, weight_decay=0.1, **options) for kind, p in _kinds(name, ours, theirs))
    for step in range(4):
        for group in (*made.param_groups, *plain.param_groups):
            group["lr"] = 0.1 / (step + 1)
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        made.step()
        plain.step()
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def _kinds(name: str, ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    return [(optimizer_class(name), ours), (PLAIN[name], theirs)]


@pytest.mark.parametrize("signed", [True, False])
def test_the_oracle_has_the_same_map(signed: bool) -> None:
    values = block_codes.dynamic_map(signed, torch.device("cpu"))[0]
    assert torch.equal(values, torch.tensor(dynamic_values(signed)))


def shared_tables() -> list[torch.Tensor]:
    """Return the tables of codes that all optimizers of a process share: 0.6 MiB."""
    cpu = torch.device("cpu")
    tables = [
        table(signed, cpu) for table in (block_codes.dynamic_map, block_codes.codes_by_bits) for signed in (True, False)
    ]
    return [tensor for pair in tables for tensor in pair]


@pytest.mark.parametrize("kind", BlockwiseAdamW.__subclasses__())
def test_moments_take_a_byte_an_element_and_a_scale_a_block(kind: type[BlockwiseAdamW]) -> None:
    with LiveBytes(shared_tables()) as memory:
        weights = [nn.Parameter(torch.zeros(shape)) for shape in ((128, 1024), (60, 700), (1000,))]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        before = memory.live
        optimizer = kind(weights)
        optimizer.step()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        held = memory.live - before
    matrices, scales, vector = 128 * 1024 + 60 * 700, 128 * 4 + 60 * 3, 1000
    closed_form = 2 * (matrices + 4 * scales + 4 * vector)
    assert held == pytest.approx(closed_form, rel=0.05)
    assert sum(tensor.nbytes for state in optimizer.state.values() for tensor in _tensors(state)) == closed_form


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def test_an_update_needs_little_memory_beside_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_optimizer, "CPU_CHUNK", 1 << 12)
    weight = nn.Parameter(torch.zeros(64, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW8bit([weight])
    optimizer.step()
    with LiveBytes(weight, optimizer, shared_tables()) as memory:
        held = memory.live
        optimizer.step()
    assert memory.peak - held < weight.nbytes / 2


WRONG = [
    ("Lion", {"betas": (0.9, 1.0)}, "below 1"),
    ("AdamWBf16", {"betas": (0.9, 0.999)}, "at most 0.99"),
    ("AdamW8bit", {"block_size": 0}, "block_size"),
    ("ScheduleFreeAdamW", {"betas": (0.0, 0.9)}, "above 0"),
    ("Adafactor", {"d": 0.5}, "at least 1"),
    ("Adafactor", {"eps": (None, -1.0)}, "at least 0"),
]


@pytest.mark.parametrize("name, options, words", WRONG)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer_class(name)([nn.Parameter(torch.zeros(2))], **options)


def test_adafactor_has_torch_s_options() -> None:
    theirs = inspect.signature(torch.optim.Adafactor).parameters
    ours = inspect.signature(optimizer_class("Adafactor")).parameters
    assert {name: parameter.default for name, parameter in ours.items()} == {
        name: parameter.default for name, parameter in theirs.items() if name not in ("foreach", "maximize")
    }
