"""Kernels of ours in whole steps against one untouched process: documents with windows, tensor ranks, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, tensor_job

DOCUMENTS: dict[str, Any] = {"data": {"isolate_documents": True}}
WINDOW: dict[str, Any] = {"config": {"sliding_window": 4}}
TENSOR: dict[str, Any] = {"parallel": {"tensor_parallel_degree": 2}}
SEQUENCE: dict[str, Any] = {"parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True}}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
FULL: dict[str, Any] = {"memory": {"activation_checkpointing": "full"}}
SELECTIVE: dict[str, Any] = {"memory": {"activation_checkpointing": "selective"}}
TERMS: dict[str, Any] = {"training": {"sequences_per_step": 8, "label_smoothing": 0.1, "z_loss": 1e-2}}
ALIBI: dict[str, Any] = {
    "config": {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}
}
CASES: list[tuple[str, str, dict[str, Any]]] = [  # family, kernel, settings
    ("mistral", "auto", {**DOCUMENTS, **WINDOW}),
    ("gpt2", "auto", {**DOCUMENTS, **FULL, "dropout": 0.1}),
    ("gpt2", "blockwise", {**TENSOR, **SELECTIVE, "dropout": 0.1}),
    ("gpt_neo", "auto", {**DOCUMENTS, **TENSOR, **FP32, "dropout": 0.1}),
    ("gptj", "auto", {**SEQUENCE, **FP32, "dropout": 0.1}),
    ("bloom", "auto", {**TENSOR, **FP32, "dropout": 0.1}),
    ("falcon", "auto", {**TENSOR, **ALIBI}),
    ("bert", "auto", {**DOCUMENTS, **SEQUENCE}),
    ("gpt2", "auto", {**TENSOR, **TERMS}),  # a loss of parts of the vocabulary
    (
        "gemma",
        "auto",
        {**TERMS, **FP32, "config": {"model_type": "gemma2", "query_pre_attn_scalar": 8}},
    ),  # whole logits
]
SLOW: list[tuple[str, str, dict[str, Any]]] = [
    ("mistral", "eager", {**DOCUMENTS, **WINDOW, **FP32}),
    ("gptj", "sdpa", {**TENSOR, **FP32, **DOCUMENTS}),
    ("bloom", "eager", {**DOCUMENTS, **FP32, "dropout": 0.1}),
    ("falcon", "auto", {**DOCUMENTS, **ALIBI}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family, kernel, settings", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, kernel: str, settings: dict[str, Any]
) -> None:
    job = tensor_job(corpora, family, **{"dropout": 0.0, **settings})
    job = job.model_copy(update={"model": job.model.model_copy(update={"attention": kernel})})
    check_agrees(world_pool, 2, job)
