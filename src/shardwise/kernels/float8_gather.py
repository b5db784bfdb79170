"""FSDP2's gathering with the weights of float8 layers in float8: half the bytes of bf16.

    gather_in_float8(modules)     # after fully_shard and `use_float8`; products have `Float8(..., gathered=True)`

Parameters stay plain tensors, for optimizer and checkpoint alike: it is the message that is in float8. Each rank scales
its part of a weight by a power of two, which goes along, and what arrives is written out in the compute dtype. That is
exact, as a number of e4m3 and a power of two fit into any wider format. The layer's products round the weight again,
with a power of two as well, and so find it rounded already: what is gathered in float8 is multiplied in float8 as if it
had been gathered whole, but for numbers that fall below float8's smallest normal one. Biases, norms and all that stands
outside of those layers travel as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.fsdp2 import gathered_parameters
from shardwise._torch_compat.groups import all_gather_single
from shardwise.collectives.fsdp import SHARD_GROUP, Memory
from shardwise.collectives.names import CollectiveName, unit_names
from shardwise.kernels.float8 import E4M3, quantize

ALIGNED = 16  # bytes; each rank's message begins so, and numbers of any dtype can be read where they lie


class BufferSegment(NamedTuple):
    """A rank's part of one parameter in FSDP2's flat buffer."""

    elements: int
    rounded: bool


class Float8AllGather(Memory):
    """For `FSDPModule.set_custom_all_gather` of `module`."""

    def __init__(self, module: FSDPModule, unit: str) -> None:
        self.module = module
        self.name = CollectiveName(unit, SHARD_GROUP, "all_gather")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        segments = self._segments()
        if not any(segment.rounded for segment in segments):
            with self.name:
                return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        message = pack(input_tensor, segments)
        arrived = message.new_empty(group.size() * message.numel())
        with self.name:
            work = all_gather_single(arrived, message, group=group, async_op=async_op)

        def write() -> None:
            unpack(arrived.view(group.size(), -1), segments, output_tensor.view(group.size(), -1))

        if work is not None:
            return _Written(work, write)
        write()
        return None

    def _segments(self) -> list[BufferSegment]:
        """Asked anew each time: a layer that is in float8 in some calls alone has its `float8` set for those."""
        return [
            BufferSegment(elements, name == "weight" and getattr(owner, "float8", None) is not None)
            for elements, owner, name in gathered_parameters(self.module)
        ]


def gather_in_float8(modules: Sequence[FSDPModule]) -> None:
    """Let all FSDP `modules` of a model gather the weights of their float8 layers in float8."""
    units = unit_names(modules[0]) if modules else {}
    for module in modules:
        module.set_custom_all_gather(Float8AllGather(module, units[module]))  # type: ignore[arg-type]


def pack(values: Tensor, segments: Sequence[BufferSegment]) -> Tensor:
    """Numbers [elements of all pieces] -> bytes: scales in fp32, then what is not rounded, then what is, in e4m3."""
    parts = values.split([segment.elements for segment in segments])
    rounded = [
        quantize(part, E4M3, by_powers=True) for part, segment in zip(parts, segments, strict=True) if segment.rounded
    ]
    scales = [tensor.scale.view(1) for tensor in rounded]
    whole = [part for part, segment in zip(parts, segments, strict=True) if not segment.rounded]
    content = [tensor.view(torch.uint8) for tensor in (*scales, *whole, *(tensor.values for tensor in rounded))]
    content.append(content[0].new_zeros(-sum(map(len, content)) % ALIGNED))
    return torch.cat(content)


def unpack(messages: Tensor, segments: Sequence[BufferSegment], output: Tensor) -> None:
    """Bytes [ranks, message] -> numbers in `output` [ranks, elements of all pieces]."""
    count = sum(segment.rounded for segment in segments)
    scales = iter(messages[:, : 4 * count].view(torch.float32).split(1, dim=1))
    for segment, part, content in _placed(messages[:, 4 * count :], segments, output):
        if segment.rounded:
            part.copy_(content.view(E4M3)).div_(next(scales))
        else:
            part.copy_(content.view(output.dtype))


def _placed(
    messages: Tensor, segments: Sequence[BufferSegment], output: Tensor
) -> Iterator[tuple[BufferSegment, Tensor, Tensor]]:
    """Each piece, its columns of the output and its bytes, in the order of the message."""
    at, columns = 0, output.split([segment.elements for segment in segments], dim=1)
    for segment, part in sorted(zip(segments, columns, strict=True), key=lambda pair: pair[0].rounded):
        size = segment.elements * (1 if segment.rounded else output.element_size())
        yield segment, part, messages[:, at : at + size]
        at += size


class _Written(dist.Work):
    """Waits for the bytes, then writes the numbers."""

    def __init__(self, work: dist.Work, write: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._write = work, write

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._write()
        return True
