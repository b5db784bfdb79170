"""The device `lazy` for tests: queues of its own, kernels of the CPU (`lazy_device.cpp`). Compiled once, then kept."""

from __future__ import annotations

import types
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from shardwise.collectives import engine

NAME = "lazy"
SOURCE = Path(__file__).with_suffix(".cpp")


def build(*flags: str) -> Path:
    """The library, beside the engine's own; about half a minute where it is not there yet."""
    from torch.utils import cpp_extension

    flags = ("-O1", *flags)
    key = blake2b((torch.__version__ + SOURCE.read_text() + " ".join(flags)).encode(), digest_size=12).hexdigest()
    where = engine.directory() / f"test-device-{key}"
    where.mkdir(parents=True, exist_ok=True)
    library = where / "lazy_device.so"
    with FileLock(f"{where}.lock"):
        if not library.is_file():
            cpp_extension.load(
                "lazy_device", [str(SOURCE)], extra_cflags=list(flags), build_directory=str(where),
                is_python_module=False,
            )  # fmt: skip
    return library


def use() -> torch.device:
    """Make the device known to this process; a second call does nothing."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(str(build()))
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def _module() -> Any:
    """What torch asks of `torch.lazy`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    device = f"{NAME}:0"
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = (lambda: 1), (lambda: 0)
    module.set_device = module.manual_seed_all = lambda number: None
    module.get_rng_state, module.set_rng_state = (lambda *of: torch.get_rng_state()), (lambda *of: None)
    module.Stream = lambda *args, priority=0, **kwargs: torch.Stream(device=device, priority=priority)
    module.Event = lambda *args, **kwargs: torch.Event(device)
    module.current_stream = lambda *of: torch.accelerator.current_stream()
    module.stream = lambda stream: stream
    module.synchronize = lambda *of: torch.accelerator.synchronize()
    return module
