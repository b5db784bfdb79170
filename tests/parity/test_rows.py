"""Parity of fine-tuning with one process that masks, packs and reduces by itself: conversations on every axis.

Rows have from 2 to 24 targets each, steps do not divide over the ranks (one microbatch has no target at all), an epoch
ends within a step, and rows are packed, padded, cut, or weighed by sample.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.testing.world import WorldPool
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import train_step
from tests.data.chats import BLOCKS, FORGETFUL, PLAIN, byte_tokenizer, write_rows
from tests.parity.jobs import facts_of
from tests.parity.test_matrix import verify_many

LENGTH = 64
WIDE = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
SMALL = {"intermediate_size": 13, "max_position_embeddings": LENGTH, "vocab_size": 257}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, **SMALL},
    "qwen3": {**WIDE, **SMALL, "head_dim": 6},
    "gemma": {**WIDE, **SMALL, "head_dim": 8},
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 13, "n_positions": LENGTH, "vocab_size": 257},
    "mixtral": {**WIDE, **SMALL, "num_local_experts": 3, "experts_implementation": "batched_mm"},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {  # name -> ranks, keys of the parallel section
    "shard 2": (2, {}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
    "shard 4": (4, {}),
    "shard 2 x replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}
EVERY_LAYOUT = {**LAYOUTS, "expert 2": (2, {"expert_parallel_degree": 2})}
FIVE = {"steps": 4, "sequences_per_step": 5, "microbatch_size": 1}
EPOCH = {"epochs": 1, "sequences_per_step": 20}  # two steps, of which the last is not whole
PADDED: dict[str, Any] = {"packing": False, "truncation": True}
TEMPLATES = {"plain": PLAIN, "blocks": BLOCKS, "forgetful": FORGETFUL}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with conversations, pairs, preferences, a tokenizer and templates."""
    directory = tmp_path_factory.mktemp("rows")
    byte_tokenizer(directory / "tokenizer", PLAIN)
    for name, template in TEMPLATES.items():
        (directory / f"{name}.jinja").write_text(template)
    draw = random.Random(4)
    chats, pairs, preferences = [], [], []
    for _ in range(80):
        a, b = draw.randrange(10), draw.randrange(10)
        question, answer = f"{a}+{b}?", " ".join([str(a + b)] * draw.choice([1, 1, 1, 9]))
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        more = [{"from": "human", "value": "And?"}, {"from": "gpt", "value": "Or."}]
        chats.append({"conversations": turns + more * draw.randrange(2)})
        pairs.append({"prompt": question, "completion": answer})
        prompt = {"role": "user", "content": question}
        answers = [{"role": "assistant", "content": text} for text in (answer, "no")]
        row = {"chosen": [prompt, answers[0]], "rejected": [prompt, answers[1]], "system": "Add." * draw.randrange(2)}
        preferences.append({**row, "prompt": [prompt]} if draw.randrange(2) else row)
    for name, content in {"chat": chats, "prompt_completion": pairs, "preference": preferences}.items():
        write_rows(directory / f"{name}.jsonl", content)
    return directory


def row_job(
    directory: Path, family: str, layout: str, name: str = "chat", template: str = "plain", reduction: str = "token",
    training: dict[str, int] | None = None, config: dict[str, Any] | None = None, **data: Any,
) -> Job:  # fmt: skip
    keys = {"path": str(directory / f"{name}.jsonl"), "format": name, "tokenizer": str(directory / "tokenizer")}
    if name != "prompt_completion":
        keys["chat_template"] = str(directory / f"{template}.jinja")
    return Job.model_validate(
        {
            "model": {"config": {"model_type": family, **CONFIGS[family], **(config or {})}},
            "parallel": {"device": "cpu", **EVERY_LAYOUT[layout][1]},
            "precision": {"compute": "fp64"},
            "training": {"objective": "sft", "loss_reduction": reduction, **(training or FIVE)},
            "data": {**keys, "sequence_length": LENGTH, "cache_directory": str(directory / "cache"), **data},
        }
    )


def check(world_pool: WorldPool, size: int, jobs: list[Job]) -> None:
    reports = world_pool.run(size, verify_many, [(job, facts_of(job)) for job in jobs], timeout=1200)[0]
    for job, report in zip(jobs, reports, strict=True):
        assert report.agrees, f"{job.parallel} {job.data}\n{report.first}\n{report.diagnosis}"


