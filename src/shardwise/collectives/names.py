"""One name for every collective: whose tensors travel, among which ranks, and by which operation.

Messages, checks and traces read it. It is equal on all ranks that take part, so ranks that are out of step are told
apart by their names' digests.

    name = CollectiveName("transformer.h.0", "shard", "reduce_scatter")
    with name:                       # an error of torch.distributed inside says which collective failed
        dist.reduce_scatter_tensor(...)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

ROOT_UNIT = "root"


@dataclass(frozen=True)
class CollectiveName:
    """The name of a collective, and the context in which it runs.

    Attributes:
        unit: whose tensors travel: the module of a sharded unit, a stage, or what a step agrees on.
        group: the axes along which the ranks lie, as the layout describes their group.
        operation: in torch.distributed's words.
    """

    unit: str
    group: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.unit} over {self.group}"

    @cached_property
    def digest(self) -> int:
        """63 bits that differ for different names, equal on every rank."""
        return int.from_bytes(blake2b(str(self).encode(), digest_size=8).digest(), "little") >> 1

    def __enter__(self) -> CollectiveName:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, dist.DistError) and error.args:
            error.args = (f"{error.args[0]} (in the {self})", *error.args[1:])


def group_name(group: dist.ProcessGroup) -> str:
    """Return the axes of a group as the layout has described it; `world` for all ranks."""
    return "world" if group is dist.group.WORLD else group.group_desc


def unit_names(root: Any) -> dict[FSDPModule, str]:
    """Return the name of each sharded unit of the module `root`: its module's own, `root` for the root."""
    return {module: name or ROOT_UNIT for name, module in root.named_modules() if isinstance(module, FSDPModule)}
