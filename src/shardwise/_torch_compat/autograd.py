"""Tensors as autograd sees them: counts of writes, hooks of gradients, the backward that is running."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor

from shardwise._torch_compat.tracing import attributes_of_fakes, is_fake


def version_of(tensor: Tensor) -> int:
    """Return how often autograd has seen the tensor's storage written."""
    return 0 if tensor.is_inference() else tensor._version


def attributes_of_users(tensor: Tensor) -> set[str]:
    """Return the names of the attributes that a user's code has set on a tensor, fake or not."""
    return vars(tensor).keys() - (attributes_of_fakes() if is_fake(tensor) else set())


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices, values) of a sparse tensor; the public ways want it coalesced, which copies."""
    return tensor._indices(), tensor._values()


def backward_under_modes(loss: Tensor, retain_graph: bool) -> None:
    """Run backward from a scalar; checkpoints run their forwards again under the function modes of their first one.

    No public name: a mode is given `Tensor.backward`, and is off in it (torch 2.11 to 2.14).
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradient_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Hooks of `Tensor.register_hook`, by number."""
    return dict(parameter._backward_hooks or {})


def accumulate_grad_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, by number."""
    return dict(parameter._post_accumulate_grad_hooks or {})  # type: ignore[attr-defined]


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Let `target` have the hooks that `source` has now or is given later."""
    if not source.requires_grad:
        return
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(source, name) is None:
            setattr(source, name, OrderedDict())
        setattr(target, name, getattr(source, name))


def share_attributes(source: Tensor, target: Tensor | None) -> None:
    """Let `target` have the attributes that user code has set on `source` or sets on either of them later.

    Attributes of a traced job's tensors are torch's own.
    """
    if target is not None and not is_fake(target):
        target.__dict__ = source.__dict__


# No public name: FSDP2 and DDP end their own backward like this.
def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Call `callback` when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[arg-type]


# No public name: checkpoints of torch tell recomputations apart by it.
def number_of_backward() -> int:
    """The number of the backward that is running; no two have the same."""
    return torch._C._current_graph_task_id()


@contextmanager
def checkpointed_functions(wrap: Callable[[Callable[..., Any], int], Callable[..., Any]]) -> Iterator[None]:
    """Let `torch.utils.checkpoint` recompute by what `wrap` makes of a function that it is given inside.

    `wrap` gets the function, and how often it runs before it is recomputed: with reentry once, otherwise never.

    No public name: the function itself may be imported by name, and these are what it calls (torch 2.11 to 2.13).
    """
    reentrant, generator = checkpoints.CheckpointFunction, checkpoints._checkpoint_without_reentrant_generator

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return reentrant.apply(wrap(function, 1), *args)

    def generate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(function, 0), *args, **kwargs)

    namespace: Any = checkpoints  # set directly: mocks would cost a tenth of a millisecond for each block
    namespace.CheckpointFunction = SimpleNamespace(apply=apply)
    namespace._checkpoint_without_reentrant_generator = generate
    try:
        yield
    finally:
        namespace.CheckpointFunction, namespace._checkpoint_without_reentrant_generator = reentrant, generator
