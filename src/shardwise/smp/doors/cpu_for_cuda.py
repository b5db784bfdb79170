"""`shardwise run --device cpu`: what a script asks of CUDA is done on the CPU.

Scripts written for GPUs choose devices, synchronize, print memory and move tensors without asking what is there. Here
those calls lead to the CPU or do nothing. Only the script's own files are told that there is CUDA: libraries that ask
go on seeing what is.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel

# Functions of torch.cuda -> what they return here.
RETURNS: dict[str, Any] = {
    "set_device": None, "synchronize": None, "empty_cache": None, "current_device": 0, "init": None,
    "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
    "memory_cached": 0, "max_memory_cached": 0, "reset_peak_memory_stats": None, "reset_max_memory_allocated": None,
    "reset_max_memory_cached": None, "memory_summary": "", "get_device_name": "cpu", "manual_seed": None,
    "manual_seed_all": None, "seed": None, "ipc_collect": None, "get_device_capability": (0, 0), "mem_get_info": (0, 0),
    "reset_accumulated_memory_stats": None, "set_per_process_memory_fraction": None, "utilization": 0,
    "can_device_access_peer": False, "is_current_stream_capturing": False, "check_error": None, "memory_snapshot": [],
    "get_allocator_backend": "native", "get_sync_debug_mode": 0, "set_sync_debug_mode": None, "temperature": 0,
    "power_draw": 0, "clock_rate": 0, "memory_usage": 0, "device_memory_used": 0,
    "reset_peak_host_memory_stats": None, "reset_accumulated_host_memory_stats": None, "set_stream": None,
}  # fmt: skip
FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_strided",
    "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
CPU = torch.device("cpu")
_real_device, _real_generator = torch.device, torch.Generator


class _DeviceType(type):
    """So that `isinstance(x, torch.device)` holds of real devices, and torch finds its own class to be this one: its
    generated code of traces asks that before it names a device."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real_device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _real_device

    def __hash__(cls) -> int:
        return hash(_real_device)


class device(metaclass=_DeviceType):
    """`torch.device`, which makes a device of the CPU where CUDA is asked for. Files name it as they name torch's."""

    __module__, __qualname__ = "torch", "device"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        device_type = str(args[0] if args else kwargs.get("type", kwargs.get("device", "")))
        return (
            CPU
            if device_type.startswith("cuda") or isinstance(args[0] if args else None, int)
            else _real_device(*args, **kwargs)
        )


class _GeneratorType(type):
    """So that `isinstance(x, torch.Generator)` holds of real ones."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real_generator)


class generator(metaclass=_GeneratorType):
    """`torch.Generator`, which makes one of the CPU where CUDA is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _real_generator(CPU if _is_cuda(device) or type(device) is int else device)


class _Event:
    """`torch.cuda.Event`, by the clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, *args: Any) -> None:
        import time

        self.time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds to `other`."""
        return (other.time - self.time) * 1e3

    def synchronize(self) -> None:
        """Nothing runs apart from the program."""

    def query(self) -> bool:
        """Return True: the recorded work is done."""
        return True

    def wait(self, *args: Any) -> None:
        """Nothing runs apart from the program."""


class _Stream:
    """`torch.cuda.Stream`: there is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing runs apart from the program."""

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    wait_stream = wait_event = record_event = lambda self, *args: None


