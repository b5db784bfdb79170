"""Codes of one byte: the nearest value, and the same bits wherever a row is cut."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.block_codes import Span, codes_of, decode, dynamic_map, largest_of_blocks, scales_of

FORMS = [("dynamic", True), ("dynamic", False), ("fp8", True)]


def coded(values: torch.Tensor, span: Span, form: str, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scales = scales_of(largest_of_blocks(values, span), form)
    return codes_of(values, scales, span, form, signed), scales


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_has_256_values_of_seven_decades(signed: bool) -> None:
    values, borders = dynamic_map(signed, torch.device("cpu"))
    assert values.shape == (256,) and borders.shape == (255,)
    assert bool((values[1:] > values[:-1]).all()) and 0.0 in values and values[-1] == 1.0
    positive = values[values > 0]
    # Means of one interval, or two, of the smallest decade; of 64 or 128 of the greatest.
    assert positive[0].item() == pytest.approx(0.55e-6 if signed else 0.325e-6)
    assert positive[-2].item() == pytest.approx(1 - 0.45 / (64 if signed else 128))


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_gets_the_nearest_value(signed: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 300, dtype=torch.float64) ** 3
    values = values if signed else values.abs()
    span = Span(0, 300, 128)
    codes, scales = coded(values, span, "dynamic", signed)
    assert codes.dtype == torch.uint8 and scales.shape == (5, 3)
    of_block = scales.double().repeat_interleave(128, 1)[:, :300]
    table = dynamic_map(signed, torch.device("cpu"))[0].double()
    distances = ((values / of_block).unsqueeze(-1) - table).abs()
    taken = distances.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(taken, distances.amin(-1), rtol=0, atol=1e-8)
    back = decode(codes, scales, span, "dynamic", signed, torch.float64)
    torch.testing.assert_close(back, table[codes.long()] * of_block, rtol=0, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_fp32_has_the_codes_of_a_search(signed: bool) -> None:
    torch.manual_seed(0)
    borders = dynamic_map(signed, torch.device("cpu"))[1]
    beside = [torch.nextafter(borders, torch.full_like(borders, way)) for way in (-2.0, 2.0)]
    parts = torch.cat([borders, *beside, torch.randn(10_000).clamp_(-1, 1) ** 5, torch.zeros(3), -torch.zeros(3)])
    parts = torch.cat([parts, torch.ones(1)]).unsqueeze(0)  # one block, whose scale is 1
    span = Span(0, parts.shape[1], parts.shape[1])
    codes = codes_of(parts, torch.ones(1, 1), span, "dynamic", signed)
    assert torch.equal(codes, torch.bucketize(parts, borders, right=True).to(torch.uint8))


@pytest.mark.parametrize("form, signed", FORMS)
def test_a_slice_of_a_row_has_the_codes_of_the_whole(form: str, signed: bool) -> None:
    torch.manual_seed(0)
    values, block = torch.randn(4, 100).abs_(), 32
    whole, scales = coded(values, Span(0, 100, block), form, signed)
    for first, last in ((0, 50), (50, 100), (40, 60), (33, 35), (96, 100)):
        span = Span(first, last - first, block)
        blocks = slice(span.blocks.start, span.blocks.stop)
        own = codes_of(values[:, first:last], scales[:, blocks], span, form, signed)
        assert torch.equal(own, whole[:, first:last])
        back = decode(own, scales[:, blocks], span, form, signed, torch.float32)
        assert torch.equal(back, decode(whole, scales, Span(0, 100, block), form, signed, torch.float32)[:, first:last])


@pytest.mark.parametrize("form, signed", FORMS)
def test_zeros_stay_zeros(form: str, signed: bool) -> None:
    span = Span(0, 64, 64)
    codes, scales = coded(torch.zeros(2, 64), span, form, signed)
    assert not decode(codes, scales, span, form, signed, torch.float32).any()
