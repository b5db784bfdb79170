"""The tiny corpora of the parity tests."""

from __future__ import annotations

from tests.parity.conftest import corpora

__all__ = ["corpora"]
