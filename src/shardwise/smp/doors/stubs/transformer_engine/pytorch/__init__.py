"""Functions of Transformer Engine that scripts call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

from shardwise.smp.v2.float8 import current_float8, float8_of_recipe, multiplying

# What tells Transformer Engine of tensor ranks and their random numbers.
ITS_OWN = ("distribute_saved_activations", "get_rng_state_tracker", "get_cuda_rng_tracker", "tp_group")


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, **settings: Any) -> Iterator[None]:
    """Let the linear layers of a transformed model's blocks multiply in float8, by `fp8_recipe`'s format.

    Args:
        enabled: whether; off, a scope inside of another one is not in float8.
        fp8_recipe: a `DelayedScaling`, of which the format acts.
        settings: of amax histories and the ranks that share them; there are none here, each rank scales for itself.

    Raises:
        ConfigError: an unknown format, or no model was transformed.
    """
    with multiplying(float8_of_recipe(fp8_recipe) if enabled else None):
        yield


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's checkpoint without reentrant backward; the recomputation is in float8 where the forward was."""
    kwargs = {name: value for name, value in kwargs.items() if name not in (*ITS_OWN, "use_reentrant")}
    float8 = current_float8()

    def run(*inputs: Any, **named: Any) -> Any:
        with multiplying(float8):
            return function(*inputs, **named)

    return _checkpoint(run, *args, use_reentrant=False, **kwargs)
