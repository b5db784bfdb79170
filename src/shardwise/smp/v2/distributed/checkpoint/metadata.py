"""A distributed checkpoint's metadata as JSON: which tensors there are, and where in which file their chunks lie."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise._torch_compat.fsdp1 import StorageInfo

FILE = "metadata.json"


def to_text(metadata: Metadata) -> str:
    """Return the metadata as JSON."""
    return json.dumps(
        {
            "values": {name: _value(value) for name, value in metadata.state_dict_metadata.items()},
            "paths": metadata.planner_data,
            "places": [
                [index.fqn, index.offset and list(index.offset), index.index, i.relative_path, i.offset, i.length]
                for index, i in metadata.storage_data.items()
            ],
        }
    )


def from_text(text: str, load_id: str | None) -> Metadata:
    """Return the metadata of `to_text`. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
    stored = json.loads(text)
    places = {
        MetadataIndex(name, None if offset is None else torch.Size(offset), number): StorageInfo(path, start, length)
        for name, offset, number, path, start, length in stored["places"]
    }
    return Metadata(
        state_dict_metadata={name: _from_value(value) for name, value in stored["values"].items()},
        planner_data={name: tuple(path) for name, path in (stored["paths"] or {}).items()},
        storage_data=places,
        storage_meta=StorageMeta(load_id=load_id),
    )


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, BytesStorageMetadata):
        return {}
    chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in value.chunks]
    return {"dtype": str(value.properties.dtype).removeprefix("torch."), "size": list(value.size), "chunks": chunks}


def _from_value(value: dict[str, Any]) -> TensorStorageMetadata | BytesStorageMetadata:
    if not value:
        return BytesStorageMetadata()
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['dtype']!r} is no dtype")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in value["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(value["size"]), chunks)
