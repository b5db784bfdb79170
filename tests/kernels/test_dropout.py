"""Layout-independent dropout: a pure function of its names and rows, with the statistics of dropout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.kernels.dropout import (
    DropoutScope,
    IndexedDropout,
    dropout,
    dropout_scope,
    keep_mask,
    name_functional_dropout,
    replace_dropout,
)
from shardwise.testing.oracle_dropout import OracleDropout, oracle_keep_mask


def scope(rows: list[int], step: int = 0, seed: int = 0, functional: bool = False) -> DropoutScope:
    return DropoutScope(seed, step, torch.tensor(rows), functional=functional)


def drop(rows: list[int], name: str = "a", step: int = 0, seed: int = 0, p: float = 0.3) -> torch.Tensor:
    with dropout_scope(scope(rows, step, seed)):
        return dropout(torch.ones(len(rows), 5, 40), p, name)


def test_a_row_keeps_its_mask_in_any_batch() -> None:
    together = drop([4, 5, 6, 7])
    assert torch.equal(together[1:3], drop([5, 6]))
    assert torch.equal(together[3:], drop([7]))


@pytest.mark.parametrize("other", [{"rows": [9]}, {"name": "b"}, {"step": 1}, {"seed": 1}])
def test_anything_else_gives_another_mask(other: dict) -> None:
    assert not torch.equal(drop(**{"rows": [3], **other}), drop([3]))


def test_a_second_use_of_a_name_gives_another_mask_and_a_snapshot_the_same() -> None:
    with dropout_scope(scope([1])) as _:
        first, second = dropout(torch.ones(1, 99), 0.5, "a"), dropout(torch.ones(1, 99), 0.5, "a")
    assert not torch.equal(first, second)
    before = scope([1])
    before.calls = Counter(a=1)
    with dropout_scope(before.snapshot()):
        assert torch.equal(dropout(torch.ones(1, 99), 0.5, "a"), second)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_statistics(p: float) -> None:
    """Share, runs along elements, and rows against each other: within 5 sigma of independent coins."""
    mask = keep_mask(1234567, torch.arange(200), 5000, 1 - p).double()
    count, sigma = mask.numel(), (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - (1 - p)) < 5 * sigma
    centred = mask - (1 - p)
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1], centred[:, 64:] * centred[:, :-64]):
        assert abs(float(shifted.mean())) < 5 * p * (1 - p) / count**0.5
    per_element = mask.mean(0)
    assert float((per_element - (1 - p)).abs().max()) < 6 * (p * (1 - p) / 200) ** 0.5


def test_kept_elements_are_scaled_so_that_the_mean_stays() -> None:
    values = drop(list(range(400)), p=0.25)
    assert values.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs(float(values.mean()) - 1) < 0.01


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, 987654321987654321])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.7])
def test_masks_are_those_of_the_independent_implementation(key: int, p: float) -> None:
    rows = [0, 1, -1, 2**40 + 3, 2**62 + 5]
    ours = keep_mask(key, torch.tensor(rows), 1000, 1 - p).numpy()
    theirs = np.stack([oracle_keep_mask(key, row, 1000, p) if p else np.ones(1000, dtype=bool) for row in rows])
    assert (ours == theirs).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_that_of_the_independent_implementation(dtype: torch.dtype) -> None:
    """Between the bounds, and another at each use."""
    rows = [3, 2**40 + 3]
    oracle = OracleDropout(nn.Linear(1, 1), [], 5)
    with oracle.begin(2, rows):
        theirs = [torch.empty(2, 7, 4, dtype=dtype).uniform_(0.9, 1.1) for _ in range(2)]
    with dropout_scope(scope(rows, 2, 5, functional=True)):
        ours = [torch.empty(2, 7, 4, dtype=dtype).uniform_(0.9, 1.1) for _ in range(2)]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-7 if dtype == torch.float32 else 1e-15, atol=0)
    assert 0.9 <= float(ours[0].min()) < 0.95 and 1.05 < float(ours[0].max()) <= 1.1
    assert not torch.equal(ours[0], ours[1])


def test_noise_of_a_part_of_the_positions_is_that_of_the_whole() -> None:
    whole_scope, part_scope = (scope([4, 9], functional=True) for _ in range(2))
    part_scope.positions = (2, 5)
    with dropout_scope(whole_scope):
        whole = torch.empty(2, 7, 4).uniform_(0.9, 1.1)
    with dropout_scope(part_scope):
        assert torch.equal(torch.empty(2, 3, 4).uniform_(0.9, 1.1), whole[:, 2:5])


def test_edges() -> None:
    with dropout_scope(scope([0, 1])):
        assert torch.equal(dropout(torch.ones(2, 3), 1.0, "a"), torch.zeros(2, 3))
        shared = dropout(torch.ones(1, 500), 0.5, "table")  # belongs to no row
    with dropout_scope(scope([7, 8, 9])):
        assert torch.equal(dropout(torch.ones(1, 500), 0.5, "table"), shared)
    with pytest.raises(RuntimeError, match="outside of a training step"):
        dropout(torch.ones(2, 3), 0.5, "a")
    module = IndexedDropout(0.5, "a").eval()
    assert torch.equal(module(torch.ones(2, 3)), torch.ones(2, 3))


class InPlace(nn.Module):
    """It takes nothing of what its dropout returns."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional, self.drop = functional, nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x * 3
        if self.functional:
            nn.functional.dropout(result, 0.5, self.training, inplace=True)
        else:
            self.drop(result)
        return result


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_in_place_changes_what_it_is_given(functional: bool) -> None:
    net, oracle = InPlace(functional), InPlace(functional)
    replace_dropout(net)
    x = torch.ones(2, 50, requires_grad=True)
    with dropout_scope(scope([4, 5], functional=True)):
        result = net(x)
    result.sum().backward()
    assert set(result.unique().tolist()) == {0.0, 6.0} and torch.equal(x.grad, result)
    with OracleDropout(oracle, [], 0).begin(0, [4, 5]):
        assert torch.equal(oracle(torch.ones(2, 50)), result)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.0))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5, self.training)
        return x


def test_modules_are_replaced_by_name() -> None:
    net = Net()
    replace_dropout(net)
    found = {name: module.name for name, module in net.named_modules() if isinstance(module, IndexedDropout)}
    assert found == {"layers.0.0": "layers.0.0", "layers.1.0": "layers.1.0"}
    assert not any(type(module) is nn.Dropout for module in net.modules())


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, p=0.5, training=self.training)


def test_functional_calls_are_named_by_their_block_and_not_by_order() -> None:
    blocks = [Block(), Block()]
    name_functional_dropout(blocks, ["b0", "b1"])
    ones = torch.ones(2, 300)

    def run(order: list[int]) -> dict[int, torch.Tensor]:
        with dropout_scope(scope([0, 1], functional=True)):
            return {number: blocks[number](ones) for number in order}

    forward, backward = run([0, 1]), run([1, 0])
    assert all(torch.equal(forward[number], backward[number]) for number in (0, 1))
    assert not torch.equal(forward[0], forward[1])
    blocks[0].eval()
    assert torch.equal(run([0])[0], ones)
    torch.manual_seed(0)
    blocks[0].train()
    assert not torch.equal(blocks[0](ones), blocks[0](ones))  # without a scope: torch's own
