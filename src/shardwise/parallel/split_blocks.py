"""Context parallelism inside of blocks: they have a rank's rows, while all ahead of them sees sequences whole.

It is the way of models that cannot be told positions, and of such as look at others beside transformers'
AttentionInterface (model/split_forward.py). The model makes positions, masks and biases of whole sequences. A block
that is given whole hidden states takes this rank's rows of them; loss and gradients then are those of these rows, and
sums over the ranks are the whole. A module that looks at other rows runs on all of them, on every rank, and its output
is cut again; a mixer that can go on from a state runs on its own (parallel/carried_state.py). Attention through the
interface takes the keys and values of all rows, for this rank's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from shardwise._torch_compat.tracing import tree_flatten, tree_unflatten
from shardwise.collectives.context import gather_sequence
from shardwise.kernels.dropout import active_scope
from shardwise.model.facts import ENCODER, GatheredModule, SplitBlock, SplitForward
from shardwise.parallel.carried_state import run_in_chunks
from shardwise.parallel.context import SequenceShard


def split_blocks(model: nn.Module, forward: SplitForward) -> None:
    """Let the blocks of `model` take this rank's rows, and what looks at others all of them."""
    for module in forward.gathered:
        _surround(model, module.name, partial(_gathered, module))
    for name, block in forward.blocks.items():
        _surround(model, name, partial(_entered, block))
    if forward.encoder:
        _surround(model, forward.encoder, partial(_encoded, forward.encoded))


def _surround(model: nn.Module, name: str, around: Callable[..., Any]) -> None:
    module = model.get_submodule(name)
    module.forward = partial(around, module.forward)  # type: ignore[method-assign]


def _entered(block: SplitBlock, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block on this rank's rows; what follows it has them, too."""
    scope = active_scope()
    if scope is None or not scope.sides:
        return forward(*args, **kwargs)
    shard = cast(SequenceShard, scope.sides[block.side])
    leaves, tree = tree_flatten((args, kwargs))
    for number in block.arguments:
        if isinstance(leaves[number], Tensor) and leaves[number].shape[1] == shard.length:
            leaves[number] = shard.local(leaves[number])
    scope.sequences = shard
    args, kwargs = tree_unflatten(leaves, tree)
    return forward(*args, **kwargs)


def _gathered(module: GatheredModule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module on whole sequences, and take this rank's rows of what it returns; or go on from the rows before."""
    scope = active_scope()
    if scope is None or scope.sequences is None or not scope.sides:
        return forward(*args, **kwargs)
    shard = cast(SequenceShard, scope.sequences)
    leaves, tree = tree_flatten((args, kwargs))
    if module.carries is not None and not _sees_all(module, shard, leaves):
        return run_in_chunks(module, shard.context.handoffs, forward, args, kwargs)
    for number in module.arguments:
        leaves[number] = whole_rows(shard, leaves[number])
    args, kwargs = tree_unflatten(leaves, tree)
    scope.sequences = None
    try:
        results, form = tree_flatten(forward(*args, **kwargs))
    finally:
        scope.sequences = shard
    for number in module.results:
        results[number] = shard.local(results[number])
    return tree_unflatten(results, form)


def _sees_all(module: GatheredModule, shard: SequenceShard, leaves: Sequence[Any]) -> bool:
    """Tell whether a mixer is given numbers of all rows, as masks are, or documents apart: then no state is enough."""
    others = [leaf for number, leaf in enumerate(leaves) if number not in module.arguments]
    masks = (leaf for leaf in others if isinstance(leaf, Tensor) and leaf.dim() > 1)
    return shard.documents is not None or any(shard.length in mask.shape for mask in masks)


def _encoded(numbers: Sequence[int], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Gather what an encoder returns; the decoder then begins with whole sequences of its own."""
    output, scope = forward(*args, **kwargs), active_scope()
    if scope is None or not scope.sides:
        return output
    leaves, tree = tree_flatten(output)
    for number in numbers:
        leaves[number] = whole_rows(cast(SequenceShard, scope.sides[ENCODER]), leaves[number])
    scope.sequences = None
    return tree_unflatten(leaves, tree)


def whole_rows(shard: SequenceShard, values: Tensor) -> Tensor:
    """[B, S/c, ...] of each rank -> [B, S, ...] without padding; the gradient of a row is the sum over the ranks."""
    return gather_sequence(values.unsqueeze(1), shard.context.group).squeeze(1)[:, : shard.length]
