"""Whether a model's attention can be led elsewhere: what its forward asks of transformers' AttentionInterface.

To the kernels of this project it is led for the families in `LED`, whose every call the tests compare with eager.

Context parallelism splits sequences over ranks. Between embedding and loss a rank then knows its own positions only, so
that every look at another position has to go through attention that can be exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from shardwise.model.facts import AttentionFacts


class Family(NamedTuple):
    """What a family asks of kernels: kind of bias (`Needs.bias`), soft cap, window; and a note."""

    bias: str = ""
    softcap: bool = False
    window: bool = False
    note: str = ""


OWN = "own products in transformers"
# Families whose masks and attention are led to our kernels, with what some model of theirs asks for.
LED = {
    "gpt2": Family(),
    "gptj": Family(note=f"{OWN} up to 5.23"),
    "gpt_neo": Family(window=True, note=f"{OWN}; every other layer is local"),
    "gpt_neox": Family(),
    "bert": Family(),
    "roberta": Family(),
    "bloom": Family("keys", note=f"{OWN}; ALiBi"),
    "opt": Family(),
    "t5": Family("trained", note="memory grows with the square; of a config or directory, by `task: seq2seq_lm`"),
    "llama": Family(),
    "mistral": Family(window=True),
    "mixtral": Family(window=True),
    "qwen3": Family(),
    "gemma": Family(),
    "gemma2": Family(softcap=True, window=True),
    "gemma3_text": Family(window=True),
    "falcon": Family("keys", note="own calls of SDPA in transformers; ALiBi, or rotary positions without a bias"),
}
WIDENING = ("gptj", "gpt_neo")  # whose eager attention takes queries and keys to fp32 before it multiplies them
ALIBI = "build_alibi_tensor"  # Bloom's method that makes biases of keys: it can be asked for those of all ranks
# Arguments of a call that kernels know.
LEADABLE = {"softcap", "position_bias", "key_bias"}
# Keyword arguments that say nothing about the result, or nothing that masks, scale and dropout do not say.
KNOWN = {
    "attention_mask", "scaling", "dropout", "is_causal", "sliding_window", "position_ids", "use_cache",
    "past_key_values", "cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "cache_position", "dropout_name", "local_window",
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
        self.calls: list[AttentionFacts] = []  # without names

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note every call of a function that the AttentionInterface hands out."""
        original = AttentionInterface.get_interface

        def get_interface(own: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(own, name, default)

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.modules.append(module)
                self.arguments |= {key for key, value in kwargs.items() if value is not None} - KNOWN
                self.calls.append(_seen(args, kwargs))
                return function(module, *args, **kwargs)

            return call

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]


def _seen(args: Sequence[Any], kwargs: dict[str, Any]) -> AttentionFacts:
    """What one call asks for; `args` are query, key, value and perhaps the mask."""
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


def kernel_refusal(model: nn.Module, calls: int, arguments: Sequence[str], failure: str = "") -> str:
    """Why the attention of `model` stays what transformers makes of it; empty where it is led to our kernels.

    Args:
        model: as it was built.
        calls: of the AttentionInterface in one forward.
        arguments: of those calls, beside the usual.
        failure: why the forward could not be looked at, where it could not.
    """
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", type(model).__name__))
    if family not in LED:
        return f"{family} is not among the families whose attention is led to kernels"
    if failure or not calls:
        return failure or f"this {family} does not call transformers' AttentionInterface"
    if unknown := sorted(set(arguments) - LEADABLE):
        return f"its attention also takes {', '.join(unknown)}"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn asks for arithmetic of its own"
    return ""


def context_refusal(
    model: nn.Module,
    blocks: Sequence[str],
    attention: Sequence[str],
    mixes: bool,
    failure: str = "",
    arguments: Sequence[str] = (),
) -> str:
    """Why the sequences of `model` cannot be split over ranks; empty where they can.

    Args:
        model: as the user gave it.
        blocks: names of the repeated blocks.
        attention: names of the modules that called the AttentionInterface, a name for each call.
        mixes: whether the forward mixes positions in another way.
        failure: why the forward could not be looked at, where it could not.
        arguments: of the calls, beside the usual.
    """
    if not isinstance(model, PreTrainedModel):
        return "a module of model.factory says nothing about where it looks at other positions"
    family = str(model.config.model_type)
    by_biases = any(hasattr(module, ALIBI) for module in model.modules())
    if "position_ids" not in inspect.signature(model.forward).parameters and not by_biases:
        return f"{family} takes no position_ids, and counts positions from its own inputs"
    kinds = _rotary_kinds(model.config.get_text_config())
    if kinds & set(BY_LENGTH):
        return f"the rotary embedding of this {family} ({', '.join(sorted(kinds))}) depends on the longest position"
    if failure:
        return failure
    inside = [sum(name.startswith(f"{block}.") for name in attention) for block in blocks]
    if len(attention) != len(blocks) or set(inside) != {1}:
        return f"the attention of {family} does not go through transformers' AttentionInterface once in each block"
    if "key_bias" in arguments and not by_biases:
        return f"{family} makes its ALiBi biases from its own inputs"
    if mixes:
        return f"{family} mixes positions outside of attention, by a convolution or a scan"
    return ""


def _rotary_kinds(config: Any) -> set[str]:
    """`rope_type` of the config, or of each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return {str(each["rope_type"]) for each in (settings, *nested) if "rope_type" in each}
