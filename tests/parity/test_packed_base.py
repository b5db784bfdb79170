"""A base in 4 or 8 bits (`adapter.base`): layouts compute what one process does with the same quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.job.schema import AdapterSection, Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.planner.formulas.memory import estimate
from shardwise.testing.capture import gather
from shardwise.testing.oracle_quantization import quantize_base
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up, study
from shardwise.training.state_table import state_bytes
from tests.parity.jobs import TENSOR_CONFIGS, VOCABULARY, check_agrees, make_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {}),
    "shard 4": (4, {}),
    "shard 2 x replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "sequence 2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
    "zero-1": (2, {"shard_optimizer_state": True}),
    "tensor 2 x pipeline 2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}
# Heads of 32: a key head's part of a row is a block, and so is the part of an input that a tensor rank has.
SIZES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    "qwen3": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    "gemma": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_inner": 128},
}


def write_base(directory: Path, family: str) -> str:
    """Write a model with weights in fp32, and return its directory."""
    path = directory / f"base-{family}"
    if not path.exists():
        config = {**TENSOR_CONFIGS[family], **SIZES[family], "vocab_size": VOCABULARY, "tie_word_embeddings": False}
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config)).save_pretrained(path)
    return str(path)


def packed_job(directory: Path, family: str, layout: str, form: str, kind: str = "lora", **sections: Any) -> Job:
    return make_job(
        directory,
        model={"config": None, "path": write_base(directory, family)},
        adapter={"kind": kind, "rank": 3, "alpha": 5.0, "base": form},
        parallel=LAYOUTS[layout][1],
        optimizer={"learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}},
        **sections,
    )


ALL = [
    (family, layout, form, kind)
    for family in SIZES
    for layout in LAYOUTS
    for form, kind in (("nf4", "lora"), ("nf4", "dora"), ("int8", "lora"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "form", "kind"), ALL)
def test_packed_base(world_pool: WorldPool, corpora: Path, family: str, layout: str, form: str, kind: str) -> None:
    check_agrees(world_pool, LAYOUTS[layout][0], packed_job(corpora, family, layout, form, kind))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard 4", "tensor 2"])
def test_packed_base_in_16_bits(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    check_agrees(
        world_pool, LAYOUTS[layout][0], packed_job(corpora, "llama", layout, "nf4", precision={"compute": "bf16"})
    )


BESIDE: list[dict[str, Any]] = [
    {"memory": {"offload_parameters": True}},
    {"memory": {"activation_checkpointing": "full", "offload_activations": True}},
    {"memory": {"activation_checkpointing": "selective"}},
    {"training": {"sequences_per_step": 7}},
]


@pytest.mark.slow
@pytest.mark.parametrize("sections", BESIDE, ids=str)
def test_packed_base_beside_other_settings(world_pool: WorldPool, corpora: Path, sections: dict[str, Any]) -> None:
    check_agrees(world_pool, 2, packed_job(corpora, "llama", "shard 2", "nf4", **sections))


@pytest.mark.slow
def test_packed_base_in_compiled_blocks(world_pool: WorldPool, corpora: Path) -> None:
    job = packed_job(corpora, "llama", "shard 2", "nf4", precision={"compute": "fp32"})
    model = job.model.model_copy(update={"compile": True})
    check_agrees(world_pool, 2, job.model_copy(update={"model": model}))


def start(job: Job) -> tuple[dict[str, Any], float, float]:
    """Return the whole weights at start, this rank's bytes of parameters, and those that the planner predicts."""
    run = set_up(job, torch.device("cpu"))
    return gather(run), state_bytes(run)["parameters"], estimate(run.plan, run.facts).parameters


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_weights_at_start_are_those_of_one_process(world_pool: WorldPool, corpora: Path, form: str) -> None:
    expected = quantize_base(
        packed_job(corpora, "llama", "tensor 2", form),
        dict(AutoModelForCausalLM.from_pretrained(write_base(corpora, "llama")).named_parameters()),
    )
    for layout in ("shard 4", "tensor 2", "pipeline 2"):
        ranks = world_pool.run(LAYOUTS[layout][0], start, packed_job(corpora, "llama", layout, form))
        for name, value in expected.items():
            assert torch.equal(ranks[0][0][name].float(), value), name
        assert max(measured for _, measured, _ in ranks) == pytest.approx(ranks[0][2], rel=0.01)


@pytest.mark.slow
def test_a_base_of_four_bits_takes_a_third_of_one_of_sixteen() -> None:
    """Llama 2 of 7 billion parameters, embeddings and head included."""
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
              "num_hidden_layers": 32, "num_attention_heads": 32}  # fmt: skip
    sizes = {}
    for base in ("full", "nf4", "int8"):
        job = Job.model_validate(
            {"model": {"config": config, "dtype": "bf16"}, "adapter": {"kind": "lora", "base": base},
             "precision": {"compute": "bf16"}}
        )  # fmt: skip
        facts = study(job)
        plan = resolve(job.model_copy(update={"adapter": AdapterSection(kind="lora")}), World(4, "cuda", 4), facts)
        trained = 4 * facts.trained_parameters / 4
        sizes[base] = estimate(plan, facts).parameters - trained
    assert sizes["nf4"] < 0.35 * sizes["full"] and sizes["int8"] < 0.57 * sizes["full"]
