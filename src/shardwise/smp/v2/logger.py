"""The logger that scripts write to."""

from __future__ import annotations

import logging
import sys


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
