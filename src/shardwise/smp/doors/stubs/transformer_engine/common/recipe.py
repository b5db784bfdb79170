"""Settings of fp8."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    """Formats of 8 bits: of activations and weights, and (HYBRID) another one of gradients."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class DelayedScaling:
    """A recipe: `fp8_format` acts; the rest is of histories of largest values, which are not kept here."""

    def __init__(self, fp8_format: Format = Format.HYBRID, **settings: Any) -> None:
        self.fp8_format, self.settings = fp8_format, settings
