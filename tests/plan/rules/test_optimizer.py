"""What optimizers can do, and how the message names them."""

from __future__ import annotations

import pytest

from shardwise.errors import LegalityError
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizers import ELEMENTWISE, UNUSABLE, classes
from tests.plan.rules.jobs import resolve_case


def test_a_name_in_other_letters_is_found() -> None:
    with pytest.raises(LegalityError, match="did you mean 'AdamW'"):
        resolve_case({"optimizer": {"name": "adamw"}})


def test_every_optimizer_of_torch_is_sorted() -> None:
    known = {*ELEMENTWISE, *UNUSABLE, *RECORDS}
    assert set(ELEMENTWISE) <= set(classes())
    assert set(classes()) <= known, "a new optimizer in torch.optim: is it elementwise?"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_update_a_shard_as_the_whole(name: str) -> None:
    import torch

    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)

    def trained(rows: slice) -> torch.Tensor:
        tensor = torch.nn.Parameter(start[rows].clone())
        optimizer = classes()[name]([tensor], lr=0.1)
        for gradient in gradients:
            tensor.grad = gradient[rows].clone()
            optimizer.step()
        return tensor.detach()

    torch.testing.assert_close(trained(slice(0, 2)), trained(slice(0, 4))[:2], rtol=0, atol=0)
