"""A box of a logical tensor on one rank, which is what is saved and loaded; and the names of dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class TensorChunk:
    """A box of a logical tensor that this rank holds.

    Attributes:
        name: key in the manifest.
        shape: global shape.
        offset: of the box, one a dim.
        tensor: its elements; read or written in place.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """Offset and sizes as torch.distributed.checkpoint writes them."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()
