"""What published scripts take from packages that are missing or have moved on: doors that are short and announced."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

import shardwise.smp.v2 as tsm
from shardwise.cpu_for_cuda import _with_number
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.stand_ins.accelerate import init_empty_weights
from shardwise.smp.v2.distributed.checkpoint.state_dict_utils import _Interval, compute_auto_checkpoint_interval
from shardwise.smp.v2.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint
from tests.smp.sharded_scripts import make_model


def test_names_that_transformers_has_removed_are_there_between_init_and_reset(capsys: Any) -> None:
    model: Any = make_model("llama", torch.float32)
    model.config.use_cache = False
    ids = torch.arange(8).unsqueeze(0)
    expected = model(input_ids=ids).logits
    neox: Any = make_model("gpt_neox")
    try:
        tsm.init({"hybrid_shard_degree": 1})
        changed = copy.deepcopy(model)
        for layer in changed.model.layers:
            attention = modeling_llama.LlamaFlashAttention2(changed.config)  # type: ignore[attr-defined]
            attention.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = attention
        assert torch.equal(changed(input_ids=ids).logits, expected)
        tables = neox.gpt_neox.layers[0].attention.rotary_emb
        tables.sin_cached = tables.sin_cached.to("cpu")
        assert neox.gpt_neox.layers[0].attention.rotary_emb.sin_cached is tables.sin_cached
        said = capsys.readouterr().err
        assert "LlamaFlashAttention2 is no more" in said and "no rotary tables" in said
    finally:
        tsm.state.reset()
    assert not hasattr(modeling_llama, "LlamaFlashAttention2")
    assert not hasattr(modeling_gpt_neox.GPTNeoXAttention, "rotary_emb")


def test_models_without_values_keep_their_buffers() -> None:
    with init_empty_weights():
        model: Any = make_model("llama")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers()) and list(model.buffers())
    with init_empty_weights(include_buffers=True):
        assert torch.nn.BatchNorm1d(2).running_mean.is_meta  # type: ignore[union-attr]
    assert not torch.nn.Linear(2, 2).weight.is_meta


SCRIPT = """
import importlib.util
from shardwise import import_hook
import_hook.install()
assert importlib.util.find_spec("accelerate") is None
import accelerate, transformer_engine
assert accelerate.__name__.startswith("shardwise.") and transformer_engine.pytorch.fp8_autocast
import transformers
assert not transformers.utils.is_accelerate_available()
"""


@pytest.mark.skipif(find_spec("accelerate") is not None, reason="accelerate is installed")
def test_a_missing_accelerate_is_a_stand_in_for_scripts_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "accelerate is not installed" in done.stderr


def test_a_device_may_be_a_number() -> None:
    assert _with_number(Tensor.to)(torch.ones(2), 0).device.type == "cpu"
    assert _with_number(Tensor.to)(torch.ones(2), torch.float64).dtype == torch.float64
    assert _with_number(torch.nn.Module.to)(torch.nn.Linear(2, 2), 0).weight.device.type == "cpu"


def test_saves_follow_one_another_as_soon_as_they_can() -> None:
    found = compute_auto_checkpoint_interval([1.0, 2.0, 3.0], [2.5], [0.5], [6.0, 7.0, 90.0])
    assert found == _Interval(4, 2.0, 2.5, 0.5, 7.0)  # (0.5 + 7) / 2 steps, and the last writing is one of three
    assert compute_auto_checkpoint_interval([1.0], [1.0], [0.0], [0.0]).interval == 1 and _Interval().interval == 0
    with pytest.raises(ConfigError, match="at least one duration"):
        compute_auto_checkpoint_interval([], [1.0], [1.0], [1.0])


def test_files_of_other_writers_are_named(tmp_path: Any) -> None:
    try:
        tsm.init({"hybrid_shard_degree": 1})
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        save_model_checkpoint(model, None, str(tmp_path / "own"), "hybrid", None, extra_exports={"total_steps": 3})
        defaults = {"total_steps": 0, "epoch": 7}
        found = load_model_checkpoint(model, None, str(tmp_path / "own"), "hybrid", None, extra_imports=defaults)
        assert found["model"] is model and found["identity"] == {"total_steps": 3, "epoch": 7}
        with pytest.raises(CheckpointError, match="has no optimizer"):
            load_model_checkpoint(model, None, str(tmp_path / "own"), "hybrid", None, optimizer=optimizer)
        (tmp_path / "other").mkdir()
        torch.save(model.state_dict(), tmp_path / "other" / "0.pt")
        with pytest.raises(CheckpointError, match="has no model, identity"):
            load_model_checkpoint(model, None, str(tmp_path / "other"), "hybrid", None)
    finally:
        tsm.state.reset()
