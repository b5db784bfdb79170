"""FSDP's local state (`LOCAL_STATE_DICT`) as scripts save it, a file for each rank, read by one process.

A rank's file holds its run of each FSDP unit's flat parameter: the unit's parameters one behind the other in the order
of the model, cut over the ranks. Under `use_orig_params` the same elements are there once more, by parameter, and these
are taken. The runs are torch's ShardedTensors, which only the ranks that saved them can make again; a stand-in that
keeps their records is made in their place. For `shardwise export`, see exporting.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.fsdp1 import ShardedTensor
from shardwise.errors import CheckpointError
from shardwise.smp.model_config import CONFIG_KEY, MODEL_KEY
from shardwise.smp.safe_reading import read_safely

SHARDED = f"{ShardedTensor.__module__}.{ShardedTensor.__qualname__}"
FLAT = "_flat_param"


class _Run(ShardedTensor):
    """A ShardedTensor that no ranks hold together: this one's part, and what the file says of the whole."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._local_shards, self._metadata = state[:2]

    @property
    def count(self) -> int:
        """Elements of the whole."""
        return torch.Size(self._metadata.size).numel()

    def elements(self, start: int, count: int) -> Tensor:
        """Return those of the `count` elements from `start` on, counted in the whole, that are here."""
        parts = []
        for shard in self._local_shards:
            first = start - shard.metadata.shard_offsets[0]
            parts.append(shard.tensor[max(first, 0) : max(first + count, 0)])
        return torch.cat(parts) if parts else torch.empty(0)


class LocalFile:
    """The file that one rank has saved.

    Raises:
        CheckpointError: the file is not there, or holds what cannot be read safely.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, read_safely(path, instead={SHARDED: _Run})
        if not isinstance(self.content, Mapping) or not isinstance(self.content.get(MODEL_KEY), Mapping):
            raise CheckpointError(
                f"{path} holds no state of a {MODEL_KEY!r}; it is no checkpoint of version 2's scripts"
            )

    def config(self) -> Any:
        """Return what the script has kept as the model's config; None where it has not."""
        return self.content.get(CONFIG_KEY)

    @property
    def ranks(self) -> int:
        """The number of ranks whose files make the whole: 1 where the state is whole already (`NO_SHARD`)."""
        runs = [value for value in self.content[MODEL_KEY].values() if isinstance(value, _Run)]
        return max((len(run.metadata().shards_metadata) for run in runs), default=1)

    def by_name(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter, flat; `shapes` are those of the model, in its order.

        Raises:
            CheckpointError: a flat parameter has another size than the parameters of its unit.
        """
        saved: dict[str, Tensor] = self.content[MODEL_KEY]
        plain = {name: value for name, value in saved.items() if not isinstance(value, _Run)}
        if all(name in plain for name in shapes):
            return plain
        units = {key.removesuffix(FLAT): value for key, value in saved.items() if isinstance(value, _Run)}
        for prefix, run in units.items():
            plain |= self._of_unit(prefix, run, {name: shapes[name] for name in _owned(prefix, units, shapes)})
        return plain

    def _of_unit(self, prefix: str, run: _Run, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        counts = [torch.Size(shape).numel() for shape in shapes.values()]
        if sum(counts) != run.count:
            raise CheckpointError(
                f"{self.path}: {prefix}{FLAT} has {run.count} elements, and the model's parameters there "
                f"have {sum(counts)}; config and checkpoint do not belong together"
            )
        starts = itertools.accumulate(counts, initial=0)
        return {name: run.elements(*span) for name, span in zip(shapes, zip(starts, counts, strict=False), strict=True)}


def _owned(prefix: str, units: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    """The parameters whose innermost unit is that of `prefix`."""
    inner = [other for other in units if other != prefix and other.startswith(prefix)]
    return [name for name in names if name.startswith(prefix) and not name.startswith(tuple(inner))]