class _Runtime:
    """`torch.cuda.cudart()`: calls of the CUDA runtime, such as a profiler's, all of which succeed."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return _returning(0)


def redirect(workers: int, directory: str) -> None:
    """Lead CUDA to the CPU in this process, for good.

    Args:
        workers: the device count that the script sees.
        directory: files below it are the script's.
    """
    cuda: Any = torch.cuda
    for name, value in RETURNS.items():
        for module in (cuda, cuda.memory, cuda.random):
            if module is cuda or hasattr(module, name):
                setattr(module, name, _returning(value))
    cuda.is_available = _for_script(cuda.is_available, _returning(True), directory)
    cuda.device_count = _for_script(cuda.device_count, _returning(workers), directory)
    cuda.get_device_properties = _returning(SimpleNamespace(name="cpu", total_memory=0, major=0, minor=0))
    for module in (cuda, cuda.memory):
        module.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.cudart, cuda.profiler.start, cuda.profiler.stop = _returning(_Runtime()), _returning(None), _returning(None)
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = cuda.device = lambda *args: nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _returning(None)
    cuda.nvtx.range, cuda.nvtx.range_start, cuda.nvtx.range_end = _nothing, _returning(0), _returning(None)
    cuda.nccl.version = _returning((0, 0, 0))
    cuda.memory._record_memory_history = cuda.memory._dump_snapshot = _returning(None)
    for name in TYPES:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for module in (cuda, cuda.random):
        module.get_rng_state, module.initial_seed = lambda *args: torch.get_rng_state(), torch.initial_seed
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
        module.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    _redirect_tensors()
    _show_cuda(directory)
    _redirect_groups()


def _redirect_groups() -> None:
    """Process groups, and the wrappers of models that are told a device or look for one."""
    target: Any = dist
    target.init_process_group, target.new_group = _with_gloo(dist.init_process_group), _with_gloo(dist.new_group)
    data_parallel: Any = nn.parallel.DistributedDataParallel
    data_parallel.__init__ = _with_device(data_parallel.__init__, device_ids=None, output_device=None)
    sharded: Any = FullyShardedDataParallel
    sharded.__init__ = _with_device(sharded.__init__, device_id=CPU)
    whole: tuple[Any, ...] = FullStateDictConfig, FullOptimStateDictConfig
    for config in whole:  # "to the CPU" would free the gathered copy that is given out, or fill it with the next
        config.__init__ = _with_device(config.__init__, offload_to_cpu=False)


def _redirect_tensors() -> None:
    with torch.device("meta"):  # the first such scope notes which functions all of them reach: torch's own, not these
        torch.empty(0)
    target: Any = torch
    target.device, target.Generator = device, generator
    for name in FACTORIES:
        setattr(target, name, _on_cpu(getattr(torch, name)))
    tensor: Any = Tensor
    tensor.to = _with_number(_on_cpu(Tensor.to))
    for name in METHODS:
        setattr(tensor, name, _on_cpu(getattr(Tensor, name)))
    module: Any = nn.Module
    module.to = _with_number(_on_cpu(nn.Module.to))
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = _returning(None)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        storage.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    target.load = _with_map(torch.load)


def _show_cuda(directory: str) -> None:
    """Show CUDA in the names of tensors' types and in parameters' devices.

    Scripts of 2021 and 2022 look there for weights on a GPU, and leave those on the CPU alone.
    """
    tensor: Any = Tensor
    tensor.type = _for_script(_typed(Tensor.type), _cuda_type(Tensor.type), directory)
    parameter: Any = nn.Parameter
    device_of, is_cuda = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]
    parameter.device = property(_for_script(device_of, lambda self: _shown(device_of(self)), directory))
    parameter.is_cuda = property(_for_script(is_cuda, lambda self: not self.is_meta, directory))


def _shown(real: torch.device) -> torch.device:
    return _real_device("cuda", 0) if real.type == "cpu" else real


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, to the CPU's types by the names of CUDA's."""

    @functools.wraps(function)
    def call(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
        return function(self, *(() if dtype is None else (wanted,)), *args, **kwargs)

    return call


def _cuda_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, which names the types of the CPU as CUDA's."""
    typed = _typed(function)

    def call(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        tensor_or_name = typed(self, dtype, *args, **kwargs)
        named = dtype is None and self.device.type == "cpu"
        return tensor_or_name.replace("torch.", "torch.cuda.", 1) if named else tensor_or_name

    return call


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Any:
    yield


def _for_script(function: Callable[..., Any], other: Callable[..., Any], directory: str) -> Callable[..., Any]:
    """`other` where the caller's file is below `directory`."""
    inside = directory.rstrip(os.sep) + os.sep

    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__file__") or ""
        return (other if os.path.abspath(caller).startswith(inside) else function)(*args, **kwargs)

    return ask


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, _real_device) and value.type == "cuda"
    )


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with CUDA devices among its arguments replaced, and memory as it is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_cuda(value) else value for value in args)
        given = kwargs.get("device")
        if _is_cuda(given) or type(given) is int:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _with_number(to: Callable[..., Any]) -> Callable[..., Any]:
    """`to`, whose first argument may be a device's number, as `torch.cuda.current_device` gives it."""

    @functools.wraps(to)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (CPU, *args[1:])
        return to(self, *args, **kwargs)

    return call


def _with_map(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function(f, CPU if _is_cuda(map_location) else map_location, *args, **kwargs)

    return load


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which makes a group: a backend for CUDA's tensors is Gloo."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        args = tuple(_gloo(value) for value in args)
        if "backend" in kwargs:
            kwargs["backend"] = _gloo(kwargs["backend"])
        return function(*args, **kwargs)

    return make


def _gloo(value: Any) -> Any:
    """A backend's name without NCCL; "cpu:gloo,cuda:nccl" is what it says of the CPU."""
    if not isinstance(value, str) or "nccl" not in value:
        return value
    return next((pair.removeprefix("cpu:") for pair in value.split(",") if pair.startswith("cpu:")), "gloo")


def _with_device(init: Callable[..., Any], **places: Any) -> Callable[..., Any]:
    """A wrapper's constructor, where each of `places` is as given, whatever the script says."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        init(**{**given, **more, **places})

    return construct
