"""A hook of SMP 2.0 that scripts import."""

from __future__ import annotations

from typing import Any


def register_tp_processing_pre_comm_hook(*args: Any, **kwargs: Any) -> None:
    """Do nothing: gradients of tensor parts are right before FSDP reduces them."""
