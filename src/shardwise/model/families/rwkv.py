"""RWKV: its evaluation scales weights of its blocks in place."""

from __future__ import annotations

from torch import nn
from transformers.models.rwkv.modeling_rwkv import RwkvModel

from shardwise.model.family import Family


def _keep_weights(model: nn.Module, sequence_length: int) -> None:
    """Leave weights as they are in evaluation.

    Halved weights and hidden states compute the same, and only fp16 needs them; but stages lack the weights, and a
    model that is saved behind an evaluation would hold halves.
    """
    for module in model.modules():
        if isinstance(module, RwkvModel):
            module._rescale_layers = _nothing


def _nothing() -> None:
    pass


FAMILY = Family(("rwkv",), settle=_keep_weights)
