"""Float8 of version 2: the linear layers of a transformed model's blocks multiply so inside of `fp8_autocast`.

Scripts switch it on around their forward, by Transformer Engine's name; the stand-in for that package leads here, and
where the package itself is installed, layers ask for the state of its scope when their forward begins. Arithmetic is
the engine's (kernels/float8.py): scales come from the numbers of each call, so that a recipe's history has nothing to
do. Backward multiplies as its forward did, wherever it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from torch import nn

from shardwise.errors import ConfigError
from shardwise.kernels.float8 import Float8
from shardwise.kernels.linear import use_float8
from shardwise.kernels.precision import has_float8
from shardwise.smp.v2.logger import note_once
from shardwise.smp.v2.session import state

SCALING = {"HYBRID": "tensorwise", "E4M3": "rowwise"}  # formats: e5m2 for gradients, or e4m3 throughout

_layers: WeakSet[Any] = WeakSet()
_active: list[Float8 | None] = [None]


def register_float8_layers(layers: Iterable[nn.Module]) -> None:
    """Let `fp8_autocast` reach the linear `layers`, which do as before outside of it."""
    chosen = list(layers)
    use_float8(chosen, _active[-1])
    _layers.update(chosen)
    real = sys.modules.get("transformer_engine")
    if real is not None and not real.__name__.startswith("shardwise."):
        for layer in chosen:
            layer.register_forward_pre_hook(_follow)


def _follow(layer: Any, inputs: Any) -> None:
    """Let `layer` multiply as the installed Transformer Engine's scope says."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Scope

    layer.float8 = float8_of_recipe(Scope.get_fp8_recipe()) if Scope.is_fp8_enabled() else None


def float8_of_recipe(recipe: Any) -> Float8:
    """Return how `recipe` (Transformer Engine's; None: its default) multiplies here.

    Raises:
        ConfigError: its format is none of HYBRID and E4M3, or no model was transformed.
    """
    name = getattr(getattr(recipe, "fp8_format", None), "name", "HYBRID")
    if name not in SCALING:
        raise ConfigError(f"fp8_format={name} cannot be had: gradients need range; use Format.HYBRID or Format.E4M3")
    if not _layers:
        raise ConfigError("fp8_autocast(enabled=True) finds no layers; give the model to tsm.transform before")
    door = _door(SCALING[name])
    how = "numbers are rounded and multiplied in fp32, which is slow" if door == "emulate" else f"by {door}"
    note_once(f"fp8: {SCALING[name]} scales, taken from each call's numbers and not from a history; {how}")
    return Float8(door, SCALING[name])


def _door(scaling: str) -> str:
    if state.device.type == "cuda" and has_float8(state.device):
        if find_spec("torchao") is not None:
            return "torchao"
        if scaling == "tensorwise" and find_spec("transformer_engine_torch") is not None:
            return "transformer_engine"
    return "emulate"


@contextmanager
def multiplying(float8: Float8 | None) -> Iterator[None]:
    """Let the layers multiply by `float8`; None: as they are."""
    _switch(float8)
    try:
        yield
    finally:
        _active.pop()
        _switch(_active.pop())


def current_float8() -> Float8 | None:
    """Return how layers multiply at the moment."""
    return _active[-1]


def _switch(float8: Float8 | None) -> None:
    _active.append(float8)
    for layer in _layers:
        layer.float8 = float8
