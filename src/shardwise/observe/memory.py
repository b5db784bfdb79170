"""Memory of a rank: live tensor storages counted on any device, and the device's own peak counter.

`LiveBytes` is exact on a CPU, where torch has no peak counter and the resident set is too coarse: it sees every
operator that torch dispatches while it is active and adds up the storages that are still referenced. What a kernel
allocates and frees inside one operator, and buffers inside a collective backend, are not tensors and are not counted.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.autograd import sparse_parts
from shardwise._torch_compat.tracing import TorchDispatchMode, is_traceable_wrapper_subclass, tree_leaves
from shardwise.job.devices import Feature, device_kind

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages while active; each storage once, however many views it has.

    Storages are held by weak references, so autograd's saved tensors, `.grad` and optimizer state count for exactly as
    long as something keeps them. Sizes are read anew after every operator because FSDP2 shrinks and grows storages in
    place. Wrapper subclasses (DTensor) are counted by the plain tensors inside them. Tensors that exist already are
    counted from their first use, or at once when given to the constructor or to `track`:

        with LiveBytes(model, optimizer, batch) as memory:
            ...
        memory.peak, memory.peak_by_device
    """

    def __init__(self, *roots: Any, counts_meta: bool = False) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._counts_meta = counts_meta  # fake tensors live on meta, as far as their storages know
        self.peak = 0
        self.peak_by_device: dict[str, int] = {}
        self.track(*roots)

    @property
    def live(self) -> int:
        """Bytes alive now, on all devices."""
        return sum(self.live_by_device().values())

    def live_by_device(self) -> dict[str, int]:
        """Bytes alive now by device, e.g. `{"cpu": 1024}`."""
        total: Counter[str] = Counter()
        for reference in list(self._storages.values()):
            storage = reference()
            if storage is not None and storage.nbytes():
                total[str(storage.device)] += storage.nbytes()
        return dict(total)

    def reset_peak(self) -> None:
        """Start the peaks anew from what is alive now."""
        self.peak, self.peak_by_device = 0, {}
        self._sample()

    def track(self, *roots: Any) -> None:
        """Count tensors that exist already: tensors, modules, optimizers, or containers of them."""
        for root in roots:
            for tensor in tensors_of(root):
                self._add(tensor)
        self._sample()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A wrapper first turns the call into calls on the tensors inside it; those come back here one by one.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, output)):
            if isinstance(value, Tensor):
                self._add(value)
        self._sample()
        return output

    def _add(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            key = id(storage)
            if key not in self._storages and (self._counts_meta or storage.device.type != "meta"):
                self._storages[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._storages.pop(key, None)

    def _sample(self) -> None:
        live = self.live_by_device()
        self.peak = max(self.peak, sum(live.values()))
        for device, size in live.items():
            self.peak_by_device[device] = max(self.peak_by_device.get(device, 0), size)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The real storages behind a tensor: of its inner tensors for a wrapper, of its parts for a sparse one."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):  # a DTensor also lists its mesh
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        for part in sparse_parts(tensor.detach()):
            yield part.untyped_storage()


def tensors_of(root: Any) -> Iterator[Tensor]:
    """Tensors of a module (with gradients), of an optimizer (with its state), or of any nest of containers."""
    if isinstance(root, nn.Module):
        values = [*root.parameters(), *root.buffers()]
    elif isinstance(root, torch.optim.Optimizer):
        values = tree_leaves([[group["params"] for group in root.param_groups], dict(root.state)])
    else:
        values = tree_leaves(root)
    for value in values:
        if isinstance(value, Tensor):
            yield value
            if value.is_leaf and value.grad is not None:
                yield value.grad


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use since `reset_peak`: the allocator's on an accelerator, the process's resident set on a CPU."""
    if _is_counted(device):
        return accelerator.peak_memory(device)
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource  # not on Windows, which torch.distributed does not serve either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Start `peak_memory_bytes` anew. Where the kernel forbids it, a CPU's peak stays that of the whole process."""
    if _is_counted(device):
        accelerator.reset_peak_memory(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size


def _is_counted(device: torch.device) -> bool:
    return device_kind(device.type).supports(Feature.PEAK).ok
