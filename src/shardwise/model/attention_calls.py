"""Records the calls of attention in a forward: what a model asks of transformers' AttentionInterface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from shardwise.model.facts import AttentionFacts

MASK = "attention_mask"
TENSORS = ("query", "key", "value", MASK)  # arguments that most models give by position
# Keyword arguments that do not change the result, or not beyond what masks, scale and dropout do.
COMMON_ARGUMENTS = {
    *TENSORS, "scaling", "dropout", "is_causal", "sliding_window", "position_ids", "use_cache",
    "past_key_values", "cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "cache_position", "dropout_name", "local_window",
}  # fmt: skip


class AttentionCalls:
    """The calls that a forward makes inside of `recorded`.

    Attributes:
        modules: that called, one for each call.
        arguments: names of the keyword arguments beside the common ones; the mask where it is made of activations.
        calls: what each call asks for, without names.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.arguments: set[str] = set()
        self.calls: list[AttentionFacts] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record every call of a function that the AttentionInterface hands out."""
        original = AttentionInterface.get_interface

        def get_interface(own: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(own, name, default)

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.modules.append(module)
                named = dict(zip(TENSORS, args, strict=False)) | kwargs
                self.arguments |= {key for key, value in named.items() if value is not None} - COMMON_ARGUMENTS
                mask = named.get(MASK)
                if isinstance(mask, Tensor) and mask.requires_grad:
                    self.arguments.add(MASK)
                self.calls.append(_call_facts(module, named))
                return function(module, *args, **kwargs)

            return call

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]


def _call_facts(module: nn.Module, named: dict[str, Any]) -> AttentionFacts:
    """Return what one call by `module` asks for, whose arguments are all named."""
    window = named.get("local_window") or named.get("sliding_window")
    bias = "scores" if named.get("position_bias") is not None else ""
    if bias and named["position_bias"].requires_grad:
        bias = "trained"
    return AttentionFacts(
        name="",
        head_size=named["query"].shape[-1],
        value_size=named["value"].shape[-1],
        window=window if isinstance(window, int) else None,
        chunk=_chunk(module),
        bias="keys" if named.get("key_bias") is not None else bias,
        softcap=named.get("softcap") is not None,
        dropout=float(named.get("dropout") or 0.0) > 0,
    )


def _chunk(module: nn.Module) -> int | None:
    """Return the length of the parts of a sequence that see only themselves, which masks alone say (Llama 4)."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    is_chunked = isinstance(layer, int) and layer < len(kinds) and kinds[layer] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if is_chunked else None
