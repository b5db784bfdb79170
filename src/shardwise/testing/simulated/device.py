"""The device `simulated:0`, on any build of torch: `with simulated_device() as simulation, simulation.fakes: ...`.

Its tensors are fake: autograd, optimizers, FSDP2 and checkpoints run on shapes. `torch.accelerator`, `torch.simulated`,
`torch.Stream`, `torch.Event` and `torch.Generator` answer for it inside, and as ever outside.

What torch registers for it stays for the process: the name of the device, and hooks for which torch's engine takes the
device to be the accelerator. A process that computes on another one must not have it, and gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.simulated import (
    UNNAMED,
    SimulatedFakeMode,
    checkpoints_on,
    name_of_backend,
    pinned_fakes,
    register_backend,
)
from shardwise._torch_compat.tracing import dispatch_modes_off, is_fake
from shardwise.errors import MachineError
from shardwise.job.devices import CUDA, MPS, DeviceKind, Feature, device_kind
from shardwise.testing.simulated.memory import MemoryCounts
from shardwise.testing.simulated.streams import (
    SIMULATED,
    SimulatedEvent,
    SimulatedStream,
    current_simulated_stream,
    set_simulated_stream,
    synchronize_simulated,
    timeline,
)

OF_PYTHON = ("get_amp_supported_dtype", "manual_seed_all")  # that torch asks of modules of devices from Python alone
CAPACITY = 80 << 30  # bytes, for those who ask
_RealGenerator = torch.Generator


class _AnyGenerator(type(_RealGenerator)):  # type: ignore[misc]
    """So that `isinstance(x, torch.Generator)` holds of real ones."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)


class SimulatedGenerator(_RealGenerator, metaclass=_AnyGenerator):
    """A generator of the simulated device, in the place of `torch.Generator`; others are torch's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator: torch has none of a device of Python's, so one of the host says that it is."""
        if torch.device(device).type != SIMULATED:
            return _RealGenerator(device)
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return torch.device(SIMULATED, 0)


@dataclass
class Simulation:
    """A simulated device while it is there.

    Attributes:
        kind: what the device can do.
        memory: bytes alive, by type of device: `simulated` and `cpu`.
        fakes: the mode under which tensors are fake.
    """

    kind: DeviceKind
    memory: MemoryCounts = field(default_factory=MemoryCounts)
    device: torch.device = field(init=False)
    fakes: SimulatedFakeMode = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device(SIMULATED, 0)
        self.fakes = SimulatedFakeMode(self.memory.see, self.kind.supports(Feature.FP64).ok, allow_non_fake_inputs=True)


