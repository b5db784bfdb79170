"""torch.compile per block changes no number: the compiled model against the untouched one in one process.

Llama's norms and softmax compute in fp32 even in an fp64 model, and the compiler rounds those otherwise: it is compared
in fp32.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job, tensor_job, verify_one

FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
CHECKPOINTED: dict[str, Any] = {**FP32, "memory": {"activation_checkpointing": "full"}, "tied": False}


def verify_graphs(job: Job) -> VerifyReport | None:
    """The graphs that the compiler takes, run operator by operator instead of by kernels that it would write."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        return verify_one(job, 2)


@pytest.mark.slow
def test_a_model_of_graphs_agrees(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, "llama", layers=1, model={"compile": True}, tied=False, **FP32)
    report = world_pool.run(2, verify_graphs, job)[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


@pytest.mark.timeout(900)  # the compiler is slow on a busy machine
@pytest.mark.parametrize(
    "family, sections",
    [
        pytest.param("gpt2", {"dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param("llama", CHECKPOINTED, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_agrees(world_pool: WorldPool, corpora: Path, family: str, sections: dict[str, Any]) -> None:
    job = make_job(corpora, family, layers=1, model={"compile": True}, **sections)
    report = world_pool.run(2, verify_one, job, 2, timeout=800)[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, depth", [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_a_compiled_model_with_split_tensors_agrees(
    world_pool: WorldPool, corpora: Path, family: str, depth: str
) -> None:
    job = tensor_job(
        corpora, family, config={depth: 1}, parallel={"tensor_parallel_degree": 2}, model={"compile": True}, **FP32
    )
    report = world_pool.run(2, verify_one, job, 2, timeout=800)[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


SPLIT: dict[str, dict[str, Any]] = {
    "sequence": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "context": {"context_parallel_degree": 2},
    "ring": {"context_parallel_degree": 2, "context_parallel_method": "ring"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axis", SPLIT)
@pytest.mark.parametrize("family, depth", [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_a_compiled_model_with_split_sequences_agrees(
    world_pool: WorldPool, corpora: Path, family: str, depth: str, axis: str
) -> None:
    """A graph ends where ranks exchange, and the next begins behind it; one time with recomputation in backward."""
    more: dict[str, Any] = {"dropout": 0.1} if family == "gpt2" else {"memory": {"activation_checkpointing": "full"}}
    job = tensor_job(corpora, family, config={depth: 2}, parallel=SPLIT[axis], model={"compile": True}, **FP32, **more)
    report = world_pool.run(2, verify_one, job, 2, timeout=800)[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)
