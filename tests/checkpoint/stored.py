"""A checkpoint read with the safetensors library and json alone, so that the tests do not trust the code they test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def stored(path: Path) -> dict[str, Tensor]:
    """Every logical tensor of the checkpoint, put together from the slices that the files' own headers name."""
    manifest = json.loads((path / "manifest.json").read_text())
    chunks: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name, _, place = key.rpartition("@")
                offset = [int(each) for each in place.split(",") if each]
                chunks.setdefault(name, []).append((offset, opened.get_tensor(key)))
    assert chunks.keys() == manifest["tensors"].keys()
    return {name: _joined(manifest["tensors"][name]["shape"], parts) for name, parts in chunks.items()}


def scalars(path: Path) -> dict[str, dict[str, list[float | str]]]:
    """The optimizer's numbers."""
    found: dict[str, dict[str, list[float | str]]] = json.loads((path / "manifest.json").read_text())[
        "optimizer_scalars"
    ]
    return found


def _joined(shape: list[int], parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """Each element is there once."""
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    times = torch.zeros(shape, dtype=torch.int32)
    for offset, tensor in parts:
        box = tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))
        whole[box] = tensor
        times[box] += 1
    assert bool((times == 1).all())
    return whole
