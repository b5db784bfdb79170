"""Whole weights out of a checkpoint of sharded data parallelism, by SMP's documented layout of its files.

Each `optimizer_<i>.pt` holds under `fp32_flat_groups` one flat tensor for each group of the optimizer. In it parameter
after parameter has ceil(numel / degree) elements, in the order of `param_shapes` in `user_content.pt`; behind one
another, the ranks' elements are the parameter. Buffers are in `model_0.pt`.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.smp.safe_reading import read_safely

PREFIX = "module."  # of Amazon's own wrapper


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    tag: str | None = None,
    remove_smp_prefix: bool = True,
) -> dict[str, Tensor]:
    """Return the model's parameters and buffers by name, on the CPU.

    Args:
        checkpoint_dir: directory of all checkpoints.
        dtype: of what is returned.
        tag: directory of this one; left out, the newest.
        remove_smp_prefix: take `module.` off names.

    Raises:
        CheckpointError: a file is missing, or they do not belong together.
    """
    directory = Path(checkpoint_dir)
    if tag is None:
        newest = directory / "newest"
        if not newest.is_file():
            raise CheckpointError(f"{directory} has no file 'newest'; give a tag")
        tag = newest.read_text().strip()
    folder = directory / tag
    shards = sorted(folder.glob("optimizer_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    if not shards:
        raise CheckpointError(f"{folder} has no optimizer_<i>.pt; give the directory of a partial checkpoint")
    content = read_safely(folder / "user_content.pt")
    for key in ("param_shapes", "buffer_names"):
        if key not in content:
            raise CheckpointError(f"{folder / 'user_content.pt'} lacks {key!r}, by which flat tensors are taken apart")
    names = {name: tuple(shape) for group in content["param_shapes"] for name, shape in group.items()}
    tensors: dict[str, Tensor] = OrderedDict(whole_parameters([read_safely(shard) for shard in shards], names, folder))
    module = read_safely(folder / "model_0.pt")["module"]
    tensors |= {name: module[name] for name in content["buffer_names"] if name in module}
    plain = {name.removeprefix(PREFIX) if remove_smp_prefix else name: value for name, value in tensors.items()}
    return OrderedDict((name, value.to(dtype)) for name, value in plain.items())


def whole_of_parts(folder: Path) -> dict[str, Any]:
    """Return the model of a partial checkpoint that Amazon's library has written: of shards, or of pipeline stages.

    Raises:
        CheckpointError: there is none, or tensors are split, whose layout is not documented.
    """
    if any(folder.glob("optimizer_*.pt")) and "fp32_flat_groups" in read_safely(
        next(iter(folder.glob("optimizer_*.pt")))
    ):
        return dict(get_full_state_dict_from_sharded_data_parallel_checkpoint(folder.parent, tag=folder.name))
    parts = sorted(folder.glob("model_*.pt"))
    if not parts or any(file.stem.split("_")[2:3] not in ([], ["0"]) for file in parts):
        problem = "has parts of split tensors" if parts else "has no model_<ranks>.pt"
        raise CheckpointError(
            f"{folder} {problem}, and no partition.pt of this library; save and load a full checkpoint"
        )
    weights: dict[str, Any] = {}
    for file in parts:
        weights |= {
            name.removeprefix(PREFIX): value for name, value in read_safely(file).items() if name != "_smp_is_partial"
        }
    return weights


def whole_parameters(
    shards: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, Tensor]:
    """Join the parameters of `shapes`, which stand in the flat groups one after the other.

    Raises:
        CheckpointError: shards are missing, or hold more or fewer elements.
    """
    count = shards[0].get("partition_count")
    degree = max(count) if isinstance(count, (list, tuple)) else count
    if degree != len(shards):
        raise CheckpointError(f"{folder} is of {degree} shards and has {len(shards)} optimizer_<i>.pt; find the others")
    flat = [torch.cat([group.flatten() for group in shard["fp32_flat_groups"]]) for shard in shards]
    needed = sum(-(-math.prod(shape) // degree) for shape in shapes.values())
    if any(part.numel() != needed for part in flat):
        raise CheckpointError(
            f"{folder}: shards have {sorted({part.numel() for part in flat})} elements, and {len(shapes)} parameters "
            f"need {needed}; it is of another model"
        )
    wholes, first = {}, 0
    for name, shape in shapes.items():
        size, total = -(-math.prod(shape) // degree), math.prod(shape)
        wholes[name] = torch.cat([part[first : first + size] for part in flat])[:total].view(shape)
        first += size
    return wholes
