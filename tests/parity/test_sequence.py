"""Sequence parallelism against one process: families, dropout, uneven sequences, what it goes together with; memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise._torch_compat.tracing import tree_leaves
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from tests.parity.jobs import VOCABULARY, check_agrees, tensor_job

TWO = {"tensor_parallel_degree": 2, "sequence_parallel": True}
FOUR = {"tensor_parallel_degree": 4, "sequence_parallel": True}
UNEVEN: dict[str, Any] = {"data": {"sequence_length": 13}}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
SLOW: list[tuple[str, int, dict[str, Any]]] = [
    ("opt", 2, {"parallel": TWO, "dropout": 0.1, **UNEVEN}),
    ("bert", 2, {"parallel": TWO, "dropout": 0.1}),
    ("gpt_neo", 2, {"parallel": TWO, "dropout": 0.1, **UNEVEN, **FP32}),  # its attention computes in fp32
    ("roberta", 2, {"parallel": TWO, "dropout": 0.1, **UNEVEN}),
    ("mistral", 4, {"parallel": FOUR, **UNEVEN}),
    ("qwen3", 2, {"parallel": TWO}),
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1, "memory": {"activation_checkpointing": "selective"}}),
    ("gpt_neox", 4, {"parallel": TWO, "precision": {"compute": "fp16"}}),
    ("gptj", 2, {"parallel": TWO, "dropout": 0.1, **FP32}),
    ("llama", 2, {"parallel": TWO, "data": {"isolate_documents": True}}),
]
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1, **UNEVEN}),
    ("gpt2", 4, {"parallel": FOUR, "dropout": 0.1, "data": {"sequence_length": 3}}),  # a rank without positions
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 1}, "training": {"microbatch_size": 2}}),
    ("gpt_neox", 2, {"parallel": TWO, "dropout": 0.1, "training": {"microbatch_size": 2}}),
    ("llama", 4, {"parallel": TWO, "tied": False, **UNEVEN}),
    ("gemma", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1, "memory": {"activation_checkpointing": "full",
                 "checkpoint_strategy": "contiguous"}}),
    ("llama", 2, {"parallel": TWO, "precision": {"compute": "bf16"}}),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family, ranks, settings", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, tensor_job(corpora, family, **settings))


# --- memory


@contextmanager
def saved_in(block: nn.Module, module: nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Storages that autograd saves while `block` runs, by address; held. Not those of `module`, nor what the block is
    told besides hidden states: rotary tables and masks are one for all blocks."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}
    inside = [False]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside[0] = True
        told = [value for value in tree_leaves([args[1:], kwargs]) if isinstance(value, Tensor)]
        known.update(tensor.untyped_storage().data_ptr() for tensor in told)

    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def kept(job: Job) -> int:
    """Bytes that the second block keeps between its forward and its backward."""
    run = set_up(job, torch.device("cpu"))
    module = run.model.module
    block = module.get_submodule(run.facts.blocks[1].name)
    ids = torch.randint(0, VOCABULARY, (2, job.data.sequence_length))
    with run.model.scope(next(iter(run.stream.batches(0))), 0), saved_in(block, module) as storages:
        output = module(input_ids=ids, use_cache=False)
    del output
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_neox", "llama"))])
def test_activations_of_a_block_fall_by_the_degree(world_pool: WorldPool, corpora: Path, family: str) -> None:
    """Norms, dropout masks, residuals and what regions read and make; without it the former stay whole."""
    wide = {"n_inner" if family == "gpt2" else "intermediate_size": 48}
    fused = {"dropout": 0.0, "training": {"microbatch_size": 2, "sequences_per_step": 8}, "config": wide}

    def measured(ranks: int, parallel: dict[str, Any]) -> list[int]:
        return world_pool.run(ranks, kept, tensor_job(corpora, family, parallel=parallel, **fused))

    alone = measured(1, {})[0]
    degree = 4 if family == "gpt2" else 2  # of one head alone GPT-NeoX's value would be a view of its whole projection
    parts = measured(degree, {"tensor_parallel_degree": degree, "sequence_parallel": True})
    tensor_only = measured(degree, {"tensor_parallel_degree": degree})[0]
    assert all(part == pytest.approx(alone / degree, rel=0.10) for part in parts)
    assert tensor_only > 1.2 * parts[0]
