"""GPT-2's activation function in one kernel instead of eight.

transformers writes the tanh formula of GELU (arXiv 1606.08415, section 2) out for `gelu_new`, which GPT-2, GPT-J,
GPT-Neo and Phi have: eight passes over the widest tensor of a block, four of whose results autograd keeps. torch's
kernel of the same formula passes once and keeps the input alone. Results differ by rounding.
"""

from __future__ import annotations

from torch import nn
from transformers.activations import GELUTanh, NewGELUActivation


def fuse_activations(model: nn.Module) -> None:
    """Put torch's kernel in the place of every `gelu_new`; such modules have no state."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, GELUTanh())
