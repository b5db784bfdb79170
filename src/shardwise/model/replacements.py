"""Modules that are replaced when a model of transformers is built: attention, and an activation function.

Replacements have the parameters, buffers and names of what they replace.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation

from shardwise.model.registry import family_of


def replace_attention(model: PreTrainedModel) -> None:
    """Give attention modules the class of their family that calls transformers' AttentionInterface."""
    config: Any = model.config
    attention = family_of(str(config.model_type)).attention
    if attention is None or (attention.keeps_class is not None and attention.keeps_class(config)):
        return
    for module in model.modules():
        if type(module) in attention.classes:
            module.__class__ = attention.classes[type(module)]
            module.config = config  # BLOOM's have none


def fuse_activations(model: nn.Module) -> None:
    """Compute `gelu_new` by torch's kernel.

    transformers writes the formula of GELU by tanh (arXiv 1606.08415, section 2) out: eight passes over the widest
    tensor of a block, four of whose results autograd keeps. torch's kernel of the same formula passes once and keeps
    the input alone. Results differ by rounding.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, GELUTanh())
