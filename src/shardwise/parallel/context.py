"""Context parallelism: a rank's part of every sequence, and attention that reaches the other parts.

`ContextParallel.split` turns a whole microbatch into this rank's rows, in the zig-zag order of collectives/context.py,
with positions and labels taken along; everything between token embedding and loss then works row by row. Only attention
looks across: the calls through transformers' AttentionInterface and AttentionMaskInterface come here, and while a split
microbatch runs the exchange happens in one of three ways. Where sequences are whole (generation) they pass through.
A model whose inputs cannot be split is given whole sequences, and its blocks take the rows (split_blocks.py).

- all_gather: keys and values are gathered, the model's own attention runs on some rows (arXiv 2407.21783, 3.3.2);
- ulysses: all-to-all, the model's own attention runs on whole sequences of some heads (arXiv 2309.14509);
- ring: keys and values go round, blocks merge by their log-sum-exp (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.collectives.context import deal_chunks, gather_sequence, heads_for_rows, rows_for_heads
from shardwise.collectives.handoff import Handoffs
from shardwise.errors import DataError
from shardwise.job.axes import Axis
from shardwise.job.tasks import IGNORED
from shardwise.kernels.attention.interface import PREFIX, own_attention, set_implementation
from shardwise.kernels.attention.masks import (
    Mask,
    MaskFunction,
    document_mask,
    make_mask,
    same_document,
    to_additive_mask,
)
from shardwise.kernels.attention.ring import BlockFunction, RingSettings, ring_attention
from shardwise.kernels.dropout import ProbabilityBlock, active_scope, keep_mask
from shardwise.kernels.loss import loss_dtype
from shardwise.kernels.precision import torch_dtype
from shardwise.model.attention_support import takes_positions
from shardwise.model.facts import SplitForward
from shardwise.model.position_rule import FROM_ZERO, PositionRule
from shardwise.model.registry import family_of
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan

NAME = "split_{}"  # of the attention registered in the place of another


@dataclass(frozen=True)
class SequenceShard:
    """This rank's rows of the sequences of one microbatch.

    Attributes:
        length: of the whole sequence, without the padding that makes it divisible.
        padded: with it.
        positions: [padded / c] of this rank's rows; those from `length` on are padding.
        documents: [B, padded] number of each position's document, where documents are isolated.
    """

    context: ContextParallel
    length: int
    padded: int
    positions: Tensor
    documents: Tensor | None

    def local(self, values: Tensor) -> Tensor:
        """Return this rank's rows of [B, S, ...]; padding repeats the last one."""
        return values[:, self.real_positions]

    @property
    def real_positions(self) -> Tensor:
        """[padded / c] positions of this rank's rows; those of padding are the last one."""
        return self.positions.clamp(max=self.length - 1)

    @property
    def whole(self) -> Tensor:
        """All positions, [padded]."""
        return torch.arange(self.padded, device=self.positions.device)

    def positions_of(self, rank: int) -> Tensor:
        """Return the positions of the rows of another rank of the context group."""
        return deal_chunks(self.whole, 0, self.context.degree)[rank]

    def document_mask(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the [B, 1, Q, K] additive mask of documents for queries and keys at positions; it hides padding."""
        context = self.context
        assert self.documents is not None
        mask = document_mask(self.documents, context.causal, context.dtype, rows, columns)
        hidden = (columns >= self.length) & (rows < self.length).unsqueeze(1)
        return mask.masked_fill_(hidden, torch.finfo(context.dtype).min)


Sides = tuple[SequenceShard | None, SequenceShard]  # of an encoder's sequences, where there is one, and of others


def _tokens_of(microbatch: Any, shard: SequenceShard) -> Tensor:
    """Return [B, padded / c] bool: where this rank's rows hold tokens."""
    is_position = (shard.positions < shard.length).expand(len(microbatch.rows), -1)
    return is_position if microbatch.is_token is None else shard.local(microbatch.is_token) & is_position


def _active_shard() -> SequenceShard | None:
    """Return the split sequences of the microbatch that runs now, recomputation too; None where they are whole."""
    scope = active_scope()
    return None if scope is None else cast("SequenceShard | None", scope.sequences)


class ContextParallel:
    """This rank's part in context parallelism; made once by `parallelize`.

    Args:
        rule: by which the model counts positions.
        heads_whole: whether each tensor rank has all heads.
        forward: by which blocks run on rows, where inputs are not split.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, layout: Layout, rule: PositionRule = FROM_ZERO, heads_whole: bool = False,
        forward: SplitForward | None = None,
    ) -> None:  # fmt: skip
        self.group, self.degree = layout.group(Axis.CONTEXT), layout.size(Axis.CONTEXT)
        self.index = layout.index(Axis.CONTEXT)
        self.handoffs = Handoffs(self.group)
        self.tensor_index = 0 if heads_whole else layout.index(Axis.TENSOR)  # of the ranks that share the heads
        self.method, self.causal = plan.context_method, plan.job.model.task == "causal_lm"
        self.dtype = torch_dtype(plan.dtypes.compute)
        self.uses_kernels = bool(plan.attention)
        self.takes_positions, self.rule = takes_positions(model), rule
        self.forward = forward
        calls = {} if forward is None else forward.attention
        self.calls = {id(model.get_submodule(name)): call for name, call in calls.items()}
        _reroute(model)
        if forward is None:
            _place_biases(model)

    def split(self, microbatch: Any) -> tuple[Any, SequenceShard | Sides]:
        """Return this rank's part of a whole microbatch, and which part that is; with `forward`, of its labels alone.

        Raises:
            DataError: a sequence is as long as the rows that a block takes of it.
        """
        ids = microbatch.inputs["input_ids"]
        if self.forward is not None:
            sides = self._sides(ids, microbatch.labels)
            split = self._targets(microbatch, sides[1])
            split.whole_labels = microbatch.labels
            if sides[0] is None:
                split.is_token = _tokens_of(microbatch, sides[1])
            return split, sides
        shard = self._rows(ids.shape[1], ids.device, microbatch.document_ids)
        counted = {"position_ids": self.rule.positions(ids)} if self.takes_positions else {}
        inputs = {**counted, **microbatch.inputs}
        inputs = {name: shard.local(value) for name, value in inputs.items()}
        inputs["attention_mask"] = self._mask(shard, inputs["input_ids"])
        split = replace(self._targets(microbatch, shard), inputs=inputs, document_ids=None)
        split.is_token = _tokens_of(microbatch, shard)
        return split, shard

    def _sides(self, ids: Tensor, labels: Tensor) -> Sides:
        """Return this rank's rows of an encoder's sequences, where there is one, and of those that have labels."""
        of_labels = self._rows(labels.shape[1], ids.device, None)
        assert self.forward is not None
        sides = self._rows(ids.shape[1], ids.device, None) if self.forward.encoder else None, of_labels
        for side in sides:
            if side is not None and side.length == len(side.positions):
                raise DataError(
                    f"context_parallel_degree={self.degree}: a sequence has two tokens, as many as each rank takes; "
                    "use longer ones, or context_parallel_degree 1"
                )
        return sides

    def _targets(self, microbatch: Any, shard: SequenceShard) -> Any:
        """Return a microbatch with this rank's rows of all that its loss takes."""
        labels = shard.local(microbatch.labels).masked_fill(shard.positions >= shard.length, IGNORED)
        split = replace(microbatch, labels=labels)
        if microbatch.completions is not None:
            split.completions = shard.local(microbatch.completions)
        if microbatch.weights is not None:  # those of padding too: their sum counts samples
            split.weights = shard.local(microbatch.weights).masked_fill(shard.positions >= shard.length, 0)
        return split

    def _rows(self, length: int, device: torch.device, documents: Tensor | None) -> SequenceShard:
        padded = length + -length % (2 * self.degree)
        everything = torch.arange(padded, device=device)
        if documents is not None:
            documents = documents[:, everything.clamp(max=length - 1)]
        return SequenceShard(self, length, padded, deal_chunks(everything, 0, self.degree)[self.index], documents)

    def _mask(self, shard: SequenceShard, ids: Tensor) -> Tensor:
        """Return the mask of isolated documents, four-dimensional, which models take as it is; a ring makes its blocks.

        Otherwise ones: a model that is told that nothing is padding does not take the jumps of the positions for
        ends of documents, and asks `_masked` for its own kind of mask.
        """
        if shard.documents is None or self.method == "ring" or self.uses_kernels:
            return torch.ones_like(ids)
        return shard.document_mask(shard.whole if self.method == "ulysses" else shard.positions, shard.whole)


def _place_biases(model: nn.Module) -> None:
    """Let BLOOM make the ALiBi biases of all keys, wherever they are: its own count would begin anew on every rank."""
    attention = family_of(str(model.config.model_type)).attention  # type: ignore[union-attr]
    method = attention.key_bias_method if attention is not None else ""
    for module in model.modules():
        if method and hasattr(module, method):
            setattr(module, method, partial(_alibi, getattr(module, method)))


def _alibi(own: Callable[..., Tensor], attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """[B*h, 1, K] biases, K the keys of whole sequences while split ones run."""
    shard = _active_shard()
    if shard is not None:
        attention_mask = attention_mask.new_ones(len(attention_mask), shard.padded)
    return own(attention_mask, *args, **kwargs)


def _reroute(model: Any) -> None:
    """Register this module's attention and masks in the place of the model's."""
    original = str(model.config._attn_implementation)
    name = NAME.format(original)
    AttentionInterface.register(name, partial(_attend, original))
    AttentionMaskInterface.register(name, partial(_masked, original))
    set_implementation(model, name)


@torch.compiler.disable  # a compiled block ends here and begins again behind: which sequences run is not the graph's
def _attend(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: [B, h, S/c, d] tensors -> ([B, S/c, h, d], weights or None)."""
    own = own_attention(name, module)
    shard = _active_shard()
    if shard is None:
        return own(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    if shard.context.forward is not None:
        return _with_rows(shard, name, module, query, key, value, attention_mask, kwargs), None
    if shard.context.method == "ring":
        return _ring(shard, module, query, key, value, attention_mask, **kwargs), None
    if shard.context.method == "ulysses" and "key_bias" in kwargs:
        kwargs["key_bias"] = kwargs["key_bias"].chunk(shard.context.degree, 1)[shard.context.index]
    run = partial(own, module, attention_mask=attention_mask, **kwargs)
    return (_ulysses if shard.context.method == "ulysses" else _all_gather)(shard, run, query, key, value), None


def _all_gather(shard: SequenceShard, run: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = shard.context.group
    first = shard.context.tensor_index * query.shape[1]
    with _probability_block(first, shard.positions, shard.whole, shard.length):
        output: Tensor = run(query=query, key=gather_sequence(key, group), value=gather_sequence(value, group))[0]
    return output


def _with_rows(
    shard: SequenceShard, name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    mask: Mask | Tensor | None, arguments: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention of a split block: masks and biases are whole, queries are this rank's, keys too or those of all."""
    context, rows = shard.context, shard.real_positions
    call = context.calls[id(module)]
    if call.local_keys:
        key, value = (gather_sequence(tensor, context.group)[:, :, : shard.length] for tensor in (key, value))
    columns = torch.arange(key.shape[2], device=key.device)
    arguments |= {name: arguments[name][..., rows, :] for name in call.row_arguments}
    if isinstance(mask, Mask):
        mask = Mask(mask.function, mask.rows[rows], mask.columns, mask.batch)
    elif isinstance(mask, Tensor):
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
    elif name != "eager" and _hides_ahead(module, arguments):  # an eager attention without a mask hides nothing
        mask = Mask(make_mask(1, columns, causal=True).function, rows, columns, 1)
        mask = mask if name.startswith(PREFIX) else mask.dense
    with _probability_block(
        context.tensor_index * query.shape[1], shard.positions, columns, shard.length, len(columns)
    ):
        output: Tensor = own_attention(name, module)(module, query, key, value, mask, **arguments)[0]
    return output


def _hides_ahead(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Tell whether attention that is given no mask hides the keys ahead."""
    is_causal = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _ulysses(shard: SequenceShard, run: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = shard.context
    query, key, value = (heads_for_rows(tensor, context.group) for tensor in (query, key, value))
    first = (context.tensor_index * context.degree + context.index) * query.shape[1]
    with _probability_block(first, shard.whole, shard.whole, shard.length):
        output: Tensor = run(query=query, key=key, value=value)[0]
    return rows_for_heads(output, context.group)


def _ring(
    shard: SequenceShard, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, local_window: int | None = None,
    dropout_name: str | None = None, key_bias: Tensor | None = None, **rest: Any,
) -> Tensor:  # fmt: skip
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if local_window is not None and local_window < shard.length:
        known = attention_mask if isinstance(attention_mask, Mask) else make_mask(1, shard.whole, causal=True)
        attention_mask = known.within(local_window)
    mask = _ring_mask(shard, attention_mask)
    dropout_factors = _ring_dropout(shard, query, dropout, dropout_name) if dropout > 0 else None
    bias = None if key_bias is None else partial(_ring_bias, shard, key_bias)
    ring = RingSettings(shard.context.group, scale, causal and mask is None, mask, dropout_factors, bias)
    return ring_attention(query, key, value, ring).transpose(1, 2)


def _ring_mask(shard: SequenceShard, mask: Mask | Tensor | None) -> BlockFunction | None:
    """Blocks of documents, or of the mask [1 or B, 1, S/c, S] that `_masked` made."""
    if isinstance(mask, Mask):
        by_positions = mask.at
        return lambda rank, rows, columns: by_positions(shard.positions[rows], shard.positions_of(rank)[columns])
    if shard.documents is not None:
        return lambda rank, rows, columns: shard.document_mask(shard.positions[rows], shard.positions_of(rank)[columns])
    if mask is None:
        return None
    return lambda rank, rows, columns: mask[:, :, rows, shard.positions_of(rank)[columns]]


def _ring_bias(shard: SequenceShard, bias: Tensor, rank: int, rows: slice, columns: slice) -> Tensor:
    """[B, h, 1, K] of a block; `bias` is that of all keys in their own order."""
    return bias[..., shard.positions_of(rank)[columns]]


def _ring_dropout(shard: SequenceShard, query: Tensor, probability: float, name: str | None = None) -> BlockFunction:
    """Return the factors that `nn.functional.dropout` of a whole eager attention would multiply each block by."""
    scope = active_scope()
    assert scope is not None
    rows, key = scope.rows, scope.key(name or f"{scope.block}/functional")
    heads, first = query.shape[1], shard.context.tensor_index * query.shape[1]

    def factors(rank: int, queries: slice, keys: slice) -> Tensor:
        square = ProbabilityBlock(first, shard.positions[queries], shard.positions_of(rank)[keys], shard.length)
        kept = keep_mask(key, rows, square.index(heads), 1 - probability)
        shape = (len(rows), heads, len(square.queries), len(square.keys))
        return kept.view(shape).to(loss_dtype(query.dtype)) * (1 / (1 - probability))

    return factors


@contextmanager
def _probability_block(
    first: int, queries: Tensor, keys: Tensor, length: int, key_length: int | None = None
) -> Iterator[None]:
    """Tell dropout which attention probabilities run."""
    scope = active_scope()
    assert scope is not None
    scope.probability_block = ProbabilityBlock(first, queries, keys, length, key_length)
    try:
        yield
    finally:
        scope.probability_block = None


def _masked(
    name: str, *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, **rest: Any,
) -> Mask | Tensor | None:  # fmt: skip
    """Make the model's kind of mask for this part: this rank's rows of it, or all for Ulysses.

    None says that the kernel needs none: all keys count, or (in a ring, or on whole sequences) all that are not ahead;
    or that a ring makes the masks of documents itself.
    """
    own = partial(
        AttentionMaskInterface()[name],
        batch_size=batch_size, local_size=local_size, allow_is_causal_skip=allow_is_causal_skip, **rest,
    )  # fmt: skip
    shard = _active_shard()
    if shard is None:
        return own(  # type: ignore[no-any-return]
            q_length=q_length, kv_length=kv_length, mask_function=mask_function, attention_mask=attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )  # fmt: skip
    if name.startswith(PREFIX):
        return _lazy(shard, mask_function, batch_size, local_size, allow_is_causal_skip, allow_is_bidirectional_skip)
    if shard.documents is not None:
        return None
    skip = allow_is_bidirectional_skip and shard.padded == shard.length
    among = partial(_among_real, mask_function, shard.length)
    if shard.context.method == "ulysses":
        return own(  # type: ignore[no-any-return]
            q_length=shard.padded, kv_length=shard.padded, mask_function=among, allow_is_bidirectional_skip=skip
        )
    reaches = local_size is None or local_size >= shard.length
    if reaches and (skip or (shard.context.method == "ring" and allow_is_causal_skip)):
        return None
    rows, columns = shard.positions.view(1, 1, -1, 1), shard.whole.view(1, 1, 1, -1)
    batch = torch.arange(batch_size, device=rows.device).view(-1, 1, 1, 1)
    allowed = among(batch, batch.new_zeros(1, 1, 1, 1), rows, columns).expand(batch_size, -1, rows.numel(), -1)
    return to_additive_mask(allowed, rest["dtype"]) if name == "eager" else allowed


def _lazy(
    shard: SequenceShard,
    mask_function: MaskFunction,
    batch: int,
    local_size: int | None,
    causal: bool,
    bidirectional: bool,
) -> Mask | None:
    """Return the mask of this rank's rows (all for Ulysses) for our kernels.

    None where it hides nothing but keys ahead, in an order in which the kernel can tell, or nothing at all (`causal`,
    `bidirectional` allow the one or the other).
    """
    method, documents = shard.context.method, shard.documents
    plain = documents is None and (local_size is None or local_size >= shard.length)
    ordered = causal and method != "all_gather"
    if plain and (ordered or (bidirectional and shard.padded == shard.length)):
        return None

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = mask_function(b, h, q, k)
        if documents is not None:
            visible = visible & same_document(documents, b, q, k)
        return (visible & (k < shard.length)) | (q >= shard.length)

    return Mask(function, shard.whole if method == "ulysses" else shard.positions, shard.whole, batch)


def _among_real(
    mask_function: Callable[..., Tensor], length: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor
) -> Tensor:
    """Hide padding from every row; rows of padding see everything, since a row that sees nothing has no softmax."""
    return (mask_function(b, h, q, k) & (k < length)) | (q >= length)
