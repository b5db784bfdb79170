"""The door of Transformer Engine, against a double of the two functions that are used of it; it runs on a GPU alone.

The double takes what Transformer Engine 2.20 takes, refuses what cuBLAS refuses, and does the arithmetic of the
emulation. What it cannot show is the hardware's product.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.kernels import float8_transformer_engine
from shardwise.kernels.float8 import E4M3, E5M2, ROLES, Float8, Quantized, quantize
from shardwise.kernels.linear import use_float8


class Quantizer:
    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, rowwise: bool, columnwise: bool, force_pow_2_scales: bool
    ) -> None:
        assert rowwise and not columnwise
        self.dtype, self.by_powers = dtype, force_pow_2_scales

    def __call__(self, values: Tensor) -> Quantized:
        assert values.is_contiguous() and values.dim() == 2 and all(size % 16 == 0 for size in values.shape)
        return quantize(values, self.dtype, by_powers=self.by_powers)


def general_gemm(
    A: Quantized, B: Quantized, *, out_dtype: torch.dtype, layout: str, use_split_accumulator: bool
) -> tuple[Any, ...]:
    assert layout == "TN" and not (A.values.dtype == B.values.dtype == E5M2)  # cuBLAS has no product of two e5m2
    assert use_split_accumulator == (E5M2 in (A.values.dtype, B.values.dtype))
    left, right = (each.values.float() / each.scale for each in (B, A))
    return (left @ right.T).to(out_dtype), None, None, None


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    formats = SimpleNamespace(kFloat8E4M3=E4M3, kFloat8E5M2=E5M2)
    doubles = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.tensor": {"Float8CurrentScalingQuantizer": Quantizer},
        "transformer_engine_torch": {"DType": formats},
    }
    for name, attributes in doubles.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    float8_transformer_engine._engine.cache_clear()
    yield
    float8_transformer_engine._engine.cache_clear()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("what", ROLES)
def test_products_are_those_of_the_emulation(what: str, gathered: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(37, 24).T, torch.randn(9, 37).T  # strides and sizes that cuBLAS would not take
    ours, theirs = (
        Float8(door, "tensorwise", gathered).product(a, b, what) for door in ("transformer_engine", "emulate")
    )
    assert ours.shape == (24, 9)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_layer_trains_through_it() -> None:
    torch.manual_seed(1)
    module, values = nn.Linear(20, 12), torch.randn(2, 5, 20)
    gradients = []
    for door in ("transformer_engine", "emulate"):
        use_float8([module], Float8(door, "tensorwise"))
        module.zero_grad()
        module(values).square().sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
