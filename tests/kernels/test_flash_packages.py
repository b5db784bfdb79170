"""What flash-attn's functions are called with and what is made of their answers, with plain products in their place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.attention.flash_packages import flash_attention_2, flash_attention_3


@pytest.mark.parametrize(
    ("kernel", "package"), [(flash_attention_2, "flash_attn"), (flash_attention_3, "flash_attn_interface")]
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_heads_and_positions_change_places(
    kernel: Any, package: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attend over [B, S, h, d]; flash-attn 3 returns the log-sum-exp beside it."""
        asked.update(options)
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        scale, causal = options["softmax_scale"], options["causal"]
        output = scaled_dot_product_attention(*heads, scale=scale, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return (output, None) if package == "flash_attn_interface" else output

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(flash_attn_func=flash_attn_func))  # type: ignore[arg-type]
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    output = kernel(AttentionCall(query, key, value, 0.3, causal=True, softcap=20.0, dropout=dropout))
    expected = scaled_dot_product_attention(query, key, value, scale=0.3, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected)
    assert asked == {"softcap": 20.0, "softmax_scale": 0.3, "causal": True} | (
        {"dropout_p": dropout} if dropout else {}
    )
