"""Ranks that use different parameters or blocks train like one process, or are refused on all ranks at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from shardwise.collectives import registration
from shardwise.errors import ModelError
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.parallel import own_modules
from tests.parity.jobs import make_module_job

STEPS, ROWS, DECAY, RATE = 3, 8, 0.1, 0.05


def job(directory: str, name: str, **sections: dict[str, Any]) -> Any:
    here = "tests.parallel.own_modules"
    optimizer = {"name": "AdamW", "learning_rate": RATE, "weight_decay": DECAY, "schedule": "constant",
                 "clip_norm": 0.5, "warmup_steps": 0}  # fmt: skip
    fixed = {
        "model": {"factory": f"{here}:{name}", "loss": f"{here}:squares"},
        "data": {"factory": f"{here}:Rows", "validation_fraction": 0.2},
        "training": {"steps": STEPS, "sequences_per_step": ROWS, "microbatch_size": 2},
        "optimizer": optimizer,
    }
    return make_module_job(directory, **fixed, **sections)


def largest_errors(directory: str, name: str, sections: dict[str, Any]) -> float:
    """Train with shardwise and with torch alone; return the largest relative error of a parameter on this rank."""
    torch.manual_seed(0)
    run = set_up(job(directory, name, **sections), torch.device("cpu"))
    module = getattr(own_modules, name)().double()
    module.load_state_dict({key: value.clone() for key, value in run.model.whole_tensors()})
    matrices = [value for value in module.parameters() if value.dim() >= 2]
    vectors = [value for value in module.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    for step in range(STEPS):
        batches = list(run.stream.batches(step))
        run.optimizer.set_learning_rate(RATE)
        train_step(run.model, run.objective, batches, run.optimizer, run.scaler, step)
        optimizer.zero_grad()
        for batch in every_rank(batches):
            sums, _ = own_modules.squares(module(x=batch.inputs["x"].double()), batch)
            (sums / ROWS).backward()
        clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = dict(module.named_parameters())
    errors = [
        (value - expected[key]).abs().max() / expected[key].abs().max() for key, value in run.model.whole_tensors()
    ]
    return float(torch.stack(errors).max())


def every_rank(batches: list[Any]) -> list[Any]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, batches)
    return [batch for rank in everyone for batch in rank]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["ChosenParameters", "ChosenBlocks"])
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (2, {}),
        (4, {"parallel": {"sharded_data_parallel_degree": 2}}),
        (2, {"parallel": {"shard_optimizer_state": True}}),
    ],
)
def test_what_a_rank_does_not_use_takes_part_with_zeros(
    world_pool: WorldPool, corpora: Path, name: str, ranks: int, sections: dict[str, Any]
) -> None:
    assert max(world_pool.run(ranks, largest_errors, str(corpora), name, sections)) < 1e-9


def test_weights_without_a_gradient_do_not_decay(world_pool: WorldPool, corpora: Path) -> None:
    """FSDP2 would make zeros of the gradients of an argument that blocks ignore."""
    assert max(world_pool.run(2, largest_errors, str(corpora), "IgnoredArgument", {})) < 1e-9


def moved_parameters(directory: str) -> set[str]:
    """Train a step in bf16 whose gradients are added up before one reduction; return what it has moved."""
    sections: dict[str, Any] = {"precision": {"compute": "bf16"}, "parallel": {"sharded_data_parallel_degree": 1}}
    run = set_up(job(directory, "SkippedBlock", **sections), torch.device("cpu"))
    assert run.model.plan.adds_whole and run.model.plan.accumulation > 1
    before = dict(run.model.whole_tensors())
    run.optimizer.set_learning_rate(RATE)
    train_step(run.model, run.objective, list(run.stream.batches(0)), run.optimizer, run.scaler, 0)
    return {key for key, value in run.model.whole_tensors() if not torch.equal(value, before[key])}


def test_a_block_that_never_ran_stays_as_it_is(world_pool: WorldPool, corpora: Path) -> None:
    for moved in world_pool.run(2, moved_parameters, str(corpora)):
        assert "blocks.2.up.weight" in moved and not [name for name in moved if name.startswith("blocks.3.")], moved


def message_of(directory: str, name: str) -> str:
    run = set_up(job(directory, name), torch.device("cpu"))
    before = dict(run.model.whole_tensors())
    with pytest.raises(ModelError) as caught:
        train_step(run.model, run.objective, list(run.stream.batches(0)), run.optimizer, run.scaler, 0)
    assert all(torch.equal(value, before[key]) for key, value in run.model.whole_tensors())
    return str(caught.value)


def message_on_engine(directory: str, store: str, name: str, sections: dict[str, Any]) -> str:
    """Train on the native engine until the ranks are out of step; return what this rank raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # Gloo hangs on a rank that still connects when its peer closes
    dist.destroy_process_group()
    registration.register()
    dist.init_process_group("shardwise", store=dist.FileStore(store, size), rank=rank, world_size=size)
    run = set_up(job(directory, name, **sections), torch.device("cpu"))
    with pytest.raises(ModelError) as caught:
        for step in range(STEPS):
            train_step(run.model, run.objective, list(run.stream.batches(step)), run.optimizer, run.scaler, step)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "name", "sections"),
    [
        (2, "LateOrder", {}),
        pytest.param(2, "LateRepetition", {}, marks=pytest.mark.slow),
        pytest.param(4, "LateRepetition", {"parallel": {"sharded_data_parallel_degree": 2}}, marks=pytest.mark.slow),
    ],
)
def test_the_engine_names_the_units_of_ranks_that_are_out_of_step(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, ranks: int, name: str, sections: dict[str, Any]
) -> None:
    arguments = str(corpora), str(tmp_path / "store"), name, sections
    for message in world_pool.run(ranks, message_on_engine, *arguments, timeout=60):
        pattern = r"^the ranks are out of step: ranks? .* of blocks\.\d over \w+; ranks? .*\. A rank may skip blocks"
        assert re.search(pattern, message), message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ChosenOrder", "different orders: nothing on rank 0 where rank 1 has forward of blocks"),
        ("LateClamped", "writes the parameter outlet.weight"),
    ],
)
def test_what_cannot_be_in_step_is_refused_on_all_ranks(
    world_pool: WorldPool, corpora: Path, name: str, text: str
) -> None:
    messages = world_pool.run(2, message_of, str(corpora), name)
    assert messages[0] == messages[1]
    assert re.search(text, messages[0]), messages
