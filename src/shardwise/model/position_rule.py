"""Finds the rule by which a model counts positions, for ranks that hold some rows of a sequence and have to be told.

A forward runs through its first block with weights on the meta device and token ids that are real, so that whatever
follows from the ids alone has values: once with whole sequences, whose positions the model counts itself, and once with
a part of them and positions by a rule. The rule is right, and nothing else looks at whole sequences, if all such values
that meet an activation or a weight are those of the same rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise._torch_compat.tracing import TorchDispatchMode, tree_leaves, tree_map
from shardwise._torch_compat.writes import written_tensors
from shardwise.model.config_cache import once_a_config
from shardwise.model.experts import BATCHED, set_expert_implementation
from shardwise.model.initializers import run_initializer

LENGTH = 8
# Places of special ids among the example's: other shares of the part than of the whole.
SPECIAL = {"pad_token_id": ((0, 1), (1, 4)), "mask_token_id": ((0, 3), (0, 6), (0, 7), (1, 0))}
ROWS = slice(2, 6)  # of the part: neither its first position nor its share of padding is that of the whole


@dataclass(frozen=True)
class PositionRule:
    """The positions of a model's tokens.

    Attributes:
        padding: id behind which they count, and which they have where a token is that id; None where they count from 0.
    """

    padding: int | None = None

    def positions(self, ids: Tensor) -> Tensor:
        """Return [B, S] positions of whole sequences of ids [B, S]."""
        if self.padding is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        counted = ids.ne(self.padding).long()
        return counted.cumsum(1) * counted + self.padding


FROM_ZERO = PositionRule()


@once_a_config
def find_position_rule(model: PreTrainedModel, first_block: str) -> PositionRule | None:
    """Return the rule by which `model` (on the meta device) counts; None where it has another, or cannot be run so.

    Args:
        first_block: name of the block behind which the rest of a forward is left out.
    """
    ids = _example_ids(model)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    rules = [FROM_ZERO, *([PositionRule(padding)] if isinstance(padding, int) and padding >= 0 else [])]
    try:
        watched = _watched(model, first_block)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        whole = _values_met(watched, inputs)
        for rule in rules:
            part = {name: value[:, ROWS] for name, value in (inputs | {"position_ids": rule.positions(ids)}).items()}
            if _are_rows_of(_values_met(watched, part), whole):
                return rule
    except Exception:  # any code may run in a model's forward, and some reads values that are not there
        return None
    return None


def _example_ids(model: PreTrainedModel) -> Tensor:
    """Return [2, S] ids, among them such as models treat in a way of their own."""
    config = model.config.get_text_config()
    size = int(getattr(config, "vocab_size", 0) or LENGTH)
    ids = (torch.arange(2 * LENGTH).view(2, LENGTH) + size // 2) % size
    for name, places in SPECIAL.items():
        token = getattr(config, name, None)
        if isinstance(token, int) and 0 <= token < size:
            for place in places:
                ids[place] = token
    return ids


class _BlockDoneError(BaseException):
    """Leaves a forward behind its first block; no Exception, which a model may catch."""


def _watched(model: PreTrainedModel, first_block: str) -> PreTrainedModel:
    """Return a copy on the meta device that ends its forward behind a block; its tables of integers have values."""
    copied = copy.deepcopy(model, _without_values(model))
    for name, module in copied.named_modules():
        _fill_integers(copied, name, module)
    set_expert_implementation(copied, BATCHED)
    copied.get_submodule(first_block).register_forward_hook(_leave)
    return copied


def _values_met(watched: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the values that meet tensors of the meta device in a forward of `inputs`."""
    values = _RealValues()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), values:
            watched(**inputs)
    except _BlockDoneError:
        pass
    return values.met


def _without_values(model: nn.Module) -> dict[int, Tensor]:
    """Return tensors of the meta device by the id of what they are in a copy; buffers of integers stay as they are."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        is_counted = not buffer.is_floating_point() and not buffer.is_complex()
        copies[id(buffer)] = buffer if is_counted else torch.empty_like(buffer, device="meta")
    return copies


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    raise _BlockDoneError


def _fill_integers(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Give buffers of integers, such as tables of positions, the values of their initializer."""
    blanks = {
        leaf: torch.zeros_like(buffer, device="cpu")
        for leaf, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and not buffer.is_floating_point() and not buffer.is_complex()
    }
    for leaf, blank in blanks.items():
        setattr(module, leaf, blank)
    if blanks:
        with torch.no_grad():
            run_initializer(model, name)


@dataclass
class _RealValues(TorchDispatchMode):
    """Computes what follows from real tensors for real, on the CPU, and all else on the meta device.

    Attributes:
        met: the real tensors that an operator was given together with some of the meta device, in order.
    """

    met: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        real = [tensor for tensor in tensors if tensor.device.type != "meta"]
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu" if len(real) == len(tensors) else "meta")
        if not real or len(real) == len(tensors):
            return func(*args, **kwargs)
        if any(tensor.device.type != "meta" for tensor in written_tensors(func, args, kwargs)):
            raise RuntimeError(f"{func} writes what is not known into a tensor of values")
        self.met += [tensor.clone() for tensor in real if tensor.dim()]
        to_meta: Callable[[Any], Any] = lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf  # noqa: E731
        return func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))


def _are_rows_of(part: Sequence[Tensor], whole: Sequence[Tensor]) -> bool:
    """Tell whether values of a part are those of its rows in the whole, in order."""
    return len(part) == len(whole) and all(map(_is_rows_of, part, whole))


def _is_rows_of(part: Tensor, whole: Tensor) -> bool:
    if part.dim() != whole.dim():
        return False
    length = ROWS.stop - ROWS.start
    for dim, sizes in enumerate(zip(part.shape, whole.shape, strict=True)):
        if sizes == (length, LENGTH):
            whole = whole.narrow(dim, ROWS.start, length)
    try:
        return torch.equal(*torch.broadcast_tensors(part, whole))
    except RuntimeError:  # of other shapes
        return False
