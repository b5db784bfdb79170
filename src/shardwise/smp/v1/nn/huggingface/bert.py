"""Translation of BERT's weights, under all the names it has had."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.smp.v1.nn.huggingface.translation import to_hf, to_smp


def translate_hf_state_dict_to_smdistributed_bert(
    state_dict: Any, max_seq_len: int | None = None, heads: int | None = None
) -> dict[str, Tensor]:
    """transformers' weights by `smp.nn`'s names; `state_dict` is emptied meanwhile."""
    return to_smp(state_dict, "bert", heads)


def translate_state_dict_to_hf_bert(
    state_dict: Any, max_seq_len: int | None = None, heads: int | None = None
) -> dict[str, Tensor]:
    """`smp.nn`'s weights by transformers' names; `state_dict` is emptied meanwhile."""
    return to_hf(state_dict, "bert", heads)
