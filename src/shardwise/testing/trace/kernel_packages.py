"""Packages of attention kernels that a described cluster has and this machine has not: one operator in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from shardwise._torch_compat.operators import gpu_flash_attention
from shardwise.kernels.attention import dispatch
from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.attention.dispatch import AttentionFunction

PACKAGES = ("flash_attention_2", "flash_attention_3")
LARGEST = 256  # size of a head that the kernel takes


@contextmanager
def packages_stood_for() -> Iterator[None]:
    """Let calls of these kernels be flash attention's operator inside."""
    fused = {name: _or(function) for name, function in dispatch.FUNCTIONS.items() if name in PACKAGES}
    with mock.patch.dict(dispatch.FUNCTIONS, fused):
        yield


def _or(otherwise: AttentionFunction) -> AttentionFunction:
    def attend(call: AttentionCall) -> Tensor:
        size, narrow = call.query.shape[-1], call.query.element_size() == 2
        plain = not (call.dropout or call.softcap or call.bias is not None or (call.mask and not call.mask.causal))
        if plain and narrow and size == call.value.shape[-1] <= LARGEST:
            return gpu_flash_attention(call.query, call.key, call.value, call.is_causal, call.scale)
        return otherwise(call)

    return attend
