"""From a directory to sharded ranks and back to a directory: every number comes through, ties are stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from shardwise.checkpoint.export import export_hugging_face
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from tests.checkpoint.models import make_model
from tests.model import toys
from tests.parity.jobs import make_job, write_tokens


def _start_and_export(job: Job, target: Path) -> None:
    export_hugging_face(set_up(job, torch.device("cpu")).model, target, None)


def _gpt2(path: Path) -> PreTrainedModel:
    """A `.bin` as on the Hub: the base model's names, the head left out."""
    model = make_model("gpt2")
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(path)
    torch.save(model.transformer.state_dict(), path / "pytorch_model.bin")
    return model


def _glm4_moe(path: Path) -> PreTrainedModel:
    """One tensor an expert in the files, and a buffer with values: the routing bias."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["glm4_moe"](**toys.GROUPED, **sizes, **tokens))
    for tensor in model.state_dict().values():
        tensor.normal_()
    model.save_pretrained(path)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make, ranks", [(_gpt2, 3), (_glm4_moe, 2)], ids=["gpt2 .bin", "glm4_moe"])
def test_exported_model_is_the_one_it_started_from(
    world_pool: WorldPool, tmp_path: Path, make: Any, ranks: int
) -> None:
    write_tokens(tmp_path)
    model = make(tmp_path / "source")
    fp32 = {"compute": "fp32"}  # grouped products of experts do not compute in fp64
    job = make_job(tmp_path, model={"config": None, "path": str(tmp_path / "source")}, precision=fp32)
    world_pool.run(ranks, _start_and_export, job, tmp_path / "target")
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected, found = model.state_dict(), opened.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name].double(), expected[name].double()) for name in expected)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    assert len(stored) == len(list(model.parameters())) + sum("e_score_correction_bias" in name for name in stored)
