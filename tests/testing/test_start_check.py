"""Weights at start: draws of one distribution agree, other deviations, constants and zeros do not."""

from __future__ import annotations

import torch

from shardwise.testing.start_check import compare_start_buffers, compare_start_values, distributions, unlike


def _drawn(deviation: float, seed: int, size: int = 576) -> torch.Tensor:
    return deviation * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_draws_of_one_distribution_agree_and_others_do_not() -> None:
    found = distributions({"a": _drawn(0.02, 0), "b": _drawn(0.02, 1), "halved": _drawn(0.01, 2)})
    assert not unlike(found["a"], found["b"])
    assert "deviation" in unlike(found["halved"], found["b"])


def test_a_row_of_zeros_and_constants_are_compared_by_value() -> None:
    padded = _drawn(0.02, 0)
    padded[:24] = 0
    found = distributions({"padded": padded, "whole": _drawn(0.02, 1), "ones": torch.ones(8), "zeros": torch.zeros(8)})
    assert "24 zeros" in unlike(found["whole"], found["padded"])
    assert unlike(found["zeros"], found["ones"]) == "0 everywhere here, 1 everywhere there"
    assert not unlike(found["ones"], found["ones"])
    single = distributions({"one": torch.tensor([0.3]), "other": torch.tensor([-0.2])})
    assert not unlike(single["one"], single["other"])


def test_parameters_with_equal_draws_are_named() -> None:
    values, plain = _drawn(0.02, 0), distributions({"a": _drawn(0.02, 1), "b": _drawn(0.02, 2)})
    found = compare_start_values(distributions({"a": values, "b": values.clone()}), plain)
    assert [d.name for d in found if not d.agrees] == ["b: the values of a"]


def test_buffers_are_equal_unless_they_are_drawn() -> None:
    right, drawn = torch.arange(4.0), _drawn(1.0, 0)
    plain = {"table": right, "features": drawn}
    rebuilt = {"table": right, "features": _drawn(1.0, 1)}
    own = {"table": right + 1, "features": _drawn(1.0, 2)}
    found = {d.name: d.agrees for d in compare_start_buffers(own, plain, lambda: rebuilt)}
    assert found == {"buffer table": False, "buffer features": True}