QUICK: dict[str, dict[str, Any]] = {
    "shard 2": {"template": "blocks", "training": EPOCH},
    "context 2": {"reduction": "sample"},
    "tensor 2": {"name": "prompt_completion", **PADDED},
    "pipeline 2": {"name": "preference"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", QUICK)
def test_rows_on_two_ranks(world_pool: WorldPool, rows: Path, layout: str) -> None:
    check(world_pool, 2, [row_job(rows, "llama", layout, **QUICK[layout])])


VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "blocks by sample": {"template": "blocks", "reduction": "sample"},
    "padded by sample": {"reduction": "sample", **PADDED},
    "last answer": {"template": "forgetful", "train_on": "last_assistant", "sequence_length": 48},
    "pairs": {"name": "prompt_completion", "truncation": True, "sequence_length": 24},
    "preference": {"name": "preference", "packing": False},
    "all": {"train_on": "all", "validation_split": "place"},
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_on_every_layout(world_pool: WorldPool, rows: Path, layout: str, family: str) -> None:
    size = LAYOUTS[layout][0]
    check(world_pool, size, [row_job(rows, family, layout, **variant) for variant in VARIANTS.values()])


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_rows_on_ranks_that_share_experts(world_pool: WorldPool, rows: Path) -> None:
    config = {"num_local_experts": 4, "experts_implementation": "eager"}
    check(world_pool, 2, [row_job(rows, "mixtral", "expert 2", config=config, **one) for one in VARIANTS.values()])


BALANCED: dict[str, Any] = {"balancing_loss": "layer", "balancing_coefficient": 0.5, "z_loss": 0.1}
OF_SEQUENCES = {**BALANCED, "balancing_loss": "sequence"}
ROUTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("expert 2", OF_SEQUENCES, PADDED),
    ("context 2", BALANCED, PADDED),
    ("tensor 2", BALANCED, {}),
    ("expert 2", BALANCED, {"name": "preference"}),
    ("tensor 2", BALANCED | {"balancing_loss": "model"}, PADDED),
    ("pipeline 2", OF_SEQUENCES, {}),
]


def balanced_job(directory: Path, layout: str, router: dict[str, Any], max_positions: int = LENGTH, **more: Any) -> Job:
    config = {"num_local_experts": 4, "experts_implementation": "eager", "max_position_embeddings": max_positions}
    job = row_job(directory, "mixtral", layout, config=config, **more)
    return job.model_copy(update={"router": job.router.model_validate(router)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout, router, more", [*ROUTED[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in ROUTED[1:])]
)
def test_losses_of_routers(
    world_pool: WorldPool, rows: Path, layout: str, router: dict[str, Any], more: dict[str, Any]
) -> None:
    check(world_pool, 2, [balanced_job(rows, layout, router, **more)])


def first_step(job: Job) -> tuple[float, float]:
    """Return the balancing loss and the norm of the gradients of a step. Run on the only rank."""
    run = set_up(job, torch.device("cpu"))
    result = train_step(run.model, run.objective, run.stream.batches_from(0), run.optimizer, run.scaler, 0)
    assert result.routers is not None
    return result.routers.balancing_loss, result.grad_norm


@pytest.mark.parametrize("router", [BALANCED, OF_SEQUENCES])
def test_routers_do_not_count_what_fills_up_rows(world_pool: WorldPool, rows: Path, router: dict[str, Any]) -> None:
    """The same rows in sequences of another length have the same losses and gradients."""
    longer = {"packing": False, "max_positions": 3 * LENGTH}
    jobs = [balanced_job(rows, "shard 2", router, **longer, sequence_length=n) for n in (2 * LENGTH, 3 * LENGTH)]
    first, second = (world_pool.run(1, first_step, job)[0] for job in jobs)
    assert first == pytest.approx(second, rel=1e-9)
    assert first[0] > 0


CUT = LENGTH // 4  # on two ranks the first has the first and the last quarter of a sequence


def without(run: AssembledJob, batch: Batch, changed: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's loss, without that of the positions `changed` [B, S], and the gradients of its parameters."""
    assert batch.labels is not None
    others = replace(batch, labels=batch.labels.masked_fill(changed, IGNORED))
    totals = run.model.run(run.objective, [others], 0, torch.ones((), dtype=torch.float64))
    gradients = [entry.local_gradient for entry in run.model.tensor_map]
    kept = [gradient.clone() for gradient in gradients if gradient is not None]
    run.optimizer.zero_grad()
    return totals, kept


def perturbed(job: Job) -> tuple[bool, bool]:
    """Change a row on both ranks: do losses or gradients of other rows differ, and does its own loss?"""
    run = set_up(job, torch.device("cpu"))
    sequences = run.data.train
    every = sequences.batch(range(len(sequences)), range(len(sequences)), 0)
    whole, labels = every.document_ids, every.labels
    assert whole is not None and labels is not None
    is_cut = (whole[:, CUT - 1] == whole[:, CUT]) & (whole[:, CUT] > 0) & (whole[:, CUT] < whole.amax(1) - 1)
    of_others = (labels != IGNORED) & (whole != whole[:, CUT : CUT + 1])
    first, second = of_others.roll(CUT, 1).split([2 * CUT, LENGTH - 2 * CUT], 1)
    # Rows are before and behind the one that is cut, and others than it have labels on both ranks.
    index = int((is_cut & first.any(1) & second.any(1)).nonzero()[0])
    batch, documents = sequences.batch([index], [0], 0), whole[[index]]
    changed = documents == documents[0, CUT]
    ids = torch.where(changed, (batch.inputs["input_ids"] + 1) % 257, batch.inputs["input_ids"])
    other = replace(batch, inputs={**batch.inputs, "input_ids": ids})
    (loss, gradients), (loss_then, gradients_then) = (without(run, one, changed) for one in (batch, other))
    (own, _), (own_then, _) = (without(run, one, ~changed) for one in (batch, other))
    assert loss[1] > 0 and any(gradient.any() for gradient in gradients)
    are_equal = all(map(torch.equal, gradients, gradients_then)) and torch.equal(loss, loss_then)
    return not are_equal, not torch.equal(own, own_then)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_no_packed_row_sees_another_over_context_ranks(world_pool: WorldPool, rows: Path, method: str) -> None:
    """Losses and gradients are equal to the bit."""
    job = row_job(rows, "llama", "context 2", "prompt_completion")
    parallel = job.parallel.model_copy(update={"context_parallel_method": method})
    of_ranks = world_pool.run(2, perturbed, job.model_copy(update={"parallel": parallel}))
    assert not any(others for others, _ in of_ranks)
    assert any(own for _, own in of_ranks)
