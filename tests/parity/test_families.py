"""Every family on every combination of axes of the compatibility page, against one process (`pytest -m slow`).

The shapes are awkward on purpose, in each family: a vocabulary (97) and an MLP that no degree divides, blocks that the
stages do not divide, a sequence of 13, a ragged last microbatch, dropout, and fewer key-value heads than tensor ranks
where a family has some. By default a family meets its axes in test_tensor, test_pipeline, test_context, test_sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, t5_job, tensor_job

FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
TENSOR, STAGES, SHARD = (
    {f"{axis}_degree": 2} for axis in ("tensor_parallel", "pipeline_parallel", "sharded_data_parallel")
)
CONTEXT = {"context_parallel_degree": 2}
# Ranks, parallel section, blocks.
COMBINATIONS: dict[str, tuple[int, dict[str, Any], int]] = {
    "tensor 2": (2, TENSOR, 2),
    "tensor 4": (4, {"tensor_parallel_degree": 4}, 2),
    "pipeline 2": (2, STAGES, 3),
    "pipeline 4": (4, {"pipeline_parallel_degree": 4}, 5),
    "pipeline 4 interleaved": (4, {"pipeline_parallel_degree": 4, "virtual_pipeline_degree": 2}, 9),
    "context 2": (2, CONTEXT, 2),
    "tensor 2, pipeline 2, shard 2": (8, {**TENSOR, **STAGES, **SHARD}, 3),
    "context 2, tensor 2, shard 2": (8, {**CONTEXT, **TENSOR, **SHARD}, 2),
}
# In fp64 the eager attention of these takes its softmax in fp32, so that rounding hides what fp64 would show.
IN_FP32 = ("gpt_neox", "llama", "mistral", "qwen3", "gemma", "gptj", "gpt_neo", "opt", "bloom", "falcon")
FAMILIES = ("gpt2", "bert", "roberta", *IN_FP32)
# Their attention goes through transformers' AttentionInterface where a kernel is asked for.
BY_KERNELS = ("gptj", "gpt_neo", "bloom", "falcon")
KEY_VALUE_HEADS = {family: {"num_key_value_heads": 2} for family in ("llama", "mistral", "qwen3", "gemma")}


def awkward_job(corpora: Path, family: str, parallel: dict[str, Any], layers: int) -> Job:
    stages = parallel.get("pipeline_parallel_degree", 1)
    # Whole turns of interleaved stages; the last microbatch of the others is ragged.
    sequences = {
        "sequences_per_step": 4 * stages - (parallel.get("virtual_pipeline_degree") is None),
        "microbatch_size": 2,
    }
    sections: dict[str, Any] = {"parallel": parallel, "layers": layers, "dropout": 0.1, "training": sequences}
    if "sharded_data_parallel_degree" in parallel:
        sequences["sequences_per_step"] = 8 * stages - 1
    if family in BY_KERNELS and "context_parallel_degree" in parallel:
        sections["model"] = {"attention": "auto"}
    if family in IN_FP32:
        sections |= FP32
    return tensor_job(corpora, family, config=KEY_VALUE_HEADS.get(family), data={"sequence_length": 13}, **sections)


CASES = [(family, combination) for family in FAMILIES for combination in COMBINATIONS]


@pytest.mark.slow
@pytest.mark.parametrize("family, combination", CASES)
def test_agrees_with_one_process(world_pool: WorldPool, corpora: Path, family: str, combination: str) -> None:
    ranks, parallel, layers = COMBINATIONS[combination]
    check_agrees(world_pool, ranks, awkward_job(corpora, family, parallel, layers))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, parallel", [(2, TENSOR), (4, {"tensor_parallel_degree": 4}), (4, {**TENSOR, **SHARD})])
def test_an_encoder_and_a_decoder_agree_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    sequences = {"sequences_per_step": 7, "microbatch_size": 2}
    check_agrees(world_pool, ranks, t5_job(corpora, parallel=parallel, training=sequences, **FP32))
