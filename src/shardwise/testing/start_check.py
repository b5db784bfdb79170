"""Weights and buffers at start against the plainly built model: the same values, or draws of the same distribution.

Two builds of a model draw other numbers, so what is drawn is compared by mean, standard deviation and zeros; what is
constant, loaded or computed, and buffers, by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.testing.comparison import Difference
from shardwise.testing.oracle_start import equal_but_for_rounding

SIGMAS = 7.0  # of the difference of two samples of one distribution, by which they may be off
FEWEST = 64  # elements from which a distribution can be told
NEAR_MEAN = 1e-2  # deviations of the old rows by which one of an added token may differ from their mean
PAIR = 2  # normal draws come in pairs that share a factor (Box and Muller, 1958), which may be zero
CHANCE_OF_ZERO = 2.0**-20  # at most, of a normal draw in fp32, whose uniform numbers have 24 bits


class Distribution(NamedTuple):
    """Moments of a tensor's elements. `spread` is the variance of the logarithm of `deviation`."""

    mean: float
    deviation: float
    spread: float
    zeros: int
    elements: int

    @classmethod
    def of(cls, tensor: Tensor) -> Distribution:
        """Measure a tensor."""
        values = tensor.detach().double().flatten()
        count = max(values.numel(), 1)
        mean = float(values.mean()) if values.numel() else 0.0
        squares = (values - mean).square()
        variance = float(squares.mean()) if values.numel() else 0.0
        kurtosis = float(squares.square().mean()) / variance**2 if variance else 1.0
        deviation = math.sqrt(variance) if variance > (1e-7 * abs(mean)) ** 2 else 0.0
        return cls(mean, deviation, (kurtosis - 1) / (4 * count), int((values == 0).sum()), values.numel())


def distributions(tensors: Mapping[str, Tensor]) -> dict[str, Distribution]:
    """Return the distribution of each tensor."""
    return {name: Distribution.of(tensor) for name, tensor in tensors.items() if not tensor.is_complex()}


def compare_start_values(ours: Mapping[str, Distribution], plain: Mapping[str, Distribution]) -> list[Difference]:
    """Compare the engine's parameters at start with the plain model's."""
    equal = _drawn_alike(ours, plain)
    return [
        Difference(0, "plain start", f"{name}: {why}" if why else name, math.inf if why else 0.0, 0.0)
        for name, unlikeness in _parameters(ours, plain)
        for why in [unlikeness or equal.get(name, "")]
    ]


def _drawn_alike(ours: Mapping[str, Distribution], plain: Mapping[str, Distribution]) -> dict[str, str]:
    """Return of parameters with the values of an earlier one, which they do not have in the plain model, whose."""
    first: dict[Distribution, str] = {}
    repeated = {}
    for name, values in ours.items():
        if name not in plain or not values.deviation or values.elements < FEWEST:
            continue
        other = first.setdefault(values, name)
        if plain[other] != plain[name]:
            repeated[name] = f"the values of {other}"
    return repeated


def compare_start_buffers(
    own_buffers: Mapping[str, Tensor], buffers: Mapping[str, Tensor], rebuilt: Callable[[], Mapping[str, Tensor]]
) -> list[Difference]:
    """Compare the engine's buffers with the plain model's.

    Args:
        own_buffers, buffers: the engine's and the plain model's.
        rebuilt: builds the plain model once more and returns its buffers: those that differ are drawn.
    """
    differing = [
        name
        for name, buffer in own_buffers.items()
        if name in buffers and buffer.shape == buffers[name].shape and not equal_but_for_rounding(buffer, buffers[name])
    ]
    again = rebuilt() if differing else {}
    drawn = [name for name in differing if not equal_but_for_rounding(again[name], buffers[name])]
    return [
        Difference(0, "plain start", f"buffer {name}" if name in differing else name, error, 0.0)
        for name in own_buffers
        if name in buffers
        for error in [math.inf if name in differing and name not in drawn else 0.0]
    ]


def compare_known_start(
    ours: Mapping[str, Tensor], known: Mapping[str, Tensor], weight_dtypes: Mapping[str, str]
) -> list[Difference]:
    """Compare the engine's start with the values that no random number has made.

    Args:
        ours: parameters and buffers.
        known: those of the plain model.
        weight_dtypes: parameter -> name of the dtype to which the job rounds it.
    """
    return [
        Difference(0, "plain start", name if agrees else f"{name}: other values than it has", error, 0.0)
        for name, value in known.items()
        if name in ours
        for agrees in [_is_known_value(ours[name], value, weight_dtypes.get(name, "float32"))]
        for error in [0.0 if agrees else math.inf]
    ]


def _is_known_value(ours: Tensor, known: Tensor, dtype: str) -> bool:
    if known.dim() and ours.shape[1:] == known.shape[1:] and len(ours) > len(known):
        ours, added = ours[: len(known)], ours[len(known) :].double()
        if not bool(((added - known.mean(0)).abs() <= NEAR_MEAN * known.std(0)).all()):
            return False
    return ours.shape == known.shape and equal_but_for_rounding(ours, known, getattr(torch, dtype))


def _parameters(ours: Mapping[str, Distribution], plain: Mapping[str, Distribution]) -> Iterator[tuple[str, str]]:
    """Yield (name, what is wrong with it, if something is) of parameters that both have."""
    for name in ours:
        if name in plain and ours[name].elements == plain[name].elements:
            yield name, unlike(ours[name], plain[name])


def unlike(ours: Distribution, plain: Distribution) -> str:
    """Return how two tensors differ that should be draws of one distribution; empty where they may be."""
    if plain.elements == 1:  # drawn or constant: `compare_known_start` compares it if it is known
        return ""
    if plain.deviation == 0.0 or ours.deviation == 0.0:
        is_same = ours.deviation == plain.deviation and math.isclose(ours.mean, plain.mean, rel_tol=1e-5, abs_tol=1e-12)
        return "" if is_same else f"{_described(ours)} here, {_described(plain)} there"
    if plain.elements < FEWEST:
        return ""
    error = abs(math.log(ours.deviation / plain.deviation))
    apart = abs(ours.mean - plain.mean)
    allowed = SIGMAS * math.sqrt((ours.deviation**2 + plain.deviation**2) / plain.elements)
    has_other_zeros = abs(ours.zeros - plain.zeros) > max(PAIR, plain.elements * CHANCE_OF_ZERO)
    if error > SIGMAS * math.sqrt(ours.spread + plain.spread) + 1e-3 or apart > allowed or has_other_zeros:
        return f"{_described(ours)} here, {_described(plain)} there"
    return ""


def _described(values: Distribution) -> str:
    if values.deviation == 0.0:
        return f"{values.mean:g} everywhere"
    zeros = f" with {values.zeros} zeros" if values.zeros else ""
    return f"mean {values.mean:.3g} and deviation {values.deviation:.3g}{zeros}"
