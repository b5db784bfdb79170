"""A remembered operator gives what torch's own fake tensors give: metadata, memory of its arguments, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise._torch_compat.remembered_fakes import RememberedFakeMode
from shardwise._torch_compat.tracing import DataDependentOutputException, FakeTensorMode, tree_leaves

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "memory of its own": lambda x: x * 2,
    "a transposed result": lambda x: x.t() + 1,
    "a view": lambda x: x.view(-1),
    "a view of a view": lambda x: x.t()[2:, 1],
    "several views": lambda x: x.split(2),
    "in place": lambda x: x.add_(1),
    "in place of a view": lambda x: x[1].mul_(2.0),
    "lists in place": lambda x: torch._foreach_add_([x[0], x[1]], 1.0),
    "several results": lambda x: x.max(1),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a dtype by a number's type": lambda x: (x.long() * 2, x.long() * 2.0),
    "a factory": lambda x: torch.zeros(x.shape[0], 5),
    "itself": lambda x: x.contiguous(),
    "other sizes": lambda x: torch.empty(3).resize_(7),
    "of two": lambda x: torch.cat([x, x[:1]]),
    "complex": lambda x: torch.complex(x, x).conj(),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 1, 4, 6) for _ in range(3)), is_causal=True),
}


def seen(mode: FakeTensorMode, call: Callable[[Tensor], Any]) -> list[Any]:
    """Metadata of what a call returns, twice, and whether it has the memory of its argument."""
    results = []
    with mode:
        for _ in range(3):
            x = torch.empty(4, 6)
            output = call(x)
            for value in tree_leaves(output):
                shared = value.untyped_storage()._cdata == x.untyped_storage()._cdata
                layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
                results.append((*layout, value.is_conj(), value.untyped_storage().nbytes(), shared, value is x))
    return results


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_torch_gives(name: str) -> None:
    assert seen(RememberedFakeMode(), CALLS[name]) == seen(FakeTensorMode(), CALLS[name])


def test_an_operator_is_worked_out_once_for_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: Any, func: Any, *others: Any) -> Any:
        asked.append(func._opname)
        return dispatch(self, func, *others)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    with RememberedFakeMode():
        for rows in (2, 2, 2, 3):
            torch.empty(rows, 4).exp()
    assert asked.count("exp") == 2  # of two shapes


def test_values_are_asked_for_each_time() -> None:
    with RememberedFakeMode():
        x = torch.empty(3)
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                x.sum().item()
        assert [torch.tensor(value).item() for value in (4, 5, 4)] == [4, 5, 4]  # constants are known


def test_gradients_and_versions_are_autograds() -> None:
    with RememberedFakeMode():
        layer = nn.Linear(4, 4)
        for _ in range(2):
            layer(torch.empty(2, 4)).sum().backward()
            assert layer.weight.grad is not None and layer.weight.grad.shape == (4, 4)
        x = torch.empty(3, requires_grad=True)
        for _ in range(2):
            y = x.exp()
            y.add_(1)  # which backward needs as it was
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
