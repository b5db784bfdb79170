"""Activation checkpointing of blocks: `full`, `selective`, every n-th block, and SMP's groupings.

A block's forward is replaced on the instance, so names, classes and hooks stay. Recomputation runs under a copy of
the dropout scope of its forward. With SMP's `contiguous` and `group_N` several consecutive blocks are one checkpoint:
the first block's call runs the whole group, and the calls of the others hand its result through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise._torch_compat.operators import PRODUCT_OPERATORS, updates_a_result
from shardwise._torch_compat.tracing import tree_flatten
from shardwise.errors import ModelError
from shardwise.job.schema import MemorySection
from shardwise.kernels.dropout import active_scope, dropout_scope
from shardwise.kernels.kept_results import keep_results
from shardwise.model.facts import ModelFacts
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.kept_routes import CheckpointedCalls
from shardwise.parallel.recomputation import Arguments, BlockState, GivenArguments
from shardwise.plan.plan import Plan


def keeps_output(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return what `selective` does with an operator's output: everything but products is cheap to compute again.

    An adapter's product is added to the layer's, which is kept, and has few features: their sum is no second copy. Nor
    are adapted stacks of experts kept beside the stacks.
    """
    is_kept = operator in PRODUCT_OPERATORS and not updates_a_result(operator, args)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Keeps(NamedTuple):
    """Choices of what stays beside a checkpoint's input: results of products and attention, rows of shared experts."""

    products: bool
    expert_rows: bool


class ActivationCheckpointing(Transform):
    """Groups of each stage's blocks as checkpoints; what they keep goes to the host where `offload` ran."""

    name = "checkpointing"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.job.memory.activation_checkpointing != "none"

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            apply_activation_checkpointing(stage.block_groups(inputs), inputs.plan.job.memory, stage.offload)


def apply_activation_checkpointing(
    groups: list[list[nn.Module]], memory: MemorySection, offload: ActivationOffload | None
) -> None:
    """Checkpoint every `memory.checkpoint_every`-th of `groups`, in place."""
    keeps = _Keeps(memory.activation_checkpointing == "selective", memory.keep_expert_rows)
    for blocks in groups[:: memory.checkpoint_every]:
        group = _BlockGroup(blocks, keeps, offload)
        blocks[0].forward = group.run_all  # type: ignore[method-assign]
        for block in blocks[1:]:
            block.forward = group.hand_through  # type: ignore[method-assign]


class _BlockGroup:
    """Consecutive blocks under one checkpoint. The first one's call computes all of them."""

    def __init__(self, blocks: list[nn.Module], keeps: _Keeps, offload: ActivationOffload | None) -> None:
        self.forwards = [block.forward for block in blocks]
        self.run = _checkpointed(self._chain, blocks, keeps, offload)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.output: Any = None
        self.waiting = 0  # followers that have not handed the result through yet

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.forwards
        output = first(*args, **kwargs)
        for forward in others:
            output = forward(_hidden(output), *args[1:], **kwargs)
        return output

    def run_all(self, *args: Any, **kwargs: Any) -> Any:
        output = self.run(*args, **kwargs)
        self.waiting = len(self.forwards) - 1
        if self.waiting:
            self.call, self.output = (args[1:], kwargs), output
        return output

    def hand_through(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the group's result through; refuse a model that gives its blocks different arguments."""
        if not _same_call(self.call, (args, kwargs)):
            raise ModelError(
                "memory.checkpoint_strategy groups blocks that the model calls with different arguments; "
                "use checkpoint_strategy: each"
            )
        output = _with_hidden(self.output, hidden)
        self.waiting -= 1
        if not self.waiting:
            self.call, self.output = ((), {}), None
        return output


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The group's output with the tensor that came through the model's own code (the checkpoint's result) in front."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _same_call(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    flat_one, spec_one = tree_flatten(one)
    flat_other, spec_other = tree_flatten(other)
    return spec_one == spec_other and all(
        a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(flat_one, flat_other, strict=True)
    )


def _checkpointed(
    forward: Callable[..., Any], blocks: Sequence[nn.Module], keeps: _Keeps, offload: ActivationOffload | None
) -> Callable[..., Any]:
    state = BlockState(blocks)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Only the hidden states are an argument of the checkpoint: what it saves is then just them, which is what
        # offload may move; masks and positions are shared by all blocks and stay.
        key = _key_of_hidden(args, kwargs)
        hidden = args[key] if isinstance(key, int) else kwargs.get(key or "")
        others = _with_argument((args, kwargs), key, None)
        before, given = state.find(), GivenArguments(*others, hidden)
        runs = count()

        def call(hidden: Any) -> Any:
            args, kwargs = _with_argument(others if next(runs) == 0 else given.again(), key, hidden)
            return forward(*args, **kwargs)

        with offload.checkpoint_input() if offload else nullcontext():
            contexts = partial(_contexts, keeps, partial(state.as_found, before))
            output = checkpoint(call, hidden, use_reentrant=False, context_fn=contexts)
        state.learn(before)
        given.check_not_written(blocks[0])
        return output

    return run


def _key_of_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Return position or name of a call's hidden states: its first tensor, not in a container; None without one."""
    arguments: Iterable[tuple[int | str, Any]] = enumerate(args) if args else kwargs.items()
    return next((key for key, value in arguments if isinstance(value, Tensor)), None)


def _with_argument(call: Arguments, key: int | str | None, value: Any) -> Arguments:
    """Return the arguments of a call with `value` as the argument `key` among them."""
    args, kwargs = call
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, kwargs if key is None else kwargs | {key: value}


def _contexts(
    keeps: _Keeps, as_found: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of forward and of recomputation: what is kept; dropout, routes and state are this forward's."""
    scope = active_scope()
    of_forward = scope.snapshot() if scope else None
    forward, recompute = _selective() if keeps.products else (nullcontext(), nullcontext())
    calls = CheckpointedCalls(keeps.expert_rows)

    def again() -> Iterator[AbstractContextManager[Any]]:
        yield recompute
        yield calls.again()
        yield dropout_scope(of_forward.snapshot() if of_forward else None)
        yield as_found()

    return _MadeAnew(lambda: (forward, calls.made())), _MadeAnew(again)


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, recompute = create_selective_checkpoint_contexts(keeps_output)
    keep_results(forward, recompute)
    return forward, recompute


class _MadeAnew:
    """Contexts that are made each time they are entered: a block that takes a gradient is recomputed for it, too."""

    def __init__(self, make: Callable[[], Iterable[AbstractContextManager[Any]]]) -> None:
        self.make = make
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.make():
                stack.enter_context(context)
            self.entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.pop().__exit__(*error)
