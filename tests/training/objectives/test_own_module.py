"""Masks of isolated documents, and what a user's module may return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import ModelError
from shardwise.kernels.attention.masks import document_mask
from shardwise.training.objectives.own_module import OwnModule
from shardwise.training.row_trial import taken


def batch(counted: list[bool] | None = None, labels: bool = True) -> Batch:
    return Batch(
        inputs={"x": torch.ones(2, 3)},
        labels=torch.tensor([[1, 2, -100], [3, -100, 4]]) if labels else None,
        rows=torch.tensor([0, 1]),
        counted=None if counted is None else torch.tensor(counted),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_document_mask(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 0, 1], [0, 1, 2]])
    mask = document_mask(ids, causal=True, dtype=dtype)
    assert mask.shape == (2, 1, 3, 3) and mask.dtype == dtype
    assert (mask == 0).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]], [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]]
    assert float(mask.min()) == torch.finfo(dtype).min
    both_ways = document_mask(ids, causal=False, dtype=dtype)
    assert (both_ways[0, 0] == 0).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, "logits"),
        lambda loss: {"loss": loss},
        lambda loss: SimpleNamespace(loss=loss),
    ],
)
def test_a_modules_own_mean_becomes_a_sum(wrap: Any) -> None:
    total, count = OwnModule(None, torch.float32).loss(batch(), wrap(torch.tensor(2.0)))
    assert (float(total), int(count)) == (8.0, 4)
    total, count = OwnModule(None, torch.float32).loss(batch(labels=False), wrap(torch.tensor(2.0)))
    assert (float(total), int(count)) == (4.0, 2)


def test_a_mean_over_no_label_is_zero_and_not_no_number() -> None:
    given = batch()
    given.labels = torch.full_like(given.labels, -100)  # type: ignore[arg-type]
    objective = OwnModule(None, torch.float32)
    logits = torch.randn(6, 5, requires_grad=True)
    total, count = objective.loss(given, F.cross_entropy(logits, objective.inputs(given)["labels"].flatten()))
    total.backward()
    assert (float(total.detach()), int(count)) == (0.0, 0) and torch.equal(logits.grad, torch.zeros(6, 5))
    assert objective.inputs(batch())["labels"].equal(batch().labels)


@pytest.mark.parametrize("output", [torch.ones(2), {"logits": torch.ones(2)}, ("a",), None])
def test_anything_else_is_refused(output: Any) -> None:
    with pytest.raises(ModelError, match=r"model\.loss"):
        OwnModule(None, torch.float32).loss(batch(), output)


def test_a_mean_cannot_leave_out_padding_rows() -> None:
    assert OwnModule(None, torch.float32).needs_whole_batches
    assert not OwnModule(lambda output, batch: (output, output), torch.float32).needs_whole_batches


def test_a_loss_function_gets_the_output_and_the_batch() -> None:
    def loss(output: Tensor, given: Batch) -> tuple[Tensor, Tensor]:
        return output.sum(), given.counted.sum()

    objective = OwnModule(loss, torch.float32)
    given = batch(counted=[True, False])
    total, count = objective.loss(given, torch.ones(5))
    assert (float(total), int(count)) == (5.0, 1)
    assert list(objective.inputs(given)) == ["x"]
    assert list(OwnModule(None, torch.float32).inputs(given)) == ["x", "labels"]


def test_joined_tensors_reach_a_module_without_padding() -> None:
    given = Batch({"x": torch.ones(2, 3, 4), "n": torch.ones(2)}, None, torch.arange(2), lengths={"x": [1, 3]})
    inputs = OwnModule(None, torch.float64).inputs(given)
    assert inputs["x"].shape == (4, 4) and inputs["x"].dtype == torch.float64 and inputs["n"].shape == (2,)
    one = OwnModule(None, torch.float64).inputs(taken(given, [1]))
    assert one["x"].shape == (3, 4) and one["n"].shape == (1,)


def test_a_modules_floats_come_in_the_compute_dtype() -> None:
    given = Batch(
        {"x": torch.ones(2, 3, dtype=torch.float64), "n": torch.ones(2, dtype=torch.int64)}, None, torch.arange(2)
    )
    inputs = OwnModule(None, torch.bfloat16).inputs(given)
    assert (inputs["x"].dtype, inputs["n"].dtype) == (torch.bfloat16, torch.int64)


def test_floating_inputs_come_in_the_compute_dtype() -> None:
    inputs = OwnModule(None, torch.float64).inputs(batch())
    assert inputs["x"].dtype == torch.float64 and inputs["labels"].dtype == torch.int64
