"""Stands for Transformer Engine where scripts import it: its checkpoint is torch's, its fp8 is refused when used."""

from __future__ import annotations

__version__ = "0.0"
