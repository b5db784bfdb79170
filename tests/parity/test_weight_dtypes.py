"""`model.dtype`: weights that are not trained in 16 bits, masters of the others, and the dtype that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.export import export_checkpoint
from shardwise.job.schema import Job
from shardwise.planner.formulas.memory import estimate
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import set_up
from shardwise.training.state_table import state_bytes
from tests.parity.jobs import check_agrees, tensor_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "zero-1": (2, {"shard_optimizer_state": True}),
}
BF16 = {"compute": "bf16"}


def adapted(corpora: Path, **sections: dict[str, Any]) -> Job:
    base: dict[str, Any] = {"precision": BF16, "adapter": {"kind": "lora", "rank": 3}, "model": {"dtype": "bf16"}}
    return tensor_job(corpora, "llama", **{**base, **sections})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_in_16_bits(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_agrees(world_pool, ranks, adapted(corpora, parallel=parallel))


def dtypes_of(job: Job) -> tuple[dict[str, torch.dtype], int, float]:
    """Return each parameter's dtype on this rank, the bytes of all, and those that the planner predicts."""
    run = set_up(job, torch.device("cpu"))
    predicted = estimate(run.plan, run.facts).parameters
    return {entry.name: entry.local.dtype for entry in run.model.tensor_map}, state_bytes(run)["parameters"], predicted


def test_what_is_not_trained_is_kept_in_the_dtype(world_pool: WorldPool, corpora: Path) -> None:
    ranks = world_pool.run(2, dtypes_of, adapted(corpora))
    for name, dtype in [item for dtypes, _, _ in ranks for item in dtypes.items()]:
        assert dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    assert max(measured for _, measured, _ in ranks) == pytest.approx(ranks[0][2], rel=0.01)


def train_and_save(job: Job) -> str:
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
        return session.save(wait=True)


@pytest.mark.slow
def test_the_model_is_written_in_the_dtype_of_its_files(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(_config(corpora)).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    stored = {name: t.to(torch.float32 if "norm" in name else torch.bfloat16) for name, t in tensors.items()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    job = tensor_job(
        corpora, "llama", model={"path": str(base), "dtype": "file", "config": None, "freeze": ["model.layers.0"]},
        precision=BF16, checkpoint={"directory": str(tmp_path / "kept")}, training={"steps": 1},
    )  # fmt: skip
    path = world_pool.run(2, train_and_save, job)[0]
    written = load_file(export_checkpoint(path, tmp_path / "exported") / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {n: t.dtype for n, t in stored.items()}
    frozen = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(written[frozen], stored[frozen])
    assert not torch.equal(written["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])


def _config(corpora: Path) -> Any:
    from transformers import CONFIG_MAPPING

    values = dict(tensor_job(corpora, "llama").model.config)  # type: ignore[arg-type]
    return CONFIG_MAPPING[values.pop("model_type")](**values)
