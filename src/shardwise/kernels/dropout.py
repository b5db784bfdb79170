"""Dropout whose mask is a pure function of (seed, step, module, global sample, element): equal on every layout.

A step publishes its seed, its number and the global sample counters of the microbatch's rows in a `DropoutScope`;
modules and patched functional calls derive their keep mask from it with an integer hash, so no generator state exists
that could differ between ranks or between a forward and its recomputation.

What a user's module draws by itself comes from generators. These are seeded anew for each microbatch and each module,
so that a microbatch of the same rows draws the same numbers on every layout.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch_compat.autograd import checkpointed_functions
from shardwise.model.construct import drawing_from

_MASK32 = 0xFFFFFFFF
# Multipliers of the 32-bit finalizer "lowbias32" (Chris Wellons, "Prospecting for Hash Functions", 2018).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B1 - (1 << 32)  # 2**32 / golden ratio, as a signed 32-bit integer


@dataclass(frozen=True)
class ProbabilityBlock:
    """Attention probabilities that a rank holds: heads from number `first`, of these queries and keys.

    `queries` [Q] and `keys` [K] are positions in sequences of `length`; keys of an encoder's, in those of `key_length`.
    """

    first: int
    queries: Tensor
    keys: Tensor
    length: int
    key_length: int | None = None

    def index(self, heads: int) -> Tensor:
        """Return [heads * Q * K] indices of the elements in [all heads, length, key length]."""
        number = self.first + torch.arange(heads, device=self.keys.device)
        key_length = self.length if self.key_length is None else self.key_length
        return _flat(_flat(number, self.queries, self.length), self.keys, key_length)


def _flat(outer: Tensor, inner: Tensor, size: int) -> Tensor:
    """[len(outer) * len(inner)] indices of (outer, inner) where inner counts to `size`."""
    return (outer.unsqueeze(1) * size + inner).flatten()


class SplitSequences(Protocol):
    """The part of a rank's sequences that dropout reads."""

    @property
    def positions(self) -> Tensor:
        """[S/c] of the rows that are here."""
        ...

    @property
    def length(self) -> int:
        """S without padding; positions from there on are padding."""
        ...


@dataclass
class DropoutScope:
    """Everything that a microbatch's masks depend on.

    `calls` counts the uses of each name, `block` prefixes functional calls.

    `part` is this rank's number in its tensor group: of attention probabilities it holds that part of the heads.
    `sequences` says which rows [B, S/c, ...] of split sequences are here, `probability_block` which attention runs on
    them now. `sides` are those that blocks are given while all ahead of them sees sequences whole: of an encoder, or
    None, and of a decoder.
    `positions` (first, end) is set while hidden states hold only these of the rows that are here.
    `documents` [B, S] numbers each position's document where attention must not cross them; masks of attention read it.
    `counted` [B] is False for rows that repeat others, and `is_token` [B, S/c] for what fills up the rows that are
    here, where some is; routers of experts read both.
    `first_row` is the first of `rows`, where generators are seeded for what modules draw by themselves.
    `numbers_positions` is set where the model numbers the positions of a row from first to last.
    """

    seed: int
    step: int
    rows: Tensor  # [B] int64: global sample counters
    calls: Counter[str] = field(default_factory=Counter)
    block: str = ""
    functional: bool = False  # torch.nn.functional.dropout too
    part: int = 0
    sequences: SplitSequences | None = None
    sides: Sequence[SplitSequences | None] = ()
    probability_block: ProbabilityBlock | None = None
    positions: tuple[int, int] | None = None
    documents: Tensor | None = None
    counted: Tensor | None = None
    is_token: Tensor | None = None
    first_row: int | None = None
    numbers_positions: bool = False

    def snapshot(self) -> DropoutScope:
        """Return a copy to recompute under: same masks again, whatever ran in between."""
        return replace(self, calls=Counter(self.calls))

    def key(self, name: str) -> int:
        """Return 64 bits that identify the next use of `name` in this step."""
        self.calls[name] += 1
        text = f"{self.seed}/{self.step}/{name}/{self.calls[name]}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def seeded(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which generators draw what belongs to the next run of the module `name`."""
        return nullcontext() if self.first_row is None else drawing_from(self.key(f"{name}/draws/{self.first_row}"))


# Process-wide rather than a context variable: autograd recomputes checkpoints on threads of its own.
_active: DropoutScope | None = None


def active_scope() -> DropoutScope | None:
    """Return the scope of the microbatch that runs now."""
    return _active


