"""Whether a model's attention can be led elsewhere: what its forward asks of transformers' AttentionInterface.

Context parallelism splits sequences over ranks. Between embedding and loss a rank then knows its own positions only, so
that every look at another position has to go through attention that can be exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

# Keyword arguments that say nothing about the result, or nothing that masks, scale and dropout do not say.
KNOWN = {
    "attention_mask", "scaling", "dropout", "is_causal", "sliding_window", "position_ids", "use_cache",
    "past_key_values", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "cache_position",
}  # fmt: skip
# What mixes positions without attention: convolutions and scans of state-space models.
MIXERS = {
    torch.conv1d, torch.conv2d, nn.functional.conv1d, nn.functional.conv2d, torch.cumsum, Tensor.cumsum, torch.cumprod,
    Tensor.cumprod, torch.roll, Tensor.roll, torch.flip, Tensor.flip, torch.fft.fft, torch.fft.rfft, torch.fft.fftn,
}  # fmt: skip
# Rotary embeddings whose angles depend on the longest position of the call, which ranks see differently.
BY_LENGTH = ("dynamic", "longrope")


class AttentionCalls:
    """The calls that a forward makes inside of `watched`."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.arguments: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note every call of a function that the AttentionInterface hands out."""
        original = AttentionInterface.get_interface

        def get_interface(own: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(own, name, default)

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.modules.append(module)
                self.arguments |= {key for key, value in kwargs.items() if value is not None} - KNOWN
                return function(module, *args, **kwargs)

            return call

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]


def context_refusal(
    model: nn.Module, blocks: Sequence[str], attention: Sequence[str], mixes: bool, failure: str = ""
) -> str:
    """Why the sequences of `model` cannot be split over ranks; empty where they can.

    Args:
        model: as the user gave it.
        blocks: names of the repeated blocks.
        attention: names of the modules that called the AttentionInterface, a name for each call.
        mixes: whether the forward mixes positions in another way.
        failure: why the forward could not be looked at, where it could not.
    """
    if not isinstance(model, PreTrainedModel):
        return "a module of model.factory says nothing about where it looks at other positions"
    family = str(model.config.model_type)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{family} takes no position_ids, and counts positions from its own inputs"
    kinds = _rotary_kinds(model.config.get_text_config())
    if kinds & set(BY_LENGTH):
        return f"the rotary embedding of this {family} ({', '.join(sorted(kinds))}) depends on the longest position"
    if failure:
        return failure
    inside = [sum(name.startswith(f"{block}.") for name in attention) for block in blocks]
    if len(attention) != len(blocks) or set(inside) != {1}:
        return f"the attention of {family} does not go through transformers' AttentionInterface once in each block"
    if mixes:
        return f"{family} mixes positions outside of attention, by a convolution or a scan"
    return ""


def _rotary_kinds(config: Any) -> set[str]:
    """`rope_type` of the config, or of each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return {str(each["rope_type"]) for each in (settings, *nested) if "rope_type" in each}
