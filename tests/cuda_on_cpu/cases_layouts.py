"""Losses, gradients and updates of every axis and family on devices of CUDA, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from tests.cuda_on_cpu.ranks import joined, verified
from tests.parity.jobs import make_module_job, span_job, tensor_job

FULL = {"activation_checkpointing": "full"}
OFFLOADED = {**FULL, "offload_activations": True, "offload_parameters": True}


AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "sharded": (2, {}),
    "replicas": (4, {"parallel": {"sharded_data_parallel_degree": 2}}),
    "zero1": (2, {"parallel": {"shard_optimizer_state": True}}),
    "tensor": (2, {"parallel": {"tensor_parallel_degree": 2}}),
    "sequence parallel": (2, {"parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True}}),
    "ulysses": (2, {"parallel": {"context_parallel_degree": 2, "context_parallel_method": "ulysses"}}),
    "ring": (2, {"parallel": {"context_parallel_degree": 2, "context_parallel_method": "ring"}}),
    "gathered keys": (2, {"parallel": {"context_parallel_degree": 2, "context_parallel_method": "all_gather"}}),
    "1F1B": (2, {"parallel": {"pipeline_parallel_degree": 2}}),
    "virtual stages": (2, {"parallel": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}}),
    "in a V": (2, {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}}),
    "GPipe": (2, {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "simple"}}),
    "zero bubble": (2, {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}}),
    "tensor and stages": (4, {"parallel": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}}),
    "checkpointed": (2, {"memory": FULL}),
    "activations on the host": (2, {"memory": {**FULL, "offload_activations": True}}),
    "all on the host": (2, {"memory": OFFLOADED}),
    "documents": (2, {"data": {"isolate_documents": True}}),
    "accumulated": (2, {"training": {"gradient_accumulation": 2}}),
}
SCALED = ("replicas", "tensor", "1F1B", "all on the host", "accumulated")  # also in fp16, by its loss scale
FAMILIES = ("gpt2", "gpt_neox", "bert", "mixtral", "bloom", "falcon")


def check(pool: WorldPool, ranks: int, job: Job, backend: str = "nccl") -> None:
    report = pool.run(ranks, joined, verified, job, backend)[0]
    assert report.agrees, (report.first, report.diagnosis)


def settings(sections: dict[str, Any], compute: str = "fp32", **model: Any) -> dict[str, Any]:
    """On the GPU, by an optimizer that does not magnify rounding, with attention as the GPU has it."""
    base: dict[str, dict[str, Any]] = {
        "parallel": {"device": "cuda"},
        "precision": {"compute": compute},
        "optimizer": {"name": "SGD", "learning_rate": 0.1, "clip_norm": 0.5},
        "model": {"attention": "auto", **model},
    }
    return base | {name: {**base.get(name, {}), **keys} for name, keys in sections.items()}


@pytest.mark.parametrize("axis, compute", [*((axis, "fp32") for axis in AXES), *((axis, "fp16") for axis in SCALED)])
def test_axes(world_pool: WorldPool, corpora: Path, axis: str, compute: str) -> None:
    ranks, sections = AXES[axis]
    dropout = 0.0 if axis == "ring" else 0.1  # which drops in eager arithmetic alone
    check(world_pool, ranks, tensor_job(corpora, "llama", layers=4, dropout=dropout, **settings(sections, compute)))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(world_pool: WorldPool, corpora: Path, family: str) -> None:
    sections = settings(AXES["tensor"][1], "bf16")
    del sections["model"]
    check(world_pool, 2, tensor_job(corpora, family, **sections))


def test_spans_and_a_module_of_ones_own(world_pool: WorldPool, corpora: Path) -> None:
    sections = {"parallel": {"device": "cuda"}, "precision": {"compute": "fp32"}}
    check(world_pool, 2, span_job(corpora, **sections))
    check(world_pool, 2, make_module_job(corpora, **sections))


@pytest.mark.parametrize("kernel", ["eager", "blockwise", "flash", "efficient"])
def test_kernels_of_attention(world_pool: WorldPool, corpora: Path, kernel: str) -> None:
    check(world_pool, 1, tensor_job(corpora, "llama", config={"head_dim": 8}, **settings({}, "bf16", attention=kernel)))


@pytest.mark.parametrize("axis", ["sharded", "tensor", "1F1B"])
def test_ranks_that_share_a_gpu(world_pool: WorldPool, corpora: Path, axis: str) -> None:
    check(world_pool, 2, tensor_job(corpora, "llama", **settings(AXES[axis][1])), "shardwise")
