"""Finds out whether a loss that a loop gives to a step lets rows of a microbatch change each other's numbers.

It is tried when it is first called, where it matters: rows of random outputs together have to give the loss and the
gradients that the same rows give one by one. The outputs have the form of the model's, which does not run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.tracing import tree_flatten, tree_unflatten
from shardwise.data.batch import Batch
from shardwise.errors import LegalityError
from shardwise.job.objects import defined_at, in_parentheses
from shardwise.model.row_coupling import ROWS, Call, RowCoupling, TrialRows, find_coupling
from shardwise.parallel.own_collectives import own_collectives_refused
from shardwise.plan.plan import Plan
from shardwise.training.objectives.own_loss import LossFunction, call_loss
from shardwise.training.row_trial import rows_like, taken, widened


class LossTrials:
    """The losses of a session's loop, each of which is tried once.

    Args:
        say: tells the user what could not be tried.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._found: dict[Any, RowCoupling] = {}

    def check(self, plan: Plan, function: LossFunction, what: str, microbatch: Batch, output: Any) -> None:
        """Refuse a loss between rows where a layout says which rows are together.

        Args:
            what: the function's place in messages.
            microbatch: the first that it is given.
            output: of the model.

        Raises:
            LegalityError: a row gives other numbers together with others, and microbatches are of no size of the job's.
        """
        size, rows = plan.job.training.microbatch_size, len(microbatch.rows)
        if size == rows:
            return
        key = (_code_of(function), *_captured(function))
        if key not in self._found:
            self._found[key] = _tried(function, what, microbatch, output)
            if self._found[key].untried:
                self._say(
                    f"note: whether {what} lets rows of a microbatch change each other's numbers was not tried: "
                    f"{self._found[key].untried}. If it does, set training.microbatch_size."
                )
        if self._found[key].is_coupled:
            raise LegalityError(
                f"training.microbatch_size={size}: {what}{in_parentheses(defined_at(function))} gives other numbers "
                f"for rows together than for each of them, a microbatch has {rows}, and a layout may not say which "
                f"are together; set training.microbatch_size={rows}, and bring as many on every layout",
                "coupled-rows",
            )


def _code_of(function: Any) -> Any:
    """Return what is the same each time a loop makes the same function anew."""
    function = getattr(function, "func", function)  # of a functools.partial
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None) or id(function)


def _captured(function: Any) -> Iterator[Any]:
    """Yield what tells a function from others of its code: values that it was made with, and whether numbers are 0.

    A term whose weight grows from 0 is no term at first. Each value of a schedule would be a trial of its own.
    """
    values = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    inner = getattr(function, "func", function)
    values += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    values += vars(inner.__self__).values() if hasattr(getattr(inner, "__self__", None), "__dict__") else ()
    for value in values:
        if isinstance(value, (str, bool, NoneType)):
            yield value
        else:
            yield type(value), value == 0 if isinstance(value, (int, float)) else None


def _tried(function: LossFunction, what: str, microbatch: Batch, output: Any) -> RowCoupling:
    """Try a loss on outputs of any size, and where it takes none such, on those between 0 and 1."""
    labels = {} if microbatch.labels is None else {"labels": microbatch.labels}
    batch = rows_like({**microbatch.inputs, **labels})
    summed = functools.partial(_summed, function, what, batch)
    coupling = RowCoupling()
    for scaled in (_spread, torch.sigmoid):
        with own_collectives_refused():  # other ranks hold other stages
            outputs = _Outputs(output, len(microbatch.rows), scaled)
            coupling = find_coupling(outputs, TrialRows(ROWS, {}, summed), True)
        if not coupling.untried:
            break
    return coupling


def _summed(function: LossFunction, what: str, batch: Batch, call: Call, rows: Sequence[int]) -> Tensor:
    return call_loss(function, call(rows=list(rows)), widened(taken(batch, rows)), what)[0]


def _spread(values: Tensor) -> Tensor:
    """Return random weights, which are small where there are many in a row, in the size of activations."""
    return values * max(1, values[0].numel()) ** 0.5 if values.dim() else values


class _Outputs(nn.Module):
    """A module in the place of a model: its weights are rows of outputs, and its forward returns some of them."""

    def __init__(self, output: Any, rows: int, scaled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.leaves, self.form = tree_flatten(output)
        self.number, self.scaled = rows, scaled
        self.weights = nn.ParameterDict(
            {str(place): _weight(leaf, rows) for place, leaf in enumerate(self.leaves) if _is_float(leaf)}
        )
        self.leaves = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def forward(self, rows: list[int]) -> Any:
        return tree_unflatten([self._leaf(place, rows) for place in range(len(self.leaves))], self.form)

    def _leaf(self, place: int, rows: list[int]) -> Any:
        leaf, weights = self.leaves[place], self.weights
        if str(place) in weights:
            values = self.scaled(weights[str(place)])
            return values[rows] if leaf.shape[:1] == (self.number,) else values
        is_of_rows = isinstance(leaf, Tensor) and leaf.shape[:1] == (self.number,)
        return leaf[torch.tensor(rows) % self.number] if is_of_rows else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _weight(leaf: Tensor, rows: int) -> nn.Parameter:
    shape = (ROWS, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape
    return nn.Parameter(torch.empty(shape, device="meta"))
