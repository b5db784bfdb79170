"""Records the calls of attention in a forward: what a model asks of transformers' AttentionInterface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from shardwise.model.facts import AttentionFacts

MASK = "attention_mask"
# Keyword arguments that do not change the result, or not beyond what masks, scale and dropout do.
COMMON_ARGUMENTS = {
    MASK, "scaling", "dropout", "is_causal", "sliding_window", "position_ids", "use_cache",
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
                self.arguments |= {key for key, value in kwargs.items() if value is not None} - COMMON_ARGUMENTS
                mask = args[3] if len(args) > 3 else kwargs.get(MASK)
                if isinstance(mask, Tensor) and mask.requires_grad:
                    self.arguments.add(MASK)
                self.calls.append(_call_facts(args, kwargs))
                return function(module, *args, **kwargs)

            return call

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]


def _call_facts(args: Sequence[Any], kwargs: dict[str, Any]) -> AttentionFacts:
    """Return what one call asks for; `args` are query, key, value and perhaps the mask."""
    window = kwargs.get("local_window") or kwargs.get("sliding_window")
    bias = "scores" if kwargs.get("position_bias") is not None else ""
    if bias and kwargs["position_bias"].requires_grad:
        bias = "trained"
    return AttentionFacts(
        name="",
        head_size=args[0].shape[-1],
        value_size=args[2].shape[-1],
        window=window if isinstance(window, int) else None,
        bias="keys" if kwargs.get("key_bias") is not None else bias,
        softcap=kwargs.get("softcap") is not None,
        dropout=float(kwargs.get("dropout") or 0.0) > 0,
    )
