"""Scripts of version 2 ask transformers for `flash_attention_2`, which it refuses where the package is missing."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

ASKED = "flash_attention_2"
_own: Any = PreTrainedModel.get_correct_attn_implementation


def install() -> None:
    """Let models then take torch's fused attention, with a line that says so; a second call does nothing."""
    if not is_flash_attn_2_available():
        cls: Any = PreTrainedModel
        cls.get_correct_attn_implementation = _choose


def uninstall() -> None:
    """Give transformers its own choice back."""
    cls: Any = PreTrainedModel
    cls.get_correct_attn_implementation = _own


def _choose(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
    from shardwise.smp.v2.state_handler import state

    if requested_attention == ASKED:
        requested_attention = "sdpa"
        if is_init_check and state.rank == 0:
            print(f"note: {ASKED} cannot be had: {type(self).__name__} takes torch's fused attention.", file=sys.stderr)
    return str(_own(self, requested_attention, is_init_check))