@contextmanager
def dropout_scope(scope: DropoutScope | None) -> Iterator[None]:
    """Run with `scope` active; scopes nest. What checkpoints of the user's recompute is run with it again."""
    global _active
    outer, _active = _active, scope
    try:
        with (
            FunctionalDropout() if scope and scope.functional else nullcontext(),
            checkpointed_functions(_found_again) if scope else nullcontext(),
        ):
            yield
    finally:
        _active = outer


def _found_again(function: Callable[..., Any], before: int) -> Callable[..., Any]:
    """Return a function that finds the scope of now in all runs but those `before`, after the scope's end too."""
    scope = _active.snapshot() if _active else None
    runs = count()

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(runs) < before or scope is None:
            return function(*args, **kwargs)
        with dropout_scope(scope.snapshot()):
            return function(*args, **kwargs)

    return run


def keep_mask(key: int, rows: Tensor, elements: int | Tensor, keep: float) -> Tensor:
    """Return [len(rows), elements] bool, True with probability `keep`.

    It is a function of (key, row value, element index) alone.

    Args:
        key: 64 bits of seed, step and module.
        rows: [B] int64 global sample counters.
        elements: of one row: how many, or their indices [E] int64; below 2**31.
        keep: probability in (0, 1].
    """
    bits = _hashed(key, rows, elements)
    threshold = round(keep * 2**32) - 2**31
    return bits < min(threshold, 2**31 - 1) if keep < 1 else torch.ones_like(bits, dtype=torch.bool)


def _hashed(key: int, rows: Tensor, elements: int | Tensor) -> Tensor:
    """[len(rows), elements] int32 of 32 random bits; arguments as for `keep_mask`."""
    low, high = _row_keys(key, rows)
    if isinstance(elements, int):
        elements = torch.arange(elements, dtype=torch.int32, device=rows.device)
    bits = elements.to(torch.int32) * _GOLDEN + low.unsqueeze(1)
    _xor_shift(bits, 16).mul_(_FIRST).bitwise_xor_(high.unsqueeze(1))
    return _xor_shift(_xor_shift(bits, 15).mul_(_SECOND), 16)


def _xor_shift(bits: Tensor, by: int) -> Tensor:
    """bits ^= bits >> by with a logical shift, in place (torch's int32 shift copies the sign)."""
    return bits.bitwise_xor_((bits >> by).bitwise_and_((1 << (32 - by)) - 1))


