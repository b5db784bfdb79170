"""A box of a logical tensor on one rank, which is what is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata


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
