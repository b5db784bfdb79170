"""Checks of the options of this package's optimizers, said as torch's classes say it."""

from __future__ import annotations

from collections.abc import Sequence


def check_rates(lr: float, weight_decay: float, eps: float = 0.0) -> None:
    """Raise ValueError for a negative learning rate, weight decay or eps."""
    for name, value in (("learning rate", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if not value >= 0.0:
            raise ValueError(f"Invalid {name}: {value}; it must be at least 0")


def check_betas(betas: Sequence[float], most: float = 1.0) -> tuple[float, float]:
    """Return two decay rates.

    Raises:
        ValueError: there are not two, or one is not in [0, `most`), or at 1.0 below it.
    """
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 and beta <= most for beta in betas):
        bound = "below 1" if most == 1.0 else f"at most {most}"
        raise ValueError(f"Invalid betas: {list(betas)}; two numbers from 0 on, {bound}")
    return betas[0], betas[1]
