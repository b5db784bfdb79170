"""From drawn weights to a restored checkpoint a rank uses its accelerator as it should, and keeps nothing back."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import staging
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.trace import life
from shardwise.testing.trace.life import RankLife, live
from shardwise.training.setup import study
from tests.fork_server import call
from tests.testing.trace.test_discipline import COVER
from tests.testing.trace.test_trace import AXES, settings

QUICK = ("sharded",)
WITH_BUFFERS = ("images for convolutions", "a module of one's own")


def life_of(sections: dict[str, Any]) -> RankLife:
    job = Job.model_validate(settings(64, **sections))
    facts = study(job)
    return live(resolve(job, World(16, "cuda", 8), facts), facts, 0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COVER]
)
def test_a_life_has_no_fault(name: str) -> None:
    found = call(life_of, COVER[name])
    assert found.faults == dict.fromkeys(found.faults, ())
    steady = set(list(found.alive.values())[1:])
    if name in WITH_BUFFERS:  # of which copies are written, that go with the checkpoint
        steady -= {found.alive["staging"]}
    assert len(found.alive) == 8 and len(steady) == 1, found.alive


# ---- on Apple's GPUs, which have no fp64, no streams, and one rank

EXPERTS = {"model": {"config": toy_config("qwen3_moe")}, "data": {"sequence_length": 16}}
ON_METAL: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": {"clip_norm": 0.5}, "training": {"microbatch_size": 1}},
    "experts": {**EXPERTS, "router": {"balancing_loss": "global", "balancing_coefficient": 0.01}},
    "experts by sequence": {**EXPERTS, "router": {"balancing_loss": "sequence", "balancing_coefficient": 0.01}},
    "preferences": AXES["preferences"],
    "preferences ahead of training": AXES["preferences ahead of training"],
    "offloaded": {"memory": {"activation_checkpointing": "full", "offload_activations": True}},
    "adapters": {"adapter": {"kind": "lora"}},
    **{name: COVER[name] for name in ("offloaded optimizer", "updates beside backward", "schedule-free")},
    **{name: {"optimizer": {"name": name}} for name in ("Adafactor", "Lion")},
}
READ_EARLY = ("experts by sequence",)  # sequences are counted ahead of a step, on every kind of device
QUICK_ON_METAL = ("clipped", "experts")


def life_on_metal(sections: dict[str, Any]) -> RankLife:
    job = Job.model_validate(settings(8, **{**sections, "parallel": {"device": "mps"}}))
    facts = study(job)
    return live(resolve(job, World(1, "mps", 1, gpus=1), facts), facts, 0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK_ON_METAL else pytest.param(name, marks=pytest.mark.slow) for name in ON_METAL]
)
def test_a_life_on_an_apple_gpu_has_no_fault(name: str) -> None:
    found = call(life_on_metal, ON_METAL[name])
    assert len(found.faults) == 8
    if name not in READ_EARLY:
        assert found.faults == dict.fromkeys(found.faults, ())
    after_first = list(found.alive.values())[1:]
    assert len(set(after_first)) == 1, found.alive


def with_sums_in_fp64(module: str, sections: dict[str, Any]) -> str:
    wide = mock.patch(f"shardwise.{module}.widest_float", lambda device: torch.float64)
    with wide, pytest.raises(TypeError) as caught:
        life_on_metal(sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("training.step", "clipped"),
        pytest.param("parallel.routers", "experts", marks=pytest.mark.slow),
        pytest.param("parallel.local_balancing", "experts by sequence", marks=pytest.mark.slow),
        pytest.param("data.batch", "preferences ahead of training", marks=pytest.mark.slow),
        pytest.param("training.optimizers.adafactor", "Adafactor", marks=pytest.mark.slow),
    ],
)
def test_a_sum_in_fp64_is_refused_there(module: str, name: str) -> None:
    assert "the MPS framework doesn't support float64" in call(with_sums_in_fp64, module, ON_METAL[name])


# ---- planted faults, each found in its chapter and at its line


def unpinned_restore(source: Any, part: Any, dtype: torch.dtype, item: Any, target: Tensor) -> None:
    target.copy_(torch.empty(tuple(target.shape), dtype=dtype), non_blocking=True)


def with_unpinned_restore() -> RankLife:
    with mock.patch.object(life, "read_box", unpinned_restore):
        return life_of({})


def unawaited(block: staging.StagingBlock) -> memoryview:
    return memoryview(block.memory.numpy())  # type: ignore[arg-type]


def unsettled(ring: staging.Staging) -> None:
    more = True
    while more:
        more = ring._fill()


def with_unawaited_blocks() -> RankLife:
    with (
        mock.patch.object(staging.StagingBlock, "content", unawaited),
        mock.patch.object(staging.Staging, "settle", unsettled),
    ):
        return life_of({})


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant, chapter, function",
    [(with_unpinned_restore, "restore", unpinned_restore), (with_unawaited_blocks, "staging", unawaited)],
)
def test_a_planted_fault_is_found(plant: Any, chapter: str, function: Any) -> None:
    found = call(plant)
    line = inspect.getsourcelines(function)[1] + 1
    guilty = {name for name, faults in found.faults.items() if faults}
    assert guilty == {chapter}
    assert any(fault.startswith(f"trace/test_life.py:{line} ") for fault in found.faults[chapter])
