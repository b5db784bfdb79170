"""Encoder-decoders of BART's kind over stages, against one process: positions from tables and sinusoids, a bias of
logits that stands behind the head, one embedding for encoder, decoder and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from shardwise.checkpoint.export import export_hugging_face
from shardwise.checkpoint.manifest import Progress
from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.planner.formulas.schedule import holders, tied_across
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up, study
from shardwise.training.step import train_step
from tests.checkpoint.test_layouts import assert_same, read_and_write, write
from tests.parity.bart import bart_job, bart_span_job
from tests.parity.jobs import check_agrees
from tests.parity.test_stacks import FOUR, LONG, SHARD, TALL, TWO, UNEVEN
from tests.parity.test_stacks import at as at_stacks
from tests.parity.test_traced import start

THREE: dict[str, Any] = {"pipeline_parallel_degree": 3}
SCALED = {"more": {"scale_embedding": True}}
UNTIED = {"more": {"tie_word_embeddings": False}}
FAMILIES = (
    "bart", "mbart", "mvp", "plbart", "m2m_100", "marian", "pegasus", "blenderbot", "blenderbot-small",
    "pegasus_x",
)  # fmt: skip


def at(*stages: int, encoder: int) -> dict[str, Any]:
    return at_stacks(*stages, encoder=encoder, names="model.{}.layers.{}")


# Where the cuts lie: in the encoder, in both stacks, in the decoder, between the stacks; dropout is on in all of them.
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "bart", {"parallel": {**TWO, **at(0, 1, 1, 1, 1, encoder=3)}, **TALL}),
]
SLOW: list[tuple[int, str, dict[str, Any]]] = [
    (2, "marian", {"parallel": {**TWO, "pipeline": "simple", **at(0, 0, 0, 1, 1, encoder=2)}, **LONG}),
    (3, "m2m_100", {"parallel": {**THREE, **at(0, 1, 1, 1, 2, encoder=2)}, **LONG, "training": UNEVEN, **SCALED}),
    *((2, family, {"parallel": TWO, **TALL, "training": UNEVEN}) for family in FAMILIES),
    (2, "bart", {"parallel": {**TWO, **at(0, 0, 0, 1, 1, encoder=3)}, **TALL, "training": UNEVEN}),
    (4, "bart", {"parallel": {**FOUR, "pipeline": "simple"}, **TALL, **UNTIED}),
    (3, "marian", {"parallel": THREE, **TALL}),
    (4, "bart", {"parallel": {**TWO, **SHARD}, **TALL}),
    (4, "marian", {"parallel": {**TWO, **SHARD}, **TALL, "training": UNEVEN}),
    (4, "mbart", {"parallel": {**TWO, "shard_optimizer_state": True}, **LONG}),
    (2, "bart", {"parallel": {**TWO, "virtual_pipeline_degree": 2}, **TALL}),
    (2, "m2m_100", {"parallel": {**TWO, "pipeline": "zero_bubble"}, **TALL}),
    (2, "bart", {"parallel": {**TWO, "pipeline": "zbv"}, **LONG}),
    (4, "pegasus", {"parallel": FOUR, **TALL, "memory": {"activation_checkpointing": "full"}}),
    (2, "bart", {"parallel": TWO, **TALL, "memory": {"activation_checkpointing": "full",
                                                     "checkpoint_strategy": "contiguous"}}),
    (4, "bart", {"parallel": {**TWO, **SHARD}, "precision": {"compute": "bf16"}}),
    (4, "marian", {"parallel": {**TWO, **SHARD}, **TALL, "memory": {"offload_parameters": True}}),
    (4, "mbart", {"parallel": FOUR, **TALL, "training": UNEVEN}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, family, settings", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, family: str, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, bart_job(corpora, family, **settings))


@pytest.mark.parametrize(
    "ranks, family, parallel",
    [
        pytest.param(2, "bart", TWO, marks=pytest.mark.slow),
        *(pytest.param(3, family, THREE, marks=pytest.mark.slow) for family in ("mbart", "marian", "m2m_100")),
    ],
)
def test_spans_agree_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, family: str, parallel: dict[str, Any]
) -> None:
    """From a config; inputs and labels are of other lengths."""
    check_agrees(world_pool, ranks, bart_span_job(corpora, family, parallel=parallel, blocks=(3, 2)))


def test_a_row_that_fills_a_batch_has_a_last_label(world_pool: WorldPool, corpora: Path) -> None:
    """mBART and PLBart look for the last label of each row that is no padding, with which a decoder may begin."""
    begins_with_padding = {"more": {"decoder_start_token_id": 0}, "training": UNEVEN}
    check_agrees(world_pool, 2, bart_span_job(corpora, "plbart", parallel=SHARD, **begins_with_padding))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "marian"])
def test_names_and_weights_are_those_of_the_model(world_pool: WorldPool, corpora: Path, family: str) -> None:
    """The embedding is on the stages that use it, and so are the tables of positions; evaluation agrees."""
    parallel = {**FOUR, **at(0, 1, 2, 3, 3, encoder=3)}
    data = {"data": {"factory": "tests.parity.jobs:Pairs", "validation_fraction": 0.2}}
    alone = world_pool.run(1, start, bart_job(corpora, family, **TALL, **data))[0]
    stages = world_pool.run(4, start, bart_job(corpora, family, **TALL, **data, parallel=parallel))
    weights = stages[0][0]
    assert list(weights) == list(alone[0])
    assert all(torch.equal(weights[name], alone[0][name]) for name in weights)
    assert all(losses == pytest.approx(alone[2], rel=1e-12) for _, _, losses in stages)
    held = [names for _, names, _ in stages]
    assert ["model.shared.weight" in names for names in held] == [True, False, False, True]
    assert ["model.encoder.embed_positions.weight" in names for names in held] == [True, False, False, False]
    assert ["model.decoder.embed_positions.weight" in names for names in held] == [False, False, False, True]


@pytest.mark.slow
def test_the_embedding_is_tied_over_three_stages(corpora: Path) -> None:
    job = bart_job(corpora, **TALL, parallel={**FOUR, **at(0, 1, 2, 2, 3, encoder=3)})
    facts = study(job)
    plan = resolve(job, World(4, "cpu", 4), facts)
    assert holders(plan, facts)["model.shared.weight"] == (0, 2, 3)
    assert tied_across(plan, facts) == {"model.shared.weight": (0, 2, 3)}
    assert holders(plan, facts)["model.decoder.layernorm_embedding.weight"] == (2,)


def export(job: Job, path: Path) -> dict[str, torch.Tensor]:
    """Whole weights after a step, and a directory of them."""
    run = set_up(job, torch.device("cpu"))
    train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
    export_hugging_face(run.model, path, None)
    return dict(run.model.whole_tensors())


@pytest.mark.parametrize("family", ["bart", pytest.param("marian", marks=pytest.mark.slow)])
def test_an_export_is_opened_by_transformers(world_pool: WorldPool, corpora: Path, tmp_path: Path, family: str) -> None:
    settings = {"parallel": TWO, "precision": {"compute": "fp32"}, **TALL}
    weights = world_pool.run(2, export, bart_span_job(corpora, family, **settings), tmp_path / "out")[0]
    opened, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = dict(opened.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "marian", "m2m_100"])
def test_a_checkpoint_changes_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path, family: str) -> None:
    """From two stages to three and back, nothing changes."""
    two, three = (bart_job(corpora, family, parallel=parallel, **TALL) for parallel in (TWO, THREE))
    world_pool.run(2, write, two, tmp_path / "two")
    source, middle, back = (tmp_path / name for name in ("two", "three", "again"))
    step = "step-00000002"
    found = world_pool.run(3, read_and_write, three, [source / step], [middle])[0]
    assert found == [Progress(step=2, samples=16)]
    world_pool.run(2, read_and_write, two, [middle / step], [back])
    assert_same(source / step, middle / step)
    assert_same(middle / step, back / step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, more, reason",
    [
        ("bart", {"decoder_layerdrop": 0.1}, "bart drops blocks at random .*set the layerdrop fields"),
        ("bigbird_pegasus", {}, "draws random numbers, and its blocks are no chain"),
    ],
)
def test_what_cannot_be_cut_is_refused(corpora: Path, family: str, more: dict[str, Any], reason: str) -> None:
    job = bart_job(corpora, family, more=more, parallel=TWO, training=UNEVEN)
    with pytest.raises(LegalityError, match=rf"(?s)pipeline_parallel_degree=2.*{reason}"):
        resolve(job, World(2, "cpu", 2), study(job))
