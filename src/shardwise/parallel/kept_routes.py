"""Routes that shared experts keep of a checkpointed block's forward for its recomputation, and rows on demand.

A recomputation has the forward's inputs, so its tokens go where they went: it takes the routes that the forward has
made, and exchanges no numbers. The rows are exchanged again, or kept too (`memory.keep_expert_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise._torch_compat.autograd import version_of
from shardwise._torch_compat.tracing import dispatch_modes_off, is_fake
from shardwise.errors import ModelError


class KeptRows:
    """Results of the exchanges of one call; a recomputation takes them where they are kept, else exchanges again."""

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: dict[str, list[tuple[Tensor, int]]] = {}

    def results(self, name: str, exchange: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the kept results `name`, or what `exchange` returns.

        Raises:
            ModelError: the experts have written what was kept.
        """
        if name not in self._kept:
            results = exchange()
            if self._keeps:
                self._kept[name] = [(rows.detach(), version_of(rows)) for rows in results]
            return results
        if any(version_of(rows) != version for rows, version in self._kept[name]):
            raise ModelError(
                "the experts write their rows in place; memory.keep_expert_rows would compute them again from what "
                "they have written. Use keep_expert_rows false"
            )
        return [rows.detach() for rows, _ in self._kept[name]]

    def result(self, name: str, exchange: Callable[[], Tensor]) -> Tensor:
        """Return the one result `name`, as `results` does."""
        (rows,) = self.results(name, lambda: [exchange()])
        return rows


class CheckpointedCalls:
    """The calls of shared experts in the forward of a checkpoint, by module, in their order.

    Args:
        keeps_rows: whether what they exchange is kept, too.
    """

    def __init__(self, keeps_rows: bool) -> None:
        self.keeps_rows = keeps_rows
        self._calls: dict[str, list[tuple[Tensor, Any]]] = {}

    @contextmanager
    def made(self) -> Iterator[None]:
        """Keep the routes of calls inside: the forward."""
        with _running(lambda name, experts, make: self._make(name, experts, make)):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give calls inside the routes of the forward's calls: a recomputation."""
        calls = {name: iter(kept) for name, kept in self._calls.items()}
        with _running(lambda name, experts, make: _take(name, experts, calls)):
            yield

    def _make(self, name: str, experts: Tensor, make: Callable[[KeptRows], Any]) -> Any:
        routes = make(KeptRows(self.keeps_rows))
        self._calls.setdefault(name, []).append((experts.detach(), routes))
        return routes


def _take(name: str, experts: Tensor, calls: dict[str, Iterator[tuple[Tensor, Any]]]) -> Any:
    chosen, routes = next(calls[name])
    with dispatch_modes_off():  # selective checkpointing takes no operation that the forward has not called
        differs = not is_fake(experts) and not torch.equal(chosen, experts)
    if differs:
        raise ModelError(
            f"{name}: tokens chose other experts when their block was computed again for backward, so the gradient "
            "would be of another forward. Let the router be deterministic, or use memory.activation_checkpointing none"
        )
    return routes


Routes = TypeVar("Routes")
_Run = Callable[[str, Tensor, Callable[[KeptRows], Any]], Any]
_current: ContextVar[_Run | None] = ContextVar("calls of shared experts in a checkpoint", default=None)


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def routes_of(name: str, experts: Tensor, make: Callable[[KeptRows], Routes]) -> Routes:
    """Return the routes of a call of the module `name`: those of the forward in a recomputation, else new ones.

    Args:
        experts: [T, k], numbers of the experts of each token.
        make: makes them; collective.

    Raises:
        ModelError: the recomputed block has chosen other experts.
    """
    run = _current.get()
    routes: Routes = make(KeptRows()) if run is None else run(name, experts, make)
    return routes