class _Module:
    """The module `torch.simulated`: as much as torch asks of a device's."""

    __name__ = f"torch.{SIMULATED}"
    Stream, Event = SimulatedStream, SimulatedEvent
    current_stream = staticmethod(current_simulated_stream)
    set_stream = staticmethod(set_simulated_stream)
    synchronize = staticmethod(synchronize_simulated)

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self._seed = self._offset = 0

    @property
    def _initialized(self) -> bool:
        return self.is_available()

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """A generator, for those who draw from the device's own."""
        return (SimulatedGenerator(SIMULATED).manual_seed(self._seed),)

    def is_available(self) -> bool:
        """Return whether this process has the device now."""
        return self.simulation is not None

    is_initialized = is_available

    def device_count(self) -> int:
        """Return 1 where the device is there."""
        return int(self.is_available())

    def current_device(self) -> int:
        """Return 0: there is one."""
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one."""

    def init(self) -> None:
        """Do nothing."""

    def device(self, device: Any) -> AbstractContextManager[None]:
        """Do nothing: there is one."""
        return nullcontext()

    def stream(self, stream: SimulatedStream | None) -> AbstractContextManager[Any]:
        """Return the context in which operations go to `stream`."""
        return nullcontext() if stream is None else stream

    def default_stream(self, device: Any = None) -> SimulatedStream:
        """Return the stream that nobody has made."""
        return timeline.stack[0]

    def get_device_name(self, device: Any = None) -> str:
        """Return a name for it."""
        return "simulated accelerator"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return a name and a size."""
        return SimpleNamespace(name=self.get_device_name(), total_memory=CAPACITY)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.bfloat16, torch.float16]

    # ---- the default generator: a seed and an offset, as a GPU's

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Start the default generator anew."""
        self._seed, self._offset = seed, 0

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Return the seed of the default generator."""
        return self._seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        """Return the state of the default generator: 16 bytes in host memory."""
        with dispatch_modes_off():
            return torch.tensor([self._seed & (1 << 63) - 1, self._offset]).view(torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Set the state of the default generator; a fake one has no values."""
        if not is_fake(state):
            with dispatch_modes_off():
                self._seed, self._offset = state.clone().view(torch.int64).tolist()

    # ---- memory

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes alive on the device."""
        return 0 if self.simulation is None else self.simulation.memory.live[SIMULATED]

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the most bytes alive on the device since the peak was reset."""
        return 0 if self.simulation is None else self.simulation.memory.peak[SIMULATED]

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start the peak anew."""
        if self.simulation is not None:
            self.simulation.memory.begin(SIMULATED)

    def empty_cache(self) -> None:
        """Do nothing: nothing is kept."""

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return what is alive and its peak, by torch's names."""
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (free, all) bytes."""
        return CAPACITY - self.memory_allocated(), CAPACITY


module = _Module()


class _Less:
    """That module with no more names than another one: `torch.mps` has neither streams nor the device's properties."""

    def __init__(self, other: ModuleType) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        if name not in OF_PYTHON:
            getattr(self._other, name)  # AttributeError, in torch's words
        return getattr(module, name)


@contextmanager
def simulated_device(kind: DeviceKind | None = None) -> Iterator[Simulation]:
    """Have the device `simulated:0` inside, as the process's accelerator.

    Args:
        kind: whose lacks it has; unset: CUDA's, which has none.

    Raises:
        MachineError: the process has a device from outside of torch already, or computes on a GPU.
    """
    _register()
    if module.simulation is not None:
        raise MachineError("this process has its simulated device already")
    timeline.begin()
    kind = kind or device_kind(CUDA)
    simulation = Simulation(kind)
    with ExitStack() as stack:
        if kind.like == MPS:
            stack.enter_context(mock.patch.object(torch, SIMULATED, _Less(torch.mps)))
        stack.enter_context(mock.patch.object(module, "simulation", simulation))
        for name, function in _accelerator_functions().items():  # torch 2.11 lacks some of them
            stack.enter_context(mock.patch.object(torch.accelerator, name, function, create=True))
        for name, made in (("Stream", SimulatedStream), ("Event", SimulatedEvent), ("Generator", SimulatedGenerator)):
            stack.enter_context(mock.patch.object(torch, name, made))
        stack.enter_context(pinned_fakes())
        stack.enter_context(checkpoints_on(SIMULATED))
        stack.enter_context(simulation.memory.watching())
        # Of a device that comes later than the first backward, the engine has no thread; and lines would be lost there.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield simulation


def _register() -> None:
    if (name := name_of_backend()) == SIMULATED:
        return
    if name != UNNAMED:
        raise MachineError(f"this process has the device {name!r} from outside of torch, and torch takes one")
    if accelerator.is_accelerator(accelerator.entered()):
        raise MachineError("this process computes on a GPU, which torch would forget; simulate in a process of its own")
    own = torch.accelerator.current_accelerator()
    register_backend(SIMULATED, module)
    torch.accelerator.current_accelerator = partial(_accelerator_now, own)


def _accelerator_now(own: torch.device | None, check_available: bool = False) -> torch.device | None:
    """Return the simulated device while it is there, and else the one that torch was built for."""
    if module.simulation is not None:
        return torch.device(SIMULATED)
    is_there = own is not None and (not check_available or torch.get_device_module(own).is_available())
    return own if is_there else None


def _accelerator_functions() -> dict[str, Callable[..., Any]]:
    """Return what `torch.accelerator` asks of an allocator, a guard or streams in C++, which the device lacks."""

    def nothing(*args: Any) -> None:
        return None

    return {
        "current_stream": module.current_stream,
        "set_stream": module.set_stream,
        "synchronize": module.synchronize,
        "current_device_index": module.current_device,
        "set_device_index": module.set_device,
        "device_index": module.device,
        "empty_cache": module.empty_cache,
        "empty_host_cache": nothing,
        "get_memory_info": module.mem_get_info,
        "memory_allocated": module.memory_allocated,
        "max_memory_allocated": module.max_memory_allocated,
        "memory_reserved": module.memory_reserved,
        "max_memory_reserved": module.max_memory_reserved,
        "memory_stats": module.memory_stats,
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
        "reset_accumulated_memory_stats": nothing,
    }
