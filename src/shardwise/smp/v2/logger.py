"""The logger that scripts write to, and notes on what is done otherwise here."""

from __future__ import annotations

import logging
import sys

from shardwise.smp.v2.session import state

_noted: set[str] = set()


def get_logger() -> logging.Logger:
    """Return SMP's logger, which shows messages from INFO on standard error."""
    logger = logging.getLogger("torch.sagemaker")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def note_once(text: str) -> None:
    """Print a line on rank 0's standard error, once in a process."""
    if text not in _noted and state.rank == 0:
        print(f"note: {text}.", file=sys.stderr)
    _noted.add(text)
