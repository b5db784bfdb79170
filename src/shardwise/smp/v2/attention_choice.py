"""Scripts of version 2 ask transformers for `flash_attention_2`, which it refuses where the package is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from shardwise.smp.v2.session import state

ASKED = "flash_attention_2"
_own: Any = PreTrainedModel.get_correct_attn_implementation


@contextmanager
def fused_attention_for_flash() -> Iterator[None]:
    """Let models take torch's fused attention where they ask for FlashAttention, with a line that says so."""
    cls: Any = PreTrainedModel
    if not is_flash_attn_2_available():
        cls.get_correct_attn_implementation = _choose
    try:
        yield
    finally:
        cls.get_correct_attn_implementation = _own


def _choose(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
    if requested_attention == ASKED:
        requested_attention = "sdpa"
        if is_init_check and state.rank == 0:
            print(f"note: {ASKED} cannot be had: {type(self).__name__} takes torch's fused attention.", file=sys.stderr)
    return str(_own(self, requested_attention, is_init_check))
