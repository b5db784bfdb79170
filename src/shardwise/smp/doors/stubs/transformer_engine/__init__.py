"""Stands for Transformer Engine where scripts import it: its checkpoint is torch's, its fp8 the engine's float8."""

from __future__ import annotations

from shardwise.smp.doors.stubs.transformer_engine import pytorch as pytorch

__version__ = "0.0"
