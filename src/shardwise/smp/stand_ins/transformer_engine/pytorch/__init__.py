"""What scripts call of Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

from shardwise.errors import ConfigError


@contextmanager
def fp8_autocast(enabled: bool = True, **settings: Any) -> Iterator[None]:
    """Nothing where fp8 is off. Raises ConfigError where it is on."""
    if enabled:
        raise ConfigError(
            "fp8_autocast(enabled=True) needs transformer_engine, which is not installed; run with fp8 off"
        )
    yield


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's checkpoint; what tells Transformer Engine of tensor ranks and its random numbers is left out."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    kwargs.setdefault("use_reentrant", True)
    return _checkpoint(function, *args, **kwargs)
