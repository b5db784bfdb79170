"""Sums of parameters change with what is written, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.model.value_sums import is_other, value_sum

WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda tensor: tensor * 0.5,
    "exchanged rows": lambda tensor: tensor.flip(0),
    "conjugated": lambda tensor: tensor.conj(),
    "one element": lambda tensor: tensor + torch.eye(2, dtype=tensor.dtype) * 1e-6,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_changes_the_sum(write: str) -> None:
    tensor = torch.tensor([[1 + 2j, 3 + 1j], [2 - 1j, 4 + 5j]], dtype=torch.complex128)
    assert is_other(value_sum(WRITES[write](tensor)), value_sum(tensor))
    assert not is_other(value_sum(tensor.clone()), value_sum(tensor))


def test_values_that_are_no_numbers_are_equal_to_themselves() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), 1.0])
    assert not is_other(value_sum(tensor.clone()), value_sum(tensor))


def test_a_fake_parameter_has_no_values() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, 2)
    assert value_sum(fake) is None and not is_other(None, value_sum(torch.ones(2)))
