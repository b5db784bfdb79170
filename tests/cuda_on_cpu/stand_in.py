"""CUDA for processes of a torch that has none: the lazy device in its place, and what torch asks of `torch.cuda`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEVICE = "cuda:0"
NAME = "CPU played as CUDA"
MEMORY, HELD = 8 << 30, 1 << 20  # bytes, as far as anybody asks


def play(library: str) -> None:
    """Make this process one with a GPU, for good. Before torch is imported: it asks once, and early, what is there."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for path in (Path(found.origin).parent / "lib" / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import torch

    cuda: Any = torch.cuda
    for name, value in _functions(torch).items():
        for place in (cuda, cuda.memory, cuda.random, cuda.streams):
            if place is cuda or hasattr(place, name):
                setattr(place, name, value)
    storage: Any = torch.UntypedStorage
    storage.resize_ = _resize(torch, storage.resize_)
    _play_nccl(torch.distributed)


def _functions(torch: Any) -> dict[str, Any]:
    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    class Stream(torch.Stream):  # type: ignore[misc,name-defined]
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            return super().__new__(cls, device=DEVICE, priority=priority)

    class Event(torch.Event):  # type: ignore[misc,name-defined]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls, DEVICE)

    def stream(given: Any) -> AbstractContextManager[Any]:
        return given  # torch's streams are contexts

    def properties(*of: Any) -> Any:
        uuid = os.environ.get("PLAYED_GPU", "0")  # a rank's own, or one that ranks share
        return SimpleNamespace(name=NAME, uuid=uuid, total_memory=MEMORY, major=8, minor=0, gcnArchName="")

    return {
        "_lazy_init": always(None), "init": always(None), "is_initialized": always(True), "is_available": always(True),
        "_is_in_bad_fork": always(False), "device_count": always(1), "current_device": always(0),
        "set_device": always(None), "synchronize": lambda *of: torch.accelerator.synchronize(),
        "get_device_name": always(NAME), "get_device_capability": always((8, 0)),
        "get_device_properties": properties, "mem_get_info": always((MEMORY, MEMORY)),
        "max_memory_allocated": always(HELD), "memory_allocated": always(HELD), "memory_reserved": always(HELD),
        "max_memory_reserved": always(HELD), "reset_peak_memory_stats": always(None), "empty_cache": always(None),
        "memory_stats": always({}), "manual_seed": always(None), "manual_seed_all": always(None),
        "get_rng_state": lambda *of: torch.get_rng_state(),
        "set_rng_state": lambda state, *of: torch.set_rng_state(state),
        "Stream": Stream, "Event": Event, "stream": stream, "StreamContext": stream,
        "current_stream": lambda *of: torch.accelerator.current_stream(),
        "default_stream": lambda *of: torch.Stream(stream_id=0, device_index=0, device_type=1),
    }  # fmt: skip


def _resize(torch: Any, plain: Any) -> Any:
    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain(self, size)
        of = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(self, 0, (0,), (1,))
        torch.ops.lazy_device.resize_storage(of, size)
        return self

    return resize


def _play_nccl(dist: Any) -> None:
    """The engine in NCCL's place, under its name: it moves tensors of a device through pinned memory."""
    plain = dist.get_backend

    def name(value: Any) -> Any:
        return value.replace("nccl", "shardwise") if isinstance(value, str) else value

    def with_engine(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            from shardwise.collectives import registration

            registration.register()
            dist.Backend.backend_capability[registration.BACKEND] = ["cpu", "cuda"]
            return make(*map(name, args), **{key: name(value) for key, value in kwargs.items()})

        return made

    dist.init_process_group, dist.new_group = with_engine(dist.init_process_group), with_engine(dist.new_group)
    dist.get_backend = lambda *of: plain(*of).replace("cpu:gloo,cuda:shardwise", "cpu:gloo,cuda:nccl")
