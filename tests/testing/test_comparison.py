"""Gradients in 16 bits are held to the noise that was measured, and to their direction."""

from __future__ import annotations

import torch

from shardwise.testing.comparison import Tolerance, compare_directions


def _compared(ours: torch.Tensor, right: torch.Tensor, noise: float) -> dict[str, bool]:
    found = compare_directions(0, {"w": ours}, {"w": right}, {"w": noise}, Tolerance(4e-3))
    return {difference.quantity: difference.agrees for difference in found}


def test_noise_is_allowed_and_more_is_not() -> None:
    right = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    noise = 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert _compared(right + noise, right, float(noise.norm())) == {"gradient": True, "direction": True}
    assert not _compared(right + 20 * noise, right, float(noise.norm()))["gradient"]


def test_a_zero_gradient_has_no_direction_though_noise_is_a_fifth_of_it() -> None:
    right = torch.ones(100)
    assert _compared(torch.zeros(100), right, 2.0) == {"gradient": True, "direction": False}


def test_a_gradient_of_nothing_but_noise_is_not_judged_by_its_direction() -> None:
    right = torch.tensor([1e-3, -1e-3])
    assert _compared(-right, right, 1e-3) == {"gradient": True}
