"""Finds how the blocks of a model can run on some rows of every sequence, while all else sees sequences whole.

It is the way of models that cannot be told positions, or look at others beside transformers' AttentionInterface. The
model gets whole sequences and makes positions, masks and biases of them itself. The first block takes a rank's rows of
the hidden states; blocks, and what follows them, then work on these. A module of a block that looks at other rows is
given all of them, and its output is cut again. Attention that goes through the interface needs the other rows' keys
and values alone. An encoder's output is gathered whole for the decoder.

Which modules look at other rows shows a forward on fake tensors in which parts have a length of their own: an operator
that is not known to keep rows apart (`row_operators`), or a failure, makes its module one that gets all rows. A mixer
that can go on from the state behind other rows needs that alone (`carried_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from shardwise._torch_compat.tracing import tree_flatten, tree_unflatten
from shardwise.model.carried_state import carried_state
from shardwise.model.config_cache import once_a_config
from shardwise.model.experts import NUMBER, expert_stacks
from shardwise.model.facts import (
    DECODER,
    ENCODER,
    CarriedState,
    GatheredModule,
    SplitAttention,
    SplitBlock,
    SplitForward,
)
from shardwise.model.probe import ROWS, copy_to_probe, run_on_fakes, try_devices
from shardwise.model.routers import find_routers
from shardwise.model.row_operators import MixedRowsError, RowsApart

PRIMES = (7, 11, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)  # but ROWS
SHIFT = 3
FEW_SEQUENCES = 2  # of a trial; some models loop over all of their tokens
TRIALS = 2  # of other lengths, which have to show the same
Lengths = tuple[tuple[int, int], tuple[int, int]]
WINDOW = "local_window"


@once_a_config
def find_split_forward(
    model: PreTrainedModel, lists: Sequence[Sequence[str]], longest: int | None
) -> tuple[SplitForward | None, str]:
    """Return how the blocks of `model` can run on some rows, or None and why they cannot.

    Args:
        lists: names of its blocks.
        longest: sequence that it takes.
    """
    trials: list[_Trial] = []

    def run(lengths: Lengths, device: str, dtype: torch.dtype) -> SplitForward:
        trials.append(_Trial(copy_to_probe(model).train(), lists, lengths))
        return trials[-1].run(device, dtype)

    shown: list[tuple[SplitForward, Any]] = []
    for lengths in _lengths(model, longest):
        forward, failure = try_devices(partial(run, lengths))
        if forward is None:
            mixed = trials[0].mixed
            return None, f"it mixes positions outside of its blocks ({mixed})" if mixed else failure
        shown.append((forward, trials[-1].apart.numbers))
    if len(shown) < TRIALS:
        return None, "it takes no sequences of lengths that are not among its sizes"
    if shown[0] != shown[1]:
        return None, "numbers that depend on the length of a sequence go into its blocks' arithmetic"
    routers = [router for router, _ in find_routers(model).values()]
    split = shown[0][0]
    for module in split.gathered:
        if any(f"{name}.".startswith(f"{module.name}.") for name in routers):
            return None, f"{module.name} holds a router, and looks at other positions"
    return split, ""


def _lengths(model: nn.Module, longest: int | None) -> list[Lengths]:
    """Return (whole, part) lengths of an encoder's and of a decoder's sequences for each trial, none as in another.

    No other size contains them.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape if size}
    free = [prime for prime in PRIMES if not any(size % prime == 0 for size in sizes)]
    free = [prime for prime in free if longest is None or prime <= longest]
    lengths: list[Lengths] = []
    for parts in combinations(free, 2):
        # Nor do parts divide what a padding or a shift of whole sequences makes of them.
        whole = [length for length in free if length > max(parts) and not _is_near(length, parts)]
        if len(whole) > 1 and not any(part in parts for sides in lengths for _, part in sides):
            lengths.append(((whole[1], parts[1]), (whole[0], parts[0])))
    return lengths[:TRIALS]


def _sequences(model: nn.Module, part: int) -> int:
    """Return how many sequences a trial has: few, but for experts of which some would be given no token."""
    numbers = (getattr(module, NUMBER, 0) for module in model.modules())
    most = max((number for number in numbers if isinstance(number, int)), default=0)
    return FEW_SEQUENCES if most <= FEW_SEQUENCES * part else ROWS  # none of them is a length


