"""Accelerators of any type: their streams, generators, memory, number and name, as torch gives them.

`shardwise.job.devices` has what differs between types. Nothing else asks for `cuda` by name, but for what is about CUDA
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

HOST = "cpu"
ON_HOST = (HOST, "meta")


def available() -> str:
    """Return the type of this machine's accelerator; `cpu` where there is none."""
    if torch.cuda.is_available():
        return "cuda"  # also where torch has another accelerator from Python
    device = torch.accelerator.current_accelerator(check_available=True)
    return HOST if device is None else device.type


def is_accelerator(device: torch.device | str) -> bool:
    """Return whether a device, or a type of devices, is an accelerator's and not the host's."""
    return (device if isinstance(device, str) else device.type) not in ON_HOST


def on_accelerator(tensor: Tensor) -> bool:
    """Return whether a tensor is in an accelerator's memory."""
    return is_accelerator(tensor.device)


def module_of(device: torch.device | str) -> ModuleType:
    """Return torch's module for a type of devices, e.g. `torch.cuda`."""
    module: ModuleType = torch.get_device_module(device)
    return module


def count(device_type: str) -> int:
    """Return how many accelerators of a type this process sees; 0 for the host's."""
    return int(module_of(device_type).device_count()) if is_accelerator(device_type) else 0


def vendor_name(device: torch.device | str) -> str:
    """Return an accelerator's name as its vendor gives it; empty for the host's, and where torch has none."""
    if not is_accelerator(device):
        return ""
    name = getattr(module_of(device), "get_device_name", None)
    return "" if name is None else str(name(device) if isinstance(device, torch.device) else name())


def enter(device: torch.device) -> None:
    """Make `device` this process's own, from now on."""
    torch.accelerator.set_device_index(device)
    start = getattr(module_of(device), "init", None)
    if start is not None:
        start()  # a DeviceMesh takes the GPU of the local rank, which need not be there, unless one is in use


def entered() -> torch.device:
    """Return the accelerator that this process has begun to use; the host where it has not."""
    kind = available()
    is_begun = getattr(module_of(kind), "is_initialized", None)
    if not is_accelerator(kind) or is_begun is None or not is_begun():
        return torch.device(HOST)
    return torch.device(kind, module_of(kind).current_device())


# --- streams


def side_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of an accelerator."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that an accelerator's next operation goes to."""
    return torch.accelerator.current_stream(device)


# --- generators


def random_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's default generator."""
    module = module_of(device)
    state: Tensor = module.get_rng_state(device) if device.index is not None else module.get_rng_state()
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's default generator."""
    module = module_of(device)
    if device.index is not None:
        module.set_rng_state(state, device)
    else:
        module.set_rng_state(state)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Let the default generators of the host and of `device` be afterwards what they were before."""
    with torch.random.fork_rng(devices=[]):
        if not is_accelerator(device):
            yield
            return
        state = random_state(device)
        try:
            yield
        finally:
            set_random_state(state, device)


# --- memory


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that the allocator has given out since `reset_peak_memory`."""
    return int(module_of(device).max_memory_allocated(device))


def reserved_memory(device: torch.device) -> int:
    """Return the bytes that the allocator holds."""
    return int(module_of(device).memory_reserved(device))


def total_memory(device: torch.device) -> int:
    """Return the bytes that the device has."""
    return int(module_of(device).mem_get_info(device)[1])


def reset_peak_memory(device: torch.device) -> None:
    """Begin `peak_memory` anew."""
    module_of(device).reset_peak_memory_stats(device)
