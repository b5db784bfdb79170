"""A loss function in the place of an objective's own, over the whole outputs of the model's last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, user_code
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]
ARGUMENTS = ("output", "batch")


class OwnLoss(Objective):
    """The inputs of another objective, and the loss of a function of the caller's.

    Args:
        objective: what gives the model its inputs.
        function: (model output, batch) -> (summed loss, count).
        what: the function's place in messages.
        check: refuses what the function makes of microbatch and output; unset: nothing does.
    """

    needs_whole_batches = False

    def __init__(
        self, objective: Objective, function: LossFunction, what: str, check: Callable[[Batch, Any], None] | None = None
    ) -> None:
        check_arguments(function, ARGUMENTS, what)
        self._objective, self._function, self._what, self._check = objective, function, what, check

    def inputs(self, microbatch: Batch) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""
        return self._objective.inputs(microbatch)

    def loss(self, microbatch: Batch, output: Any) -> tuple[Tensor, Tensor]:
        """Return the caller's (sum, count)."""
        if self._check is not None:
            self._check(microbatch, output)
        return call_loss(self._function, output, microbatch, self._what)


def call_loss(function: LossFunction, output: Any, batch: Batch, what: str) -> tuple[Tensor, Tensor]:
    """Return what a user's loss function returns, where it is (sum, count).

    Raises:
        UserCodeError: it raises, or returns anything else.
    """
    with user_code(what):
        result: Any = function(output, batch)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and all(isinstance(value, Tensor) and value.dim() == 0 for value in result):
        return result
    shown = f"({', '.join(map(_shown, result))})" if isinstance(result, tuple) else _shown(result)
    raise UserCodeError(
        f"{what} returned {shown}; it must return (sum, count), two tensors without dims, such as (losses.sum(), "
        f"batch.count()){in_parentheses(defined_at(function))}"
    )


@contextmanager
def head_in_forward(model: ParallelModel) -> Iterator[None]:
    """Let the model's own head make logits inside, rather than the chunked loss."""
    head = model.head
    if head is None:
        yield
        return
    head.deferred = False
    try:
        yield
    finally:
        head.deferred = True


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
