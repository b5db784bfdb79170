"""The class that scripts name to checkpoint experts apart: Mixtral's own."""

from __future__ import annotations

from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as MoELayer

__all__ = ["MoELayer"]
