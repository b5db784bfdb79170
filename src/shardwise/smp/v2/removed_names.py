"""Names that public scripts of version 2 take from transformers 4 and transformers 5 has no more.

Each leads to what does its work now, with a line that says so. There are two, and no more unless a published script
needs one: `LlamaFlashAttention2`, which scripts put in the place of each layer's attention, and the rotary tables of
each GPT-NeoX layer, which they move to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from shardwise.smp.v2.logger import note_once

FLASH, TABLES = "LlamaFlashAttention2", "rotary_emb"
_llama: Any = modeling_llama
_neox: Any = modeling_gpt_neox.GPTNeoXAttention


class _LlamaAttention(modeling_llama.LlamaAttention):
    """Llama's attention, which takes the kernel that the config names; made without its layer's number, as before."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        note_once(
            f"{FLASH} is no more in transformers: it is LlamaAttention, with {config._attn_implementation} attention"
        )


@contextmanager
def names_of_transformers_4() -> Iterator[None]:
    """Put the names where they were, and take them out at the end; what is there stays."""
    if not hasattr(modeling_llama, FLASH):
        _llama.LlamaFlashAttention2 = _LlamaAttention
    if not hasattr(_neox, TABLES):
        _neox.rotary_emb = property(_tables)
    try:
        yield
    finally:
        if getattr(modeling_llama, FLASH, None) is _LlamaAttention:
            del _llama.LlamaFlashAttention2
        if isinstance(vars(_neox).get(TABLES), property):
            del _neox.rotary_emb


def _tables(attention: Any) -> Any:
    note_once(
        "layers of GPT-NeoX have no rotary tables in transformers: the model has one, which FSDP moves to the device"
    )
    empty = SimpleNamespace(sin_cached=torch.empty(0), cos_cached=torch.empty(0))
    return vars(attention).setdefault("_rotary_tables", empty)