def _row_keys(key: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent int32 keys for each row, by a multiply-xorshift of its 64-bit counter."""
    signed = key - (1 << 64) if key >> 63 else key
    mixed = (rows + 1) * 0x2545F4914F6CDD1D ^ signed
    for _ in range(2):
        mixed = mixed ^ (mixed >> 29)
        mixed = mixed * 0x369DEA0F31A53F85 + signed
    mixed = mixed ^ (mixed >> 32)
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


@torch.compiler.disable
def dropout(
    values: Tensor, probability: float, name: str, columns: tuple[int, int] | None = None, inplace: bool = False
) -> Tensor:
    """Zero elements of `values` with `probability` and scale the rest by 1/(1-probability).

    `values` is [B, ...], or [B*k, ...] with the batch outermost, for the scope's B rows; a leading dim that B does not
    divide (a table shared by all rows) gets one mask for the whole step. Values of four dims are attention
    probabilities [B, heads, S, S] of this rank's part of the heads. `columns` (first, all) says that the last dim holds
    a part of the features. With `inplace` they are changed themselves: a caller may not take what is returned.

    Raises:
        RuntimeError: called in training without a `dropout_scope`.
    """
    if probability >= 1:
        return values.mul_(0) if inplace else torch.zeros_like(values) * values
    if _active is None:
        raise RuntimeError(f"dropout {name!r} ran in training mode outside of a training step")
    rows = _active.rows
    if values.shape[0] % len(rows):
        rows = rows.new_full((1,), -1)
    elements = _elements(values, len(rows), _active) if columns is None else _of_columns(values, len(rows), columns)
    mask = keep_mask(_active.key(name), rows, elements, 1 - probability)
    if inplace:
        return values.mul_(mask.view(values.shape)).mul_(1 / (1 - probability))
    return values * mask.view(values.shape) * (1 / (1 - probability))


@torch.compiler.disable
def uniform(values: Tensor, low: float, high: float, name: str) -> Tensor:
    """Fill `values` [B, ...], of the scope's B rows, in place with noise that is uniform in [low, high).

    A leading dim that B does not divide gets one noise for the whole step.

    Raises:
        RuntimeError: called without a `dropout_scope`.
    """
    if _active is None:
        raise RuntimeError(f"noise {name!r} was drawn outside of a training step")
    rows = _active.rows
    if values.shape[0] % len(rows):
        rows = rows.new_full((1,), -1)
    bits = _hashed(_active.key(name), rows, _elements(values, len(rows), _active))
    steps = (bits >> 8).bitwise_and_(2**24 - 1)  # as many as fp32 tells apart
    wide = torch.promote_types(values.dtype, torch.float32)
    with torch.no_grad():
        return values.copy_((steps.to(wide) * ((high - low) * 2.0**-24) + low).view(values.shape))


def _elements(values: Tensor, rows: int, scope: DropoutScope) -> int | Tensor:
    """Return the number of a row's elements, or which of the whole tensor's they are."""
    elements = values.numel() // rows
    if values.dim() == 4:
        if scope.probability_block is not None:
            return scope.probability_block.index(values.shape[1])
        first = scope.part * elements
        return torch.arange(first, first + elements, device=values.device) if first else elements
    positions = None if scope.sequences is None else scope.sequences.positions
    if scope.positions is not None:
        run = slice(*scope.positions)
        positions = torch.arange(run.start, run.stop, device=values.device) if positions is None else positions[run]
    if positions is None or elements % max(1, len(positions)):
        return elements
    width = elements // max(1, len(positions))
    return _flat(positions, torch.arange(width, device=values.device), width)


def _of_columns(values: Tensor, rows: int, columns: tuple[int, int]) -> Tensor:
    """Return which of a row's elements are here: all positions that this rank reads, and a part of their features."""
    (first, width), own = columns, values.shape[-1]
    positions = torch.arange(values.numel() // rows // own, device=values.device)
    sequences = None if _active is None else _active.sequences
    if sequences is not None and len(sequences.positions) == len(positions):
        positions = sequences.positions
    return _flat(positions, torch.arange(first, first + own, device=values.device), width)


class IndexedDropout(nn.Module):
    """Stands in for `nn.Dropout` (same probability, no parameters); `name` is the module's qualified name.

    `columns` (first, all) is set between split layers, where this rank has a part of the features, or all of them, at
    every position that it reads.
    """

    def __init__(
        self, probability: float, name: str, columns: tuple[int, int] | None = None, inplace: bool = False
    ) -> None:
        super().__init__()
        self.p, self.name, self.columns, self.inplace = probability, name, columns, inplace

    def forward(self, values: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]; the identity in evaluation or when p is 0."""
        if not self.training or self.p == 0 or values.numel() == 0:
            return values
        return dropout(values, self.p, self.name, self.columns, self.inplace)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class FunctionalDropout(TorchFunctionMode):
    """Give `torch.nn.functional.dropout` the same masks, for models that call it (OPT, eager attention).

    And `Tensor.uniform_` to noise of the same kind, for routers that jitter what they read (Mixtral).
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _active is None or function not in (nn.functional.dropout, Tensor.uniform_):
            return function(*args, **kwargs)
        if function is Tensor.uniform_:
            return _uniform(f"{_active.block}/uniform", *args, **kwargs)
        values, p, training, inplace = _dropout_arguments(*args, **kwargs)
        if not training or p == 0:
            return values
        return dropout(values, p, f"{_active.block}/functional", inplace=inplace)


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _uniform(
    name: str, values: Tensor, start: float = 0, end: float = 1, generator: Any = None, **renamed: Any
) -> Tensor:
    start, end = renamed.get("from", start), renamed.get("to", end)  # torch's names, of which one is a word of Python
    return uniform(values, start, end, name) if generator is None else values.uniform_(start, end, generator=generator)


def replace_dropout(model: nn.Module) -> None:
    """Put an `IndexedDropout` in the place of every `nn.Dropout` of `model`."""
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                columns = getattr(child, "columns", None)  # left there by tensor parallelism
                indexed = IndexedDropout(child.p, f"{name}.{child_name}".lstrip("."), columns, child.inplace)
                setattr(module, child_name, indexed.train(child.training))


def name_functional_dropout(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Tell the scope which block runs: functional calls and draws are its own, in whichever order blocks run."""
    for block, name in zip(blocks, names, strict=True):
        block.forward = _named(block.forward, name)  # type: ignore[method-assign]


def _named(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return forward(*args, **kwargs)
        outer, _active.block = _active.block, name
        try:
            with _active.seeded(name):
                return forward(*args, **kwargs)
        finally:
            _active.block = outer

    return run
