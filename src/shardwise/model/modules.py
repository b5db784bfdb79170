"""Modules changed in place, by torch's public ways, and found where not every model of transformers can say."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def empty_module(module: nn.Module) -> None:
    """Take children, parameters and buffers off a module; it keeps its other attributes, which a model may read."""
    while children := [name for name, _ in module.named_children()]:  # a child of two names is listed once
        for name in children:
            delattr(module, name)
    parameters = list(module.named_parameters(recurse=False, remove_duplicate=False))
    buffers = list(module.named_buffers(recurse=False, remove_duplicate=False))
    for name, _ in (*parameters, *buffers):
        delattr(module, name)


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that embeds the tokens of a transformers model; None where its class does not say which."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # CANINE hashes characters, xLSTM's head names another attribute
        return None
