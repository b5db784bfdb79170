"""Whole runs on devices of CUDA: steps, evaluation, checkpoints and what is resumed from them, against a CPU's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizers import ELEMENTWISE
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from tests.cuda_on_cpu.ranks import joined, starved, trained, trained_on_cpu
from tests.parity.jobs import make_job

FAMILY = "gpt2" if "PLAYED_CUDA" in os.environ else "llama"  # a GPU's dropout is not a CPU's: there none
FULL = {"activation_checkpointing": "full"}
RUNS: dict[str, dict[str, Any]] = {
    "saved while training waits": {"checkpoint": {"asynchronous": False}},
    "deterministic": {"training": {"deterministic": True}},
    "foreach": {"optimizer": {"options": {"foreach": True}}},
    "fp16": {"precision": {"compute": "fp16"}, "optimizer": {"name": "SGD"}},
    "all on the host": {"memory": {**FULL, "offload_parameters": True, "offload_activations": True}},
    "the optimizer on the host": {"memory": {"offload_optimizer": True}},
    "half of it, beside backward": {
        "memory": {"offload_optimizer": 0.5},
        "optimizer": {"clip_norm": None},
        "training": {"gradient_accumulation": 2},
    },
    "the same in fp16": {
        "memory": {"offload_optimizer": True},
        "optimizer": {"clip_norm": None, "name": "SGD", "options": {"momentum": 0.9}},
        "precision": {"compute": "fp16"},
    },
    "zero1": {"parallel": {"shard_optimizer_state": True}},
    "tensor": {"parallel": {"tensor_parallel_degree": 2}},
    "stages": {"parallel": {"pipeline_parallel_degree": 2}},
}


def jobs(corpora: Path, output: Path, device: str, *steps: int, **sections: dict[str, Any]) -> list[Job]:
    """A job that goes on from its checkpoint for every number of `steps`."""
    base: dict[str, dict[str, Any]] = {
        "parallel": {"device": device},
        "precision": {"compute": "fp32"},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "training": {"sequences_per_step": 8, "evaluate_every": 2},
        "checkpoint": {"every": 2},
    }
    base |= {name: {**base.get(name, {}), **keys} for name, keys in sections.items()}
    made = []
    for number, count in enumerate(steps):
        base["training"]["steps"], base["checkpoint"]["resume"] = count, "auto" if number else "none"
        made.append(make_job(corpora, FAMILY, **base).model_copy(update={"output": str(output)}))
    return made


def check(pool: WorldPool, corpora: Path, output: Path, ranks: int = 2, skipped: int = 0, **sections: Any) -> None:
    ours = pool.run(ranks, joined, trained, jobs(corpora, output / "cuda", "cuda", 2, 4, **sections))[0]
    theirs = pool.run(ranks, trained_on_cpu, jobs(corpora, output / "cpu", "cpu", 4, **sections))[0]
    precise = {"fp16": 1e-2}.get(sections.get("precision", {}).get("compute", ""), 1e-4)
    for key, count in (("loss", 4), ("grad_norm", 4 - skipped), ("validation_loss", 2)):
        mine, other = ({r["step"]: r[key] for r in records if r.get(key) is not None} for records in (ours, theirs))
        assert len(mine) == count and mine == pytest.approx(other, rel=precise), key


@pytest.mark.parametrize("name", [*ELEMENTWISE, *RECORDS])
def test_optimizers(world_pool: WorldPool, corpora: Path, tmp_path: Path, name: str) -> None:
    more: dict[str, Any] = {"Rprop": {"weight_decay": 0.0}, "ScheduleFreeAdamW": {"schedule": "constant"}}
    check(world_pool, corpora, tmp_path, optimizer={"name": name, **more.get(name, {})})


@pytest.mark.parametrize("name", RUNS)
def test_runs(world_pool: WorldPool, corpora: Path, tmp_path: Path, name: str) -> None:
    check(world_pool, corpora, tmp_path, **RUNS[name])


@pytest.mark.parametrize("optimizer", [{}, {"clip_norm": None}, {"options": {"foreach": True}}])
@pytest.mark.parametrize("precision", [{}, {"compute": "fp16", "loss_scale": {"init_scale": 2.0**20}}])
def test_one_rank(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, optimizer: dict[str, Any], precision: dict[str, Any]
) -> None:
    check(world_pool, corpora, tmp_path, 1, 2 if precision else 0, optimizer=optimizer, precision=precision)


@pytest.mark.parametrize("precision", [{}, {"compute": "fp16", "loss_scale": {"init_scale": 2.0**20}}])
@pytest.mark.parametrize("optimizer", [{}, {"clip_norm": None}])
def test_an_optimizer_on_the_host_is_one_on_the_device(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, optimizer: dict[str, Any], precision: dict[str, Any]
) -> None:
    found = []
    for share in (False, 0.5, True):
        sections: dict[str, Any] = {"memory": {"offload_optimizer": share}, "optimizer": optimizer}
        ours = jobs(corpora, tmp_path / str(share), "cuda", 2, 4, precision=precision, **sections)
        records = world_pool.run(2, joined, trained, ours)[0]
        found.append([record[key] or 0.0 for record in records if "loss" in record for key in ("loss", "grad_norm")])
    on_device, *on_host = found
    precise = 0 if "PLAYED_CUDA" in os.environ else 1e-3  # the played device's kernels are the CPU's
    assert len(on_device) == 8 and all(one == pytest.approx(on_device, rel=precise, abs=0) for one in on_host)


@pytest.mark.parametrize("memory", [{}, {**FULL, "offload_parameters": True, "offload_activations": True}])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_resumed_is_bit_for_bit_what_went_on(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, memory: dict[str, Any], asynchronous: bool
) -> None:
    sections: dict[str, Any] = {
        "training": {"deterministic": True},
        "checkpoint": {"asynchronous": asynchronous},
        "memory": memory,
    }
    resumed, whole = (
        world_pool.run(2, joined, trained, jobs(corpora, tmp_path / str(len(steps)), "cuda", *steps, **sections))[0]
        for steps in ((2, 4), (4,))
    )
    for key in ("loss", "grad_norm"):
        ours, theirs = ({r["step"]: r[key] for r in records if r.get(key) is not None} for records in (resumed, whole))
        assert len(ours) == 4 and ours == theirs, key


def test_a_gpu_without_memory_says_what_it_holds(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    [said] = world_pool.run(1, joined, starved, jobs(corpora, tmp_path, "cuda", 2))
    assert "out of memory" in said
    assert re.search(r"the allocator's peak [\d.]+ .iB, reserved [\d.]+ .iB, of [\d.]+ GiB on the device", said)
