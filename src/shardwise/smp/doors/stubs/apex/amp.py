"""apex's mixed precision, which scripts import in any case: refused where they call it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from shardwise.smp.exceptions import SMPUnsupportedError

_amp_state = SimpleNamespace(loss_scalers=[])


def _refused(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise SMPUnsupportedError(
            f"apex.amp.{name} is not to be had: apex is not installed, and this is a stand-in; leave the script's fp16 "
            "off, and give SMP's own fp16 or bf16 by --smp-options"
        )

    return call


initialize = _refused("initialize")
scale_loss = _refused("scale_loss")
master_params = _refused("master_params")
