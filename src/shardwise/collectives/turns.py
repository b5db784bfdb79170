"""Operations that are put together from several others, one after the other, as one Work each.

A group's parts have to be called in the same order on all ranks. On a CPU they run on the group's own thread, in the
order of the calls, or on the caller's where nothing is pending and the caller waits anyway. On CUDA they are enqueued
at once on a stream of the group's own, so that what the caller computes meanwhile is not held up between them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.collectives.names import current_name

Operation = Callable[[], None]


class Pending(dist.Work):
    """The Work of an operation. Its timeout is that of the groups below; what failed there is raised by `wait`."""

    def __init__(self, future: torch.futures.Future[list[Tensor]], failure: Sequence[BaseException] = ()) -> None:
        super().__init__()
        self._future, self._failure = future, failure

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._future.wait()
        except RuntimeError:  # the callback's; what it was made of says more
            if self._failure:
                raise self._failure[0] from None
            raise
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:  # type: ignore[override]
        return self._future


class Turns:
    """Runs the operations of one group."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._running = threading.Lock()  # one operation at a time, whichever thread runs it
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], blocking: bool) -> Pending:
        """Run `operation`, which makes `outputs` of `inputs`; with `blocking` it is done on return.

        Raises:
            Exception: what `operation` raises, if it is run here; else `wait` of the result raises it.
        """
        operation = torch.no_grad()(operation)  # on whatever thread: no backend's call is in the graph of its tensors
        if accelerator.on_accelerator(outputs[0]):
            return self._on_stream(operation, inputs, outputs, blocking)
        with self._lock:
            on_this_thread = blocking and self._pending == 0
            self._pending += 1
        if on_this_thread:
            return self._now(operation, outputs)
        work = self._later(operation, outputs)
        if blocking:
            work.wait()
        return work

    def close(self) -> None:
        """End the group's thread after what is pending."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    # --- a CPU

    def _now(self, operation: Operation, tensors: Sequence[Tensor]) -> Pending:
        try:
            with self._running:
                operation()
        finally:
            self._done()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(tensors))
        return Pending(future)

    def _later(self, operation: Operation, tensors: Sequence[Tensor]) -> Pending:
        failure: list[BaseException] = []
        started: torch.futures.Future[None] = torch.futures.Future()

        def outcome(_: Any) -> list[Tensor]:
            # Raised in a callback it is the future's error for C++ (DDP) too; Future.set_exception is Python's alone.
            if failure:
                raise failure[0]
            return list(tensors)

        name = current_name()

        def turn() -> None:
            try:
                with self._running, name:
                    operation()
            except BaseException as error:
                failure.append(error)
            self._done()
            started.set_result(None)

        future = started.then(outcome)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shardwise-two-level", daemon=True)
            self._thread.start()
        self._waiting.put(turn)
        return Pending(future, failure)

    def _done(self) -> None:
        with self._lock:
            self._pending -= 1

    def _serve(self) -> None:
        while (turn := self._waiting.get()) is not None:
            turn()

    # --- an accelerator

    def _on_stream(
        self, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], blocking: bool
    ) -> Pending:
        device = outputs[0].device
        current = accelerator.current_stream(device)
        stream = self._streams.setdefault(device, accelerator.side_stream(device))
        stream.wait_stream(current)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device])
        with stream:
            operation()
            future.set_result(list(outputs))  # notes where this stream stands, for `wait`
        for tensor in (*inputs, *outputs):
            tensor.record_stream(stream)
        if blocking:
            current.wait_stream(stream)
        return Pending(future)