def _is_near(length: int, parts: Sequence[int]) -> bool:
    return any((length + shift) % part == 0 for shift in range(-SHIFT, SHIFT + 1) for part in parts)


@dataclass
class _Trial:
    """One forward in which blocks have parts; `model` is used up.

    Attributes:
        mixed: the operator that mixed rows where no module could be given all, if one did.
    """

    model: Any
    lists: Sequence[Sequence[str]]
    lengths: Sequence[tuple[int, int]]
    blocks: dict[str, SplitBlock] = field(default_factory=dict)
    gathered: dict[str, GatheredModule] = field(default_factory=dict)
    attention: dict[str, SplitAttention] = field(default_factory=dict)
    encoded: tuple[int, ...] = ()
    encoder: str = ""
    mixed: str = ""

    def run(self, device: str, dtype: torch.dtype) -> SplitForward:
        """Run the forward and return what was found."""
        self.apart = RowsApart([part for _, part in self.lengths])
        self.sequences = _sequences(self.model, self.lengths[DECODER][1])
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self._wrap()
        try:
            with self._attention():
                run_on_fakes(self.model, self._inputs(), device, dtype, watching=self.apart)
        except MixedRowsError as error:
            self.mixed = str(error)
            raise
        if not self.blocks:
            raise RuntimeError("none of its blocks ran")
        return SplitForward(self.blocks, tuple(self.gathered.values()), self.attention, self.encoder, self.encoded)

    def _inputs(self) -> dict[str, Tensor]:
        def tokens(side: int) -> Tensor:
            return torch.empty(self.sequences, self.lengths[side][0], dtype=torch.long, device="meta")

        if not getattr(self.model.config, "is_encoder_decoder", False):
            return {"input_ids": tokens(DECODER)}
        return {"input_ids": tokens(ENCODER), "decoder_input_ids": tokens(DECODER)}

    def _wrap(self) -> None:
        """Put the exchange around the modules of blocks, around blocks and around an encoder."""
        trusted = set(expert_stacks(self.model))
        if getattr(self.model.config, "is_encoder_decoder", False):
            self.encoder = self.names[id(self.model.get_encoder())]
        for block in (block for names in self.lists for block in names):
            side = ENCODER if self.encoder and block.startswith(f"{self.encoder}.") else DECODER
            for name, module in self.model.get_submodule(block).named_modules(prefix=block):
                module.forward = partial(self._module, name, side, module.forward, name in trusted)
            entered = self.model.get_submodule(block)
            entered.forward = partial(self._block, block, side, entered.forward)
        if self.encoder:
            encoder = self.model.get_submodule(self.encoder)
            encoder.forward = partial(self._encode, encoder.forward)

    def _block(self, name: str, side: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        whole, part = self.lengths[side]
        leaves, tree = tree_flatten((args, kwargs))
        cut = [_resized(leaf, part) if _has_rows(leaf, whole) else leaf for leaf in leaves]
        numbers = {number for number, leaf in enumerate(cut) if _has_rows(leaf, part)}
        if not numbers:
            raise RuntimeError(f"{name} is given no hidden states of all positions")
        known = self.blocks.get(name, SplitBlock(side, ()))
        self.blocks[name] = SplitBlock(side, tuple(sorted(numbers.union(known.arguments))))
        args, kwargs = tree_unflatten(cut, tree)
        return forward(*args, **kwargs)

    def _module(
        self, name: str, side: int, forward: Callable[..., Any], is_trusted: bool, *args: Any, **kwargs: Any
    ) -> Any:
        part = self.lengths[side][1]
        leaves, tree = tree_flatten((args, kwargs))
        numbers = tuple(number for number, leaf in enumerate(leaves) if _has_rows(leaf, part))
        known = self.gathered.get(name)
        try:
            if not (known and numbers):
                with self._trust(is_trusted):
                    return forward(*args, **kwargs)
        except Exception:  # any code may run in a model's forward
            if not numbers:
                raise
            return self._gather(GatheredModule(name, side, numbers), forward, leaves, tree)
        return self._gather(GatheredModule(name, side, numbers), forward, leaves, tree)

    def _gather(self, module: GatheredModule, forward: Callable[..., Any], leaves: list[Any], tree: Any) -> Any:
        """Run a module on whole sequences, and cut what it returns."""
        whole, part = self.lengths[module.side]
        wide = [_resized(leaf, whole) if number in module.arguments else leaf for number, leaf in enumerate(leaves)]
        if any(isinstance(leaf, Tensor) and self.apart.rows_of(leaf.shape) for leaf in wide):
            raise RuntimeError(f"{module.name} is given parts in another form")
        args, kwargs = tree_unflatten(wide, tree)
        with self._trust(True):
            results, form = tree_flatten(forward(*args, **kwargs))
        numbers = tuple(number for number, leaf in enumerate(results) if _has_rows(leaf, whole))
        if not numbers:
            raise RuntimeError(f"{module.name} looks at other positions and returns no hidden states")
        carries = self._carried(forward, leaves, tree) if numbers == module.arguments == (0,) else None
        described = GatheredModule(module.name, module.side, module.arguments, numbers, carries)
        if self.gathered.setdefault(module.name, described) != described:
            raise RuntimeError(f"{module.name} is called in several ways")
        inside = f"{module.name}."
        for name in [name for name in (*self.gathered, *self.attention) if name.startswith(inside)]:
            self.gathered.pop(name, None)
            self.attention.pop(name, None)
        self.attention.pop(module.name, None)
        return tree_unflatten([_resized(x, part) if n in numbers else x for n, x in enumerate(results)], form)

    def _carried(self, forward: Callable[..., Any], leaves: list[Any], tree: Any) -> CarriedState | None:
        """Return what a module hands on that is given some rows after the others."""
        args, kwargs = tree_unflatten(leaves, tree)
        with self._trust(True):
            return carried_state(forward, args, kwargs)

    def _encode(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        whole, part = self.lengths[ENCODER]
        leaves, tree = tree_flatten(forward(*args, **kwargs))
        self.encoded = tuple(number for number, leaf in enumerate(leaves) if _has_rows(leaf, part))
        return tree_unflatten([_resized(x, whole) if n in self.encoded else x for n, x in enumerate(leaves)], tree)

    @contextmanager
    def _trust(self, is_trusted: bool) -> Iterator[None]:
        before = self.apart.trusted
        self.apart.trusted += is_trusted
        try:
            yield
        finally:
            self.apart.trusted = before

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Exchange keys and values in calls of the AttentionInterface."""
        original = AttentionInterface.get_interface

        def get_interface(own: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return partial(self._attend, original(own, name, default))

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]

    def _attend(
        self, function: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        lengths = next(((whole, part) for whole, part in self.lengths if query.shape[2] == part), None)
        if lengths is None:
            return function(module, query, key, value, attention_mask, **kwargs)
        whole, part = lengths
        rows = tuple(
            name for name, argument in kwargs.items()
            if isinstance(argument, Tensor) and argument.dim() > 2 and argument.shape[-2] == whole
        )  # fmt: skip
        described = SplitAttention(key.shape[2] == part, rows)
        if self.attention.setdefault(self.names[id(module)], described) != described or kwargs.get(WINDOW):
            raise MixedRowsError("attention in several forms")
        if described.local_keys:
            key, value = (_resized(tensor, whole, 2) for tensor in (key, value))
        kwargs |= {name: _resized(kwargs[name], part, -2) for name in rows}
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[2] == whole:
            attention_mask = _resized(attention_mask, part, 2)
        if any(map(self._has_other_rows, (key, value, *kwargs.values()))):
            raise MixedRowsError("attention of parts in another form")
        with self._trust(True):
            return function(module, query, key, value, attention_mask, **kwargs)

    def _has_other_rows(self, argument: Any) -> bool:
        """Tell whether an argument of attention has rows of a part in another dim than that of queries."""
        if not isinstance(argument, Tensor):
            return False
        return bool(set(self.apart.rows_of(argument.shape)) - {argument.dim() - 2})


def _has_rows(leaf: Any, length: int) -> bool:
    """Tell whether a leaf is hidden states, or numbers like them, of so many positions: [1 or B, length, .]."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() == 3 and leaf.shape[1] == length


def _resized(tensor: Tensor, length: int, dim: int = 1) -> Tensor:
    """Return a tensor that is like another but for the size of one dim."""
    shape = list(tensor.shape)
    shape[dim] = length
    return tensor.new_empty(shape)
