"""Models and batches that are no language models': the script's own classes, frozen weights, halved buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.errors import LegalityError
from shardwise.testing.world import WorldPool
from tests.fork_server import run_python

SCRIPT = Path(__file__).with_name("detection_script.py")
TWO: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


def _train(options: dict[str, Any], workers: int, place: Path) -> tuple[Tensor, Tensor]:
    """[steps, losses] of a run, and of its last steps once more from its files."""
    command = ["-m", "shardwise", "run", "--device", "cpu", "--workers", workers]
    done = run_python(*command, "--smp-options", json.dumps(options), "--model-dir", place, SCRIPT)
    assert done.returncode == 0, done.stderr
    whole, rest = json.loads((place / "losses.json").read_text())
    return torch.tensor(whole), torch.tensor(rest)


@pytest.mark.slow
def test_batches_of_own_classes_train_alike_and_go_on(tmp_path: Path) -> None:
    whole, rest = _train({"microbatches": 2}, 1, tmp_path)
    assert bool((whole[-1] < whole[0]).all()) and torch.equal(whole[-len(rest) :], rest)
    other, again = _train({"microbatches": 2, "ddp": True}, 2, tmp_path)
    torch.testing.assert_close(other, whole, rtol=2e-2, atol=0)
    assert torch.equal(other[-len(again) :], again)


class Scaled(nn.Module):
    """A buffer between two layers, as that of a frozen normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(values) * self.scale)
        return found


@smp.step
def _step(model: Any, values: Tensor) -> Tensor:
    loss: Tensor = model(values).float().mean()
    model.backward(loss)
    return loss


def _halved(options: dict[str, Any]) -> tuple[float, torch.dtype, float]:
    """Loss and buffer's dtype of a halved model, and the loss of the same in plain torch."""
    smp.init(options)
    try:
        torch.manual_seed(3)
        module, values = Scaled().half(), torch.ones(4, 4).half()
        plain = float(module(values).float().mean())
        model: Any = smp.DistributedModel(module)
        loss = _step(model, values).reduce_mean()
        return float(loss), model.get_module().scale.dtype, plain
    finally:
        smp.state.reset()


@pytest.mark.parametrize("options", [{"ddp": True}, {"ddp": True, "sharded_data_parallel_degree": 2}, TWO])
def test_buffers_of_a_halved_model_stay_halves(world_pool: WorldPool, options: dict[str, Any]) -> None:
    for loss, dtype, plain in world_pool.run(2, _halved, options):
        assert dtype == torch.float16 and abs(loss - plain) <= 1e-3 * abs(plain)


class Rows:
    """A batch that cuts itself, and is no tensor."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def smp_slice(self, count: int, index: int, axis: int) -> Rows:
        return Rows(self.values.chunk(count, axis)[index])


class OfRows(Scaled):
    def forward(self, rows: Any) -> Tensor:
        return super().forward(rows.values)


def _staged() -> str:
    smp.init(TWO)
    try:
        _step(smp.DistributedModel(OfRows()), Rows(torch.ones(4, 4)))
    except LegalityError as error:
        return str(error)
    finally:
        smp.state.reset()
    return ""


def test_an_argument_that_stages_cannot_be_cut_with_is_named(world_pool: WorldPool) -> None:
    for said in world_pool.run(2, _staged):
        assert "argument 'rows' of the forward is of class Rows" in said and "use 1" in said
