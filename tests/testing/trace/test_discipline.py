"""A step uses its accelerator as it should, in every axis, precision, memory policy, optimizer and objective.

What a rank does with a simulated accelerator is seen operator by operator: the host may wait for it, or bring it
values, in the places alone that `exempt` names, and at those reads that are counted here.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.search.search import world_of
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.trace.job import trace_job
from shardwise.testing.trace.program import HostWork, Joined, Read
from shardwise.testing.trace.rank import RankTrace
from shardwise.testing.trace.step_time import step_time
from shardwise.training import step as training_step
from tests.fork_server import call
from tests.testing.trace.test_trace import AXES, NEOX, OWN_SHAPES, settings, traced_here

WIDE = NEOX | {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192}
HABITS = "tests.habits"
OFFLOADED_OPTIMIZER = {"memory": {"offload_optimizer": True}}
COVER: dict[str, dict[str, Any]] = {
    **AXES,
    **OWN_SHAPES,
    "everything at once": {
        "parallel": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": True},
        "memory": {"activation_checkpointing": "full", "offload_activations": True},
    },
    "context and replicas": {"parallel": {"context_parallel_degree": 2, "sharded_data_parallel_degree": 4}},
    "fp16": {"precision": {"compute": "fp16"}},
    "fp32": {"precision": {"compute": "fp32"}},
    "experts": {
        "model": {"config": toy_config("qwen3_moe")},
        "parallel": {"expert_parallel_degree": 2},
        "data": {"sequence_length": 16},
    },
    "adapters": {"adapter": {"kind": "lora"}},
    "offloaded parameters": {"memory": {"offload_parameters": True}},
    "offloaded optimizer": OFFLOADED_OPTIMIZER,
    "updates beside backward": {**OFFLOADED_OPTIMIZER, "optimizer": {"clip_norm": None}},
    **{name: {"optimizer": {"name": name}} for name in ("AdamW8bit", "AdamWBf16", "Adafactor", "Lion")},
    "Muon": {"optimizer": {"name": "Muon"}, "parallel": {"tensor_parallel_degree": 2}},
    "checkpoints of its own": {
        "model": {"factory": f"{HABITS}.modules:OwnCheckpoints", "loss": f"{HABITS}.building:squared_error"},
        "data": {"factory": f"{HABITS}.building:Rows"},
    },
    "schedule-free": {"optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant"}},
}
QUICK = ("sharded", "everything at once", "updates beside backward", "checkpoints of its own")


def step_on_accelerators(sections: dict[str, Any]) -> RankTrace:
    return traced_here(settings(64, **sections), 16, 0, "cuda").ranks[0]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COVER]
)
def test_a_step_has_no_fault(name: str) -> None:
    trace = call(step_on_accelerators, COVER[name])
    assert trace.faults == ()
    waits = Counter(entry.line.rpartition(":")[0] for entry in trace.program if isinstance(entry, Read))
    assert waits.pop("training/step.py") == 1  # for its values, once on every layout
    # How many rows go to each rank of experts is known by the routes alone: two layers, two microbatches.
    assert waits == ({"parallel/experts_at_once.py": 2 * 2} if name == "experts" else {})


# ---- updates in host memory, in time


def seconds_of(sections: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of (the step, what the host's thread computes, all that hosts compute) on four nodes of A100."""
    where = cluster("p4d.24xlarge:4")
    job = Job.model_validate(settings(128, model={"config": WIDE}, **sections))
    facts = discover(build_model(job), job)
    trace = trace_job(job, world_of(where), facts, 0, processes=1)
    clock = step_time(trace, facts, where).clocks[0]
    (rank,) = trace.ranks
    beside = sum(entry.bytes for entry in rank.program if isinstance(entry, HostWork) and entry.beside)
    assert bool(beside) == any(isinstance(entry, Joined) for entry in rank.program)
    return max(clock.host, clock.computation, clock.thread), clock.thread, clock.hosting


def test_updates_in_host_memory_go_on_beside_backward() -> None:
    """The timeline of three jobs: without offload, with updates that wait for the norm, and beside backward."""
    plain, _, _ = call(seconds_of, {})
    waiting, no_thread, hosting = call(seconds_of, COVER["offloaded optimizer"])
    beside, thread, as_much = call(seconds_of, COVER["updates beside backward"])
    assert no_thread == 0 < thread <= beside
    assert as_much > hosting  # the state before an update is kept, since the step may be skipped
    assert plain < beside < waiting


# ---- planted faults of a step


def norm_on_the_host(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.double().cpu().square().sum() for gradient in gradients]).sum()


def norm_that_is_read(gradients: list[Tensor]) -> Tensor:
    return torch.tensor(sum(gradient.norm().item() ** 2 for gradient in gradients), device=gradients[0].device)


def planted(function: Any) -> tuple[str, ...]:
    with mock.patch.object(training_step, "_sum_of_squares", function):
        return step_on_accelerators({}).faults


def test_a_planted_copy_of_gradients_to_the_host_is_found_at_its_line() -> None:
    line = inspect.getsourcelines(norm_on_the_host)[1] + 1
    assert any(fault.startswith(f"trace/test_discipline.py:{line} ") for fault in call(planted, norm_on_the_host))


def test_an_operator_of_a_device_alone_is_refused_with_its_line() -> None:
    model = {"factory": f"{HABITS}.modules:Recurrent", "loss": f"{HABITS}.building:squared_error"}
    with pytest.raises(ConfigError, match=r"cannot follow aten::\w+, which a device computes .*modules\.py:\d+"):
        call(step_on_accelerators, {"model": model, "data": {"factory": f"{HABITS}.building:Rows"}})


def test_a_planted_read_of_a_value_is_refused_with_its_line() -> None:
    line = inspect.getsourcelines(norm_that_is_read)[1] + 1
    with pytest.raises(ConfigError, match=f"asks for the values of tensors .*test_discipline.py:{line}"):
        call(planted, norm_that_is_read)


def unpinned(batch: Batch, device: Any) -> Batch:
    moved = batch.labels.to(device, non_blocking=True)  # type: ignore[union-attr]
    return replace(move(batch, device), labels=moved)


move = Batch.to


def with_unpinned_labels() -> tuple[str, ...]:
    with mock.patch.object(Batch, "to", unpinned):
        return step_on_accelerators({}).faults


def test_a_batch_from_unpinned_memory_is_found_at_its_line() -> None:
    line = inspect.getsourcelines(unpinned)[1] + 1
    (fault,) = call(with_unpinned_labels)
    assert fault.startswith(f"trace/test_discipline.py:{line} (unpinned): a copy that must not wait")
