"""The attention that an accelerator would run, in a trace whose tensors say that they are on a CPU.

There every call runs blockwise, in dozens of operators a block. Where a GPU runs flash attention it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from shardwise._torch_compat.operators import gpu_flash_attention
from shardwise.kernels.attention import dispatch
from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.attention.dispatch import AttentionFunction

FUSED = ("blockwise", "cudnn", "efficient", "flash", "flash_attention_2", "flash_attention_3", "sdpa")
LARGEST = 256  # size of a head that the kernel takes


@contextmanager
def attention_as_on_gpu(on_accelerator: bool) -> Iterator[None]:
    """Let calls that flash attention can do be one operator inside, if the traced job runs on an accelerator."""
    fused = {name: _or(function) for name, function in dispatch.FUNCTIONS.items() if name in FUSED}
    with mock.patch.dict(dispatch.FUNCTIONS, fused if on_accelerator else {}):
        yield


def _or(otherwise: AttentionFunction) -> AttentionFunction:
    def attend(call: AttentionCall) -> Tensor:
        size, narrow = call.query.shape[-1], call.query.element_size() == 2
        plain = not (call.dropout or call.softcap or call.bias is not None or (call.mask and not call.mask.causal))
        if plain and narrow and size == call.value.shape[-1] <= LARGEST:
            return gpu_flash_attention(call.query, call.key, call.value, call.is_causal, call.scale)
        return otherwise(call)

    return attend
