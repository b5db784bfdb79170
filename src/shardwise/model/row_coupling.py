"""Finds out whether a forward that decides by values decides for rows together.

`if x.mean() > 0` takes one path for all rows of a microbatch, so which rows are together is part of the model's
definition; experts that each row chooses for itself are not. Both read values, which a forward on fake tensors does not
have. So a small module runs for real: on some rows of the data at once, and on each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.tracing import tree_leaves
from shardwise.model.construct import drawing_from

ROWS = 8  # of the data; that all decide alike by chance is one in 2^7
TOLERANCE = 1e-6  # of fp64: what sums in another order leave is far below


def couples_rows(factory: Callable[[], nn.Module], seed: int, rows: Mapping[str, Tensor]) -> bool:
    """Return whether what a module returns for a row depends on the rows beside it. False where that cannot be told.

    Args:
        factory: makes the module with values, which it draws from `seed`.
        rows: keyword arguments of its forward, for several rows.
    """
    try:
        with drawing_from(seed), torch.no_grad():
            module = factory().double().eval()
            together = _outputs(module, rows)
            number = len(next(iter(rows.values())))
            alone = [_outputs(module, {name: value[i : i + 1] for name, value in rows.items()}) for i in range(number)]
    except Exception:  # any code may run in a model's constructor and forward
        return False
    return any(_differ(together[index], values) for index, values in _of_rows(together, alone))


def _outputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Any]:
    widened = {name: value.double() if value.is_floating_point() else value.clone() for name, value in inputs.items()}
    return tree_leaves(module(**widened))


def _of_rows(together: list[Any], alone: list[list[Any]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the outputs that have a first dimension of rows, by number, with what each row alone gave."""
    for index, output in enumerate(together):
        values = [outputs[index] for outputs in alone if index < len(outputs)]
        tensors = [value for value in values if isinstance(value, Tensor) and value.shape[:1] == (1,)]
        is_of_rows = isinstance(output, Tensor) and output.is_floating_point() and output.shape[:1] == (len(alone),)
        if is_of_rows and len(tensors) == len(alone):
            yield index, tensors


def _differ(together: Tensor, alone: list[Tensor]) -> bool:
    """Return whether rows differ; False where numbers are not finite, as those of weights without values."""
    rows = torch.cat(alone)
    if rows.shape != together.shape or not (rows.isfinite().all() and together.isfinite().all()):
        return False
    return float((rows - together).abs().max()) > TOLERANCE * float(together.abs().max())
