"""Process groups for scripts."""

from __future__ import annotations

import torch.distributed as dist


def get_global_ranks(pg: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of a group; of all where it is None."""
    return dist.get_process_group_ranks(pg)
