"""Modules that are replaced or mended when a model is built: attention, an activation function, batch norms.

Replacements have the parameters, buffers and names of what they replace.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation

from shardwise.model.registry import family_of

MENDED = "has_gradient_in_layout"  # of a batch norm, which is mended once


def replace_attention(model: PreTrainedModel) -> None:
    """Give attention modules the class of their family that calls transformers' AttentionInterface."""
    config: Any = model.config
    attention = family_of(str(config.model_type)).attention
    if attention is None or not attention.is_replaced(config):
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


def mend_batch_norms(model: nn.Module) -> None:
    """Let batch norms on a CPU get their gradient in the layout of their output.

    torch's kernel (2.13 and 2.14.1 were tried) gives a wrong gradient for one image whose output's gradient comes
    channels last, as behind `permute` (CvT). Two views that cost nothing forward make it as the output is.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d) and not vars(module).get(MENDED):
            module.register_forward_hook(_viewed_flat)
            vars(module)[MENDED] = True


def _viewed_flat(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    is_met = output.device.type == "cpu" and output.is_contiguous()
    return output.flatten().view(output.shape) if is_met else output
