"""Optimizer state in host memory: the same bits as without it, skipped steps undone, and the order of a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.model.facts import BlockFacts, ModelFacts
from shardwise.plan.optimizer_offload import offloaded_parameters
from shardwise.plan.plan import World, resolve
from shardwise.testing.world import WorldPool
from shardwise.training import host_updates
from shardwise.training.host_updates import HostUnit, HostUpdates
from shardwise.training.init import fingerprint
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import train_step
from tests.parity.jobs import facts_of, make_job

CPU = torch.device("cpu")
FREE = {"clip_norm": None}  # updates run beside backward


class AtOnce:
    """A thread's work, done when it is handed over."""

    def __init__(self, *of: Any) -> None:
        pass

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        work(*arguments)
        done.set_result(None)
        return done


def taken(run: AssembledJob, step: int, poisoned: bool = False) -> bool:
    """Take a step; whether it was skipped. The gradient that comes last may be poisoned."""
    embedding = run.model.tensor_map["transformer.wte.weight"].parameter
    hook = embedding.register_hook(lambda gradient: gradient * (float("inf") if poisoned else 1.0))
    run.optimizer.set_learning_rate(1e-2)
    result = train_step(run.model, run.objective, run.stream.batches(step), run.optimizer, run.scaler, step)
    hook.remove()
    return result.skipped


def ended(job: Job) -> tuple[str, str, list[bool]]:
    """Fingerprints of weights and optimizer state after three steps, of which the second is poisoned, and the skips."""
    run = set_up(job, CPU)
    skipped = [taken(run, step, poisoned=step == 1) for step in range(3)]
    states = [(entry.name, run.optimizer.inner.state[local]) for entry, local in run.optimizer.locals]
    named = [(f"{name} {key}", value) for name, state in states for key, value in state.items()]
    tensors = ((name, value.reshape(-1)) for name, value in named if isinstance(value, torch.Tensor))
    return fingerprint((e.name, e.local) for e in run.model.tensor_map), fingerprint(tensors), skipped


def endings(jobs: list[Job]) -> list[tuple[str, str, list[bool]]]:
    return [ended(job) for job in jobs]


CASES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "beside backward": {"optimizer": FREE},
    "microbatches, tied": {"optimizer": FREE, "training": {"gradient_accumulation": 2}, "tied": True},
    "fp16": {"optimizer": FREE, "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**20}}},
    "averages": {"optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant", **FREE}},
    "momentum": {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}, **FREE}},
    "groups": {"optimizer": {"groups": [{"parameters": ["transformer.h.1"], "optimizer": "Lion"}], **FREE}},
    "own class": {"optimizer": {"name": "tests.training.user_code:SignDescent", "weight_decay": 0.0, **FREE}},
    "frozen": {"optimizer": FREE, "model": {"freeze": ["transformer.h.2"]}},
}
QUICK = ("beside backward",)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_nothing_differs_by_a_bit(world_pool: WorldPool, corpora: Path, case: str) -> None:
    shares = [False, 0.5] if case in QUICK else [False, 0.01, 0.5, True]
    jobs = [make_job(corpora, memory={"offload_optimizer": share}, **CASES[case]) for share in shares]
    plain, *offloaded = world_pool.run(1, endings, jobs)[0]
    assert set(plain[2]) == {False, True}  # some step was skipped
    assert offloaded == [plain] * len(offloaded)


def order(job: Job) -> list[str]:
    """What happens in a step, block by block: gradients that come, updates, weights that are settled."""
    said: list[str] = []
    block_of = facts_of(job).block_of

    def told(word: str) -> Any:
        original = getattr(HostUpdates, word)

        def wrapper(self: HostUpdates, of: str | HostUnit, *more: Any) -> None:
            name = of if isinstance(of, str) else of.parameters[0].entry.name
            line = f"{word} {block_of.get(name, 'the rest').removeprefix('transformer.')}"
            if line not in said[-1:] and (word != "_settle" or self._returns):
                said.append(line)
            original(self, of, *more)

        return mock.patch.object(HostUpdates, word, wrapper)

    with mock.patch.object(host_updates, "ThreadPoolExecutor", AtOnce), ExitStack() as watched:
        for word in ("_reduced", "_update", "_settle"):
            watched.enter_context(told(word))
        taken(set_up(job, CPU), 0)
    return said


def orders(jobs: list[Job]) -> list[list[str]]:
    return [order(job) for job in jobs]


def test_updates_run_beside_backward_or_behind_the_norm(world_pool: WorldPool, corpora: Path) -> None:
    memory = {"offload_optimizer": True}
    jobs = [make_job(corpora, tied=False, memory=memory, optimizer=own) for own in (FREE, {})]
    beside, clipped = world_pool.run(1, orders, jobs)[0]
    blocks = ["h.2", "h.1", "h.0"]
    expected = [f"{word} {block}" for block in blocks for word in ("_reduced", "_update")]
    at = beside.index(expected[0])
    assert beside[at : at + 6] == expected  # a block is updated before the gradient of the one below comes
    assert beside.index("_update the rest") < beside.index("_settle h.2")
    assert not [line for line in clipped if line.startswith("_update")]
    assert clipped[-4:] == [f"_settle {block}" for block in (*blocks, "the rest")]


SHAPES = {"in.w": (4, 2), "a.w": (2, 2), "a.b": (2,), "b.w": (2, 2), "b.b": (2,), "out.w": (4, 2)}


def test_a_share_is_taken_whole_from_the_last_block_on() -> None:
    blocks = tuple(BlockFacts(name, 6) for name in ("a", "b"))
    facts = ModelFacts("Toy", 28, 0, blocks, dict.fromkeys(Axis, SUPPORTED), parameter_shapes=SHAPES)
    order = ["b.b", "b.w", "a.b", "a.w", "out.w", "in.w"]
    counts = [len(offloaded_parameters(facts, SHAPES, share)) for share in (0.0, 0.05, 0.22, 6 / 28, 1.0)]
    assert counts == [0, 1, 3, 2, 6]
    assert offloaded_parameters(facts, SHAPES, 1.0) == order
    assert offloaded_parameters(replace(facts, frozen=frozenset({"b.b"})), SHAPES, 0.01) == ["b.w"]


REFUSED: dict[str, dict[str, Any]] = {
    "optimizer.name=Muon": {"optimizer": {"name": "Muon"}},
    "AdamW8bit reads more": {"optimizer": {"groups": [{"parameters": ["transformer.h.1"], "optimizer": "AdamW8bit"}]}},
    "offload_parameters=True: offload_parameters keeps": {"memory": {"offload_parameters": True}},
    "capturable updates": {"optimizer": {"options": {"capturable": True}}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_updated_on_the_host_is_refused(corpora: Path, said: str) -> None:
    sections = {**REFUSED[said], "memory": {"offload_optimizer": 0.5, **REFUSED[said].get("memory", {})}}
    job = make_job(corpora, **sections)
    with pytest.raises(LegalityError, match=said) as refused:
        resolve(job, World(1, "cpu", 1), facts_of(job))
    assert "memory.offload_optimizer=0.5" in str(refused.value)
