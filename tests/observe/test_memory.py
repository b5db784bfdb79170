"""LiveBytes against programs whose storages can be counted by hand."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.observe.memory import LiveBytes, peak_memory_bytes, reset_peak

KB = 1024  # bytes of 256 fp32 numbers, the unit of the tensors below


def kilobyte() -> torch.Tensor:
    return torch.ones(256)


def test_counts_new_tensors_and_forgets_dead_ones() -> None:
    with LiveBytes() as memory:
        first = kilobyte()
        second = kilobyte()
        assert memory.live == 2 * KB
        del first
        assert memory.live == KB
        third = second + 1
        assert memory.live == 2 * KB
    assert memory.peak == 2 * KB
    assert third is not None


def test_views_and_in_place_operators_add_nothing() -> None:
    with LiveBytes() as memory:
        whole = torch.ones(4, 256)
        view = whole[1:3].t()
        view.add_(1)
        whole.mul_(2)
        del whole
        assert memory.live == 4 * KB  # the view alone keeps the whole storage
    assert memory.peak == 4 * KB


def test_temporaries_of_an_expression_are_in_the_peak_only() -> None:
    with LiveBytes() as memory:
        x = kilobyte()
        y = ((x + 1) * 2) - 3
        assert memory.live == 2 * KB
    assert memory.peak == 3 * KB  # x, one temporary, and the result computed from it
    del y


def test_tensors_made_before_count_from_their_first_use_or_when_tracked() -> None:
    x = kilobyte()
    with LiveBytes() as memory:
        assert memory.live == 0
        x.sum()
        assert memory.live == KB
    with LiveBytes({"inputs": [x]}) as memory:
        assert memory.live == KB == memory.peak


def test_saved_tensors_live_until_backward() -> None:
    x = kilobyte().requires_grad_()
    with LiveBytes(x) as memory:
        y = x.exp().sin()  # exp saves its result, sin its input: one and the same
        assert memory.live == 3 * KB
        loss = y.sum()
        del y
        assert memory.live == 2 * KB + 4  # x, exp(x) and the loss
        loss.backward()
        del loss
        assert memory.live == 2 * KB  # x and its gradient
    assert x.grad is not None


def test_linear_layer_peak_counted_by_hand() -> None:
    """y = x W^T, loss = sum(y): backward holds x, W, y's gradient, and W's gradient."""
    layer = nn.Linear(64, 128, bias=False)
    x = torch.ones(32, 64)
    weight, inputs, outputs = 4 * 64 * 128, 4 * 32 * 64, 4 * 32 * 128
    with LiveBytes(layer, x) as memory:
        loss = layer(x).square().sum()
        assert memory.live == weight + inputs + outputs + 4  # square() saves its input y
        memory.reset_peak()
        loss.backward()
        assert memory.live == 2 * weight + inputs + 4
    # The highest moment: pow saves y, its backward makes 2*y and then grad*2*y; grad of sum is expanded, not stored.
    assert memory.peak >= 2 * weight + inputs + outputs
    assert memory.peak <= 2 * weight + inputs + 3 * outputs + 8


def test_checkpointing_keeps_less_and_recomputes() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)])
    x = torch.ones(256, 64)

    def live_after_forward(recompute: bool) -> int:
        with LiveBytes(layers, x) as memory:
            before = memory.live
            hidden = x
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
            return memory.live - before

    activation = 4 * 256 * 64
    assert live_after_forward(True) == 4 * activation  # the blocks' outputs
    assert live_after_forward(False) == 4 * 3 * activation  # GELU's input and output besides


def test_storages_resized_in_place_count_with_their_size() -> None:
    x = kilobyte()
    with LiveBytes(x) as memory:
        x.untyped_storage().resize_(0)
        assert memory.live == 0
        other = kilobyte()
        x.untyped_storage().resize_(KB)
        other.add_(1)
        assert memory.live == 2 * KB
    assert memory.peak == 2 * KB


def test_modules_and_optimizers_are_tracked_whole() -> None:
    layer = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    with LiveBytes(layer, optimizer) as memory:
        assert memory.live == 4 * (4 * 256) + 4  # weight, gradient, two moments, step counter
    with LiveBytes(optimizer) as memory:
        assert memory.live == 4 * (4 * 256) + 4
    assert memory.peak_by_device == {"cpu": 4 * KB + 4}


class Wrapped(torch.Tensor):
    """A wrapper subclass with two inner tensors, whose own storage is empty."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Wrapped:
        outer = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        outer.first, outer.second = first, second
        return outer

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride) -> Wrapped:  # type: ignore[no-untyped-def]
        return Wrapped(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        def unwrap(which: str) -> torch.Tensor:
            return func(*[getattr(a, which) if isinstance(a, cls) else a for a in args], **(kwargs or {}))

        return cls(unwrap("first"), unwrap("second"))


def test_wrapper_subclasses_count_by_their_inner_storages() -> None:
    x = Wrapped(kilobyte(), kilobyte())
    with LiveBytes(x) as memory:
        assert memory.live == 2 * KB
        y = x + 1
        assert memory.live == 4 * KB
        del y
        assert memory.live == 2 * KB
    assert memory.peak == 4 * KB


def test_dtensor_counts_its_local_part_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(4, 256), init_device_mesh("cpu", (1,)), [Shard(0)])
        with LiveBytes(x) as memory:
            assert memory.live == 4 * KB
            y = x * 2
            z = y.to_local()
            del y
            assert memory.live == 8 * KB
            assert z.shape == (4, 256)
    finally:
        dist.destroy_process_group()


def test_meta_tensors_take_no_memory_and_sparse_ones_their_parts() -> None:
    with LiveBytes() as memory:
        meta = torch.empty(1024, device="meta") + 1
        assert memory.live == 0
        sparse = torch.eye(16).to_sparse()
        gc.collect()
        assert memory.live == 16 * 2 * 8 + 16 * 4  # indices [2, 16] int64 and values
    assert meta is not None
    assert sparse is not None


RESIDENT = """
import torch
from shardwise.observe.memory import peak_memory_bytes, reset_peak
device = torch.device("cpu")
reset_peak(device)
before = peak_memory_bytes(device)
big = torch.ones(512 << 18)
print(peak_memory_bytes(device) - before)
assert big.sum() == 512 << 18
"""


def test_cpu_peak_is_the_resident_set() -> None:
    """In a process of its own: this one may have memory that earlier tests have freed."""
    run = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=100, check=True)
    assert int(run.stdout) >= 384 << 20  # of 512 MiB: a kernel that reclaims cold pages may take some meanwhile


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_peak_agrees_with_live_bytes() -> None:
    device = torch.device("cuda")
    reset_peak(device)
    with LiveBytes() as memory:
        x = torch.ones(1 << 20, device=device)
        y = x + 1
        del x
        y.sum()
    assert abs(peak_memory_bytes(device) - memory.peak_by_device["cuda:0"]) < 1 << 16
