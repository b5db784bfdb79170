"""The logger that scripts write to, and notes on what is done otherwise here."""

from __future__ import annotations

import logging
import sys

_told: set[str] = set()


def get_logger() -> logging.Logger:
    """SMP's logger, which shows messages from INFO on standard error."""
    logger = logging.getLogger("torch.sagemaker")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def tell(text: str) -> None:
    """A line on rank 0's standard error, once in a process."""
    from shardwise.smp.v2.state_handler import state

    if text not in _told and state.rank == 0:
        print(f"note: {text}.", file=sys.stderr)
    _told.add(text)
