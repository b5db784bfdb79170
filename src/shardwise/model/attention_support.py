"""Answers whether this project's kernels can compute a model's attention, and whether its sequences can be split.

Kernels are used for families that say so in their record, whose every call the tests compare with eager attention.

Context parallelism splits sequences over ranks. Between embedding and loss a rank then knows its own positions only, so
that every look at another position has to go through attention that can be exchanged.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils

from shardwise.job.capability import Capability, unless
from shardwise.model.attention_calls import MASK
from shardwise.model.registry import family_of

# Arguments of a call of attention that kernels know.
KERNEL_ARGUMENTS = {"softcap", "position_bias", "key_bias"}
# Rotary embeddings whose angles depend on the longest position of the call, which ranks see differently.
ANGLES_BY_LENGTH = ("dynamic", "longrope")


def kernel_capability(model: nn.Module, calls: int, arguments: Sequence[str], failure: str = "") -> Capability:
    """Answer whether kernels compute the attention of `model`; else it stays what transformers makes of it.

    Args:
        model: as it was built.
        calls: of the AttentionInterface in one forward.
        arguments: of those calls, beside the common ones.
        failure: why the forward could not be probed, where it could not.
    """
    return unless(next(_kernel_obstacles(model, calls, arguments, failure), ""))


def _kernel_obstacles(model: nn.Module, calls: int, arguments: Sequence[str], failure: str) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", type(model).__name__))
    if family_of(family).attention is None:
        yield f"{family} is not among the families whose attention kernels compute"
    if failure or not calls:
        yield failure or f"this {family} does not call transformers' AttentionInterface"
    if unknown := sorted(set(arguments) - KERNEL_ARGUMENTS):
        yield f"its attention also takes {', '.join(unknown)}"
    if getattr(config, "reorder_and_upcast_attn", False):
        yield "reorder_and_upcast_attn asks for arithmetic of its own"


def context_capability(
    model: nn.Module,
    blocks: Sequence[str],
    attention: Sequence[str],
    mixes: bool,
    failure: str = "",
    arguments: Sequence[str] = (),
) -> Capability:
    """Answer whether the sequences of `model` can be split over ranks.

    Args:
        model: as the user gave it.
        blocks: names of the repeated blocks.
        attention: names of the modules that called the AttentionInterface, a name for each call.
        mixes: whether the forward mixes positions in another way.
        failure: why the forward could not be probed, where it could not.
        arguments: of the calls, beside the common ones.
    """
    return unless(next(_context_obstacles(model, blocks, attention, mixes, failure, arguments), ""))


def _context_obstacles(
    model: nn.Module,
    blocks: Sequence[str],
    attention: Sequence[str],
    mixes: bool,
    failure: str,
    arguments: Sequence[str],
) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel):
        yield "a module of model.factory says nothing about where it looks at other positions"
        return
    family = str(model.config.model_type)
    if model.config.is_encoder_decoder:
        yield f"{family} reads two sequences, of which blocks see several rows each"
    counts_by_biases = _makes_key_biases(model, family)
    if not takes_positions(model) and not counts_by_biases:
        yield f"{family} takes no position_ids, and counts positions from its own inputs"
    rope_types = _rope_types(model.config.get_text_config())
    if rope_types & set(ANGLES_BY_LENGTH):
        yield f"the rotary embedding of this {family} ({', '.join(sorted(rope_types))}) depends on the longest position"
    if failure:
        yield failure
    calls_of_blocks = [sum(name.startswith(f"{block}.") for name in attention) for block in blocks]
    if len(attention) != len(blocks) or set(calls_of_blocks) != {1}:
        yield f"the attention of {family} does not go through transformers' AttentionInterface once in each block"
    if MASK in arguments:
        yield f"{family} masks attention by numbers that it computes of whole sequences"
    if not _has_masks_of_transformers(model):
        yield f"{family} makes its masks from its own inputs"
    if _masks_pictures(model):
        yield f"{family} masks attention by which tokens are of one picture, over whole sequences"
    if "key_bias" in arguments and not counts_by_biases:
        yield f"{family} makes its ALiBi biases from its own inputs"
    if getattr(model.config.get_text_config(), "index_topk", None):
        yield f"{family} chooses the keys that a token looks at over whole sequences (config.index_topk)"
    if mixes:
        yield f"{family} mixes positions outside of attention, by a convolution or a scan"


def _masks_pictures(model: nn.Module) -> bool:
    """Tell whether tokens of a picture see each other: a model of text alone has no pictures."""
    config: Any = model.config
    text = config.get_text_config()
    return text is not config and getattr(text, "use_bidirectional_attention", None) == "vision"


def _has_masks_of_transformers(model: nn.Module) -> bool:
    """Tell whether the code of `model` makes its masks by transformers' functions, which give whole ones."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    values = (value for file in files for value in vars(file).values())
    return any(getattr(value, "__module__", "") == masking_utils.__name__ for value in values)


def takes_positions(model: nn.Module) -> bool:
    """Tell whether the forward of `model` can be told the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _makes_key_biases(model: nn.Module, family: str) -> bool:
    """Tell whether a module has the method that can be asked for the biases of the keys of all ranks."""
    attention = family_of(family).attention
    method = attention.key_bias_method if attention is not None else ""
    return bool(method) and any(hasattr(module, method) for module in model.modules())


def _rope_types(config: Any) -> set[str]:
    """Return `rope_type` of the config, or of each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return {str(values["rope_type"]) for values in (settings, *nested) if "rope_type" in values}
