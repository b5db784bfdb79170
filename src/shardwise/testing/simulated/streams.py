"""Streams and events of the simulated device, and what each of them, and the host, knows to be done.

Nothing runs, so the order is all there is: a vector clock for each stream and one for the host. A clock says how many
operations of every stream are done by then. Events carry a clock from a stream to another one, or to the host.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch_compat.simulated import DEVICE_TYPE

SIMULATED = "simulated"
DEFAULT = 0  # number of the stream that work goes to unless another is current
Clock = dict[int, int]  # stream -> how many of its operations are done
_RealStream, _RealEvent = torch.Stream, torch.Event


class Timeline:
    """The order of what streams were given and of what waited for what.

    Attributes:
        listeners: told, in words, whenever the host waits for the device.
        observers: told of every wait: whose it is, a stream's or (None) the host's, and the clock.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self.observers: list[Callable[[int | None, Clock], None]] = []
        self.begin()

    def begin(self) -> None:
        """Forget all streams but the default one."""
        self._issued: Counter[int] = Counter()
        self._waited: dict[int, Clock] = {}
        self._host: Clock = {}
        self._streams = DEFAULT
        self._current = threading.local()

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    @property
    def stack(self) -> list[SimulatedStream]:
        """This thread's streams, the current one last."""
        if not hasattr(self._current, "stack"):
            self._current.stack = [SimulatedStream(stream_id=DEFAULT)]
        stack: list[SimulatedStream] = self._current.stack
        return stack

    def issue(self, stream: int) -> int:
        """Return the number of a new operation of `stream`."""
        self._issued[stream] += 1
        return self._issued[stream]

    def clock(self, stream: int) -> Clock:
        """Return what is done once `stream` is done with all that it was given so far."""
        return {**self._waited.get(stream, {}), stream: self._issued[stream]}

    def clock_of_all(self) -> Clock:
        """Return what is done once all streams are done."""
        return dict(self._issued)

    def let_wait(self, stream: int, clock: Clock) -> None:
        """Let what `stream` is given from now on come after `clock`."""
        _merge(self._waited.setdefault(stream, {}), clock)
        for observer in self.observers:
            observer(stream, clock)

    def host_learns(self, clock: Clock) -> None:
        """Let the host know that `clock` has come."""
        _merge(self._host, clock)

    def host_waits(self, clock: Clock, words: str) -> None:
        """Let the host wait until `clock` has come."""
        self.host_learns(clock)
        for listener in self.listeners:
            listener(words)
        for observer in self.observers:
            observer(None, clock)

    def is_done(self, stream: int, operation: int, by: int | None) -> bool:
        """Return whether an operation is known to be done by stream `by`, or by the host where that is None."""
        clock = self._host if by is None else self.clock(by)
        return clock.get(stream, 0) >= operation


def _merge(clock: Clock, other: Clock) -> None:
    for stream, operation in other.items():
        clock[stream] = max(clock.get(stream, 0), operation)


def _is_simulated(device: Any) -> bool:
    """Return whether a device, as torch takes it, is the simulated one; without one given it is."""
    return device is None or isinstance(device, int) or torch.device(device).type == SIMULATED


class SimulatedStream(torch.Stream):
    """A stream of the simulated device, in the place of `torch.Stream`."""

    def __new__(cls, device: Any = None, *, priority: int = 0, stream_id: int | None = None, **others: Any) -> Any:
        """Make a stream; of another device, one of torch's."""
        if not _is_simulated(device):
            return _RealStream(device, priority=priority)
        number = timeline.new_stream() if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=0, device_type=DEVICE_TYPE)

    def __enter__(self) -> SimulatedStream:
        timeline.stack.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        timeline.stack.pop()

    def wait_stream(self, stream: torch.Stream) -> None:
        """Come after what `stream` was given so far."""
        timeline.let_wait(self.stream_id, timeline.clock(stream.stream_id))

    def wait_event(self, event: torch.Event) -> None:
        """Come after `event`."""
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Return an event that has come when this stream is done with all that it was given so far."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        timeline.host_waits(timeline.clock(self.stream_id), "Stream.synchronize")

    def query(self) -> bool:
        """Return True: nothing takes time here."""
        timeline.host_learns(timeline.clock(self.stream_id))
        return True


class SimulatedEvent(torch.Event):
    """An event of the simulated device, in the place of `torch.Event`."""

    def __new__(cls, device: Any = None, **settings: Any) -> Any:
        """Make an event; of another device, one of torch's."""
        if not _is_simulated(device):
            return _RealEvent(device, **settings)
        event = super().__new__(cls, SIMULATED)
        event._clock = {}
        return event

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Do nothing more: all is made in `__new__`."""

    def record(self, stream: torch.Stream | None = None) -> None:
        """Come when `stream` is done with all that it was given so far."""
        self._clock = timeline.clock((stream or current_simulated_stream()).stream_id)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let `stream` come after this event."""
        timeline.let_wait((stream or current_simulated_stream()).stream_id, self._clock)

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        timeline.host_waits(self._clock, "Event.synchronize")

    def query(self) -> bool:
        """Return True: nothing takes time here."""
        timeline.host_learns(self._clock)
        return True

    def elapsed_time(self, end: torch.Event) -> float:
        """Return no time."""
        return 0.0


timeline = Timeline()  # torch has one accelerator in a process


def current_simulated_stream(device: Any = None) -> SimulatedStream:
    """Return the stream that this thread's next operation goes to."""
    return timeline.stack[-1]


def set_simulated_stream(stream: torch.Stream) -> None:
    """Let this thread's operations go to `stream` from now on."""
    timeline.stack[-1] = stream  # type: ignore[call-overload]


def synchronize_simulated(device: Any = None) -> None:
    """Let the host wait for all streams."""
    timeline.host_waits(timeline.clock_of_all(), "synchronize")
