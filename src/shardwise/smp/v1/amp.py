"""`smp.amp`: loss scaling for scripts that use autocast."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardwise.smp.v1.session import state


class GradScaler(ShardedGradScaler):
    """torch's GradScaler whose verdict on overflows is that of all ranks.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch.amp.GradScaler's.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **settings: Any,
    ) -> None:
        device = state.device.type if state.initialized else "cuda"
        super().__init__(
            device, init_scale, backoff_factor, growth_factor, growth_interval, enabled,
            process_group=dist.group.WORLD,
        )  # fmt: skip

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # Of a pipeline's ranks the last alone scales the loss; the others unscale and step too.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(state.device)
        return super()._check_scale_growth_tracker(funcname)
