"""SMP's activation offloading: torch's `offload_wrapper`, as `tsm.init` has changed it.

Torch's moves all that autograd saves. SMP's moves the inputs of checkpointed modules, and loads them back
`activation_loading_horizon` of them ahead of their use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise._torch_compat.fsdp1 import CheckpointWrapper, OffloadWrapper
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.smp.v2.session import state

_torch_init: Any = OffloadWrapper.__init__


@contextmanager
def offload_of_checkpointed_inputs() -> Iterator[None]:
    """Change torch's wrapper in place, and give it back at the end."""
    wrapper: Any = OffloadWrapper
    wrapper.__init__ = _init
    try:
        yield
    finally:
        wrapper.__init__ = _torch_init


def _init(self: Any, module: Any) -> None:
    _torch_init(self, module)
    wrapped: list[Any] = [part for part in module.modules() if isinstance(part, CheckpointWrapper)]
    if not state.sm_activation_offloading:
        return
    if not wrapped:
        if state.rank == 0:
            print("note: offload_wrapper finds no checkpointed module: torch's own offloads all.", file=sys.stderr)
        return
    offload = ActivationOffload(state.device, int(state.activation_loading_horizon))
    for part in wrapped:
        part.forward = _with(offload, part.forward)
    self.forward = module.__call__


def _with(offload: ActivationOffload, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with offload.checkpoint_input():
            return forward(*args, **kwargs)

    return run
