"""Results of a function that selective activation checkpointing keeps, without looking into it.

Such a checkpoint keeps matrix products, which its dispatch modes see one by one. Attention that is made of products
would keep all of its scores; it is one product itself, whose result alone is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise._torch_compat.tracing import latest_mode, latest_mode_off

Results = tuple[Tensor, ...]


def keep_results(forward: Any, recomputation: Any) -> None:
    """Let the dispatch modes of a selective checkpoint's forward and recomputation keep what `kept` is given."""
    results: deque[Results] = deque()
    forward.keeps, recomputation.gives = results, results


def kept(compute: Callable[[], Results]) -> Results:
    """Return what `compute` returns; in a selective checkpoint's recomputation what it has returned in forward."""
    mode = latest_mode()
    if (given := getattr(mode, "gives", None)) is not None:
        results: Results = given.popleft()
        return results
    if (results_kept := getattr(mode, "keeps", None)) is None:
        return compute()
    with latest_mode_off():
        made = compute()
        results_kept.append(tuple(tensor.detach() for tensor in made))  # not with the graph that made them
    return made
