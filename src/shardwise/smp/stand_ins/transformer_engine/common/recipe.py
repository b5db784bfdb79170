"""Settings of fp8, which are kept and shown."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    """Formats of 8 bits."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class DelayedScaling:
    """Settings of scaling by the past steps' largest values."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
