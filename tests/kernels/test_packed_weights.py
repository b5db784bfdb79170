"""Weights in 4 or 8 bits: what their packed form holds, and the products of layers that have it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels.packed_weights import NORMAL_FLOAT, packed_form, packed_product, rounded, unpacked_weight
from shardwise.model.packed_weights import packed_bytes, packed_shape
from shardwise.testing.oracle_quantization import quantized


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_the_packed_form_is_what_the_papers_rule_gives(form: str) -> None:
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(1))
    weight[2, 64:128] = 0  # a block without a largest
    packed = packed_form(weight, form)
    assert packed.dtype == torch.int8 and tuple(packed.shape) == packed_shape(weight.shape, form)
    assert packed.numel() == weight.numel() * packed_bytes(form)
    assert torch.equal(unpacked_weight(packed, form, torch.float32), quantized(weight, form))
    assert torch.equal(rounded(weight, form), quantized(weight, form))


def test_slices_of_whole_blocks_are_those_of_the_packed_form() -> None:
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(2))
    assert torch.equal(packed_form(weight, "nf4")[2:5, 1:], packed_form(weight[2:5, 64:], "nf4"))


def test_the_values_of_normal_float_are_kept_exactly() -> None:
    weight = torch.tensor(NORMAL_FLOAT).repeat(4).view(1, 64) * 3
    assert torch.equal(rounded(weight, "nf4"), weight)


def test_a_packed_form_that_was_gathered_in_16_bits_is_the_same() -> None:
    packed = packed_form(torch.randn(4, 64, generator=torch.Generator().manual_seed(3)), "int8")
    assert torch.equal(*(unpacked_weight(form, "int8", torch.float32) for form in (packed.bfloat16(), packed)))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients_are_those_of_the_rounded_weight(transposed: bool) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).double()
    exact = rounded(weight, "nf4").T if transposed else rounded(weight, "nf4")
    values = torch.randn(3, exact.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(exact.shape[0], dtype=torch.float64)
    product = packed_product(values, packed_form(weight, "nf4"), bias, "nf4", transposed)
    assert torch.allclose(product, F.linear(values, exact, bias), rtol=1e-12)
    (gradient,) = torch.autograd.grad(product.square().sum(), values)
    (expected,) = torch.autograd.grad(F.linear(values, exact, bias).square().sum(), values)
    assert torch.allclose(gradient, expected, rtol=1e-12)
