"""The module of flash_attn 1.0."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.smp.doors.stubs.flash_attn import flash_attn_qkvpacked_func


class FlashAttention(nn.Module):
    """Attention of packed queries, keys and values."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self, qkv: Tensor, key_padding_mask: Tensor | None = None, causal: bool = False, **rest: object
    ) -> tuple[Tensor, None]:
        """[B, S, 3, heads, d] -> ([B, S, heads, d], None). Raises ConfigError for padding that is masked."""
        if key_padding_mask is not None and not bool(key_padding_mask.all()):
            raise ConfigError(
                "key_padding_mask hides tokens, which this stand-in for flash_attn cannot; install flash_attn"
            )
        dropout = self.dropout_p if self.training else 0.0
        return flash_attn_qkvpacked_func(qkv, dropout, self.softmax_scale, causal), None
