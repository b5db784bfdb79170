"""The fp16 loss scaler and SMP's arguments of it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.job.schema import LossScaleSection
from shardwise.kernels.precision import LossScaler


def scaler(**settings: Any) -> LossScaler:
    return LossScaler.of("fp16", LossScaleSection(**settings))


def scales(made: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; `x` overflows."""
    found = []
    for letter in overflows:
        made.update(letter == "x")
        found.append(made.scale)
    return found


@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_other_dtypes_are_not_scaled(compute: str) -> None:
    made = LossScaler.of(compute, LossScaleSection())
    assert scales(made, "x.x.x") == [1.0] * 5 and made.scale == 1.0


def test_defaults_are_smps() -> None:
    made = scaler()
    assert made.scale == 2**16
    assert scales(made, "." * 1000)[-2:] == [2**16, 2**17]


def test_grows_after_every_window_of_good_steps_and_shrinks_at_once() -> None:
    made = scaler(init_scale=8, scale_window=3)
    assert scales(made, "...x..x......") == [8, 8, 16, 8, 8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_scale_factor_and_smallest_scale() -> None:
    made = scaler(init_scale=100, scale_factor=10, min_scale=5)
    assert not made.exhausted()
    assert scales(made, "xxx") == [10, 5, 5]
    assert made.exhausted()


def test_hysteresis_tolerates_overflows_before_shrinking() -> None:
    assert scales(scaler(init_scale=8, delayed_shift=3), "xxxx") == [8, 8, 4, 2]


def test_good_steps_restore_hysteresis_only_where_asked() -> None:
    kept = scaler(init_scale=8, delayed_shift=2)
    assert scales(kept, "x.x") == [8, 8, 4]
    restored = scaler(init_scale=8, delayed_shift=2, consecutive_hysteresis=True)
    assert scales(restored, "x.x.xx") == [8, 8, 8, 8, 8, 4]


def test_growing_restores_hysteresis() -> None:
    made = scaler(init_scale=8, delayed_shift=2, scale_window=2)
    assert scales(made, "x..xx") == [8, 8, 16, 16, 8]


def test_a_static_scale_never_moves() -> None:
    made = scaler(static=128.0)
    assert scales(made, "xx.." * 600) == [128.0] * 2400 and not made.exhausted()
