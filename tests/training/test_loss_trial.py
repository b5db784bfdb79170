"""A loss that a loop gives to a step is tried for rows that change each other's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from shardwise.data.batch import Batch
from shardwise.errors import LegalityError, ShardwiseError
from shardwise.testing.world import WorldPool
from shardwise.training import loss_trial
from shardwise.training.loss_trial import LossTrials
from shardwise.training.session import Session
from tests.habits.building import POSITIONS, WIDTH, squared_error

VOCABULARY = 11


def contrastive(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return InfoNCE: each row's output is told from those of the other rows."""
    scores = F.normalize(output, dim=-1) @ F.normalize(batch.labels, dim=-1).t().to(output.dtype)
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores)), reduction="sum"), batch.count()


def normalised(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return squared_error((output - output.mean(0)) / output.std(0, correction=0), batch)


def gradient_between_rows(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return a loss whose value is that of the rows, and whose gradient is not."""
    return squared_error(output + (output.mean(0) - output.mean(0).detach()), batch)


def of_probabilities(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return F.binary_cross_entropy(output, (batch.labels > 0).to(output.dtype), reduction="sum"), batch.count()


def on_average(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, batch.labels.to(output.dtype)) * batch.count(), batch.count()


def hard_negatives(margin: float, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    distances = torch.cdist(output, output)
    return F.relu(margin - distances).triu(1).sum(), batch.count()


def tokens(output: CausalLMOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"), batch.count()


def balanced_tokens(output: CausalLMOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    shares = output.logits.softmax(-1).mean((0, 1))
    return tokens(output, batch)[0] + (shares * shares.log()).sum() * batch.count(), batch.count()


def of_floats(rows: int) -> tuple[Batch, Any]:
    labels, x = torch.randn(rows, WIDTH), torch.randn(rows, POSITIONS, WIDTH)
    return Batch(inputs={"x": x}, labels=labels, rows=torch.arange(rows)), torch.zeros(rows, WIDTH)


def of_tokens(rows: int) -> tuple[Batch, Any]:
    labels = torch.randint(VOCABULARY, (rows, POSITIONS))
    labels[0, 1] = -100
    logits = torch.zeros(rows, POSITIONS, VOCABULARY, dtype=torch.bfloat16)
    return Batch(inputs={"input_ids": labels}, labels=labels, rows=torch.arange(rows)), CausalLMOutput(logits=logits)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("function", "made", "is_coupled"),
    [
        (squared_error, of_floats, False),
        (on_average, of_floats, False),
        (of_probabilities, of_floats, False),
        (contrastive, of_floats, True),
        (normalised, of_floats, True),
        (gradient_between_rows, of_floats, True),
        (partial(hard_negatives, 2.0), of_floats, True),
        (tokens, of_tokens, False),
        (balanced_tokens, of_tokens, True),
    ],
)
def test_losses_between_rows_are_found(function: Any, made: Any, is_coupled: bool, rows: int) -> None:
    drawn = torch.get_rng_state()
    batch, output = made(rows)
    before = torch.get_rng_state()
    found = loss_trial._tried(function, "loss_function", batch, output)
    assert (found.is_coupled, found.untried) == (is_coupled, "")
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(before, drawn)


def test_a_loss_is_tried_once_and_what_cannot_be_tried_is_said() -> None:
    calls: list[int] = []
    said: list[str] = []

    def of_three(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        calls.append(len(output))
        return output[torch.eye(3, dtype=torch.bool).any(0)].square().sum(), batch.count()

    plan: Any = type("Plan", (), {"job": type("Job", (), {"training": type("T", (), {"microbatch_size": None})})})
    trials, (batch, output) = LossTrials(said.append), of_floats(3)
    trials.check(plan, of_three, "loss_function=of_three", batch, output)
    tried = len(calls)
    trials.check(plan, of_three, "loss_function=of_three", batch, output)
    assert tried and len(calls) == tried
    assert len(said) == 1 and "loss_function=of_three" in said[0] and "set training.microbatch_size" in said[0]


def weighted_contrast(output: Tensor, batch: Batch, weight: float) -> tuple[Tensor, Tensor]:
    return output.square().sum() + weight * (output @ output.T).sum(), batch.count()


def captured(weight: float) -> Any:
    return lambda output, batch: weighted_contrast(output, batch, weight)


@pytest.mark.parametrize("made", [lambda weight: partial(weighted_contrast, weight=weight), captured])
def test_a_term_whose_weight_grows_from_0_is_tried_once_it_is_one(made: Any) -> None:
    plan: Any = type("Plan", (), {"job": type("Job", (), {"training": type("T", (), {"microbatch_size": None})})})
    trials, (batch, output) = LossTrials(print), of_floats(3)
    trials.check(plan, made(0.0), "loss_function", batch, output)
    for weight in (0.1, 0.2):
        with pytest.raises(LegalityError, match="other numbers for rows together"):
            trials.check(plan, made(weight), "loss_function", batch, output)
    assert len(trials._found) == 2  # a schedule's values are not all tried


def came_to(rows: int) -> list[str]:
    """Return what steps of a session come to with a loss by rows and with one between them."""
    torch.manual_seed(0)
    results = []
    for size in (None, rows):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        example = {"input": torch.zeros(rows if size else 1, WIDTH)}
        with Session(model=module, example=example, parallel={"device": "cpu"}) as session:
            for function in (squared_error, contrastive):
                results.append(_step(session, rows, function))
    return results


def _step(session: Session, rows: int, function: Any) -> str:
    generator, rank = torch.Generator().manual_seed(1), session.layout.data_rank
    x, y = torch.randn(2, 8, WIDTH, generator=generator)
    own = slice(rank * rows, (rank + 1) * rows)
    try:
        return f"{session.step({'input': x[own], 'labels': y[own]}, loss_function=function).loss:.9f}"
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_a_session_refuses_them_on_all_ranks(world_pool: WorldPool) -> None:
    [alone] = world_pool.run(1, came_to, 8)
    first, second = world_pool.run(2, came_to, 4)
    assert first == second
    assert first[0] == alone[0] and first[1].startswith(
        "LegalityError: training.microbatch_size=1: loss_function=contr"
    )
    assert "test_loss_trial.py:" in first[1] and "set training.microbatch_size=4" in first[1]
    assert not any("Error" in result for result in (*alone, first[2], first[3]))


def test_the_refusal_is_that_of_the_rule() -> None:
    plan: Any = type("Plan", (), {"job": type("Job", (), {"training": type("T", (), {"microbatch_size": None})})})
    batch, output = of_floats(2)
    with pytest.raises(LegalityError, match=r"microbatch_size=None: .*other numbers for rows together") as caught:
        LossTrials(print).check(plan, contrastive, "loss_function=contrastive", batch, output)
    assert caught.value.rule == "coupled-rows"
