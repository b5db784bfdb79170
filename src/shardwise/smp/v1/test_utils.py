"""`smdistributed.modelparallel.test.torch.utils`: names of SMP's own tests. A public script imports them."""

from __future__ import annotations

from typing import Any

from shardwise.smp.exceptions import SMPUnsupportedError


def dump_model(*args: Any, **kwargs: Any) -> None:
    """Refused: what SMP's own tests write is not documented. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(_refusal("dump_model"))


def verify(*args: Any, **kwargs: Any) -> None:
    """Refused: what SMP's own tests compare is not documented. Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(_refusal("verify"))


def _refusal(name: str) -> str:
    return (
        f"smdistributed.modelparallel.test.torch.utils.{name} is of SMP's own tests and not documented; compare "
        "model.state_dict() on the ranks, or save it with smp.save"
    )
