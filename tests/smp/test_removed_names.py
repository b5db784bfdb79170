"""What published scripts take from packages that are missing or have moved on: doors that are short and announced."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

import shardwise.smp.v2 as tsm
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.doors import cpu_for_cuda
from shardwise.smp.doors.cpu_for_cuda import _with_number
from shardwise.smp.doors.stubs.accelerate import init_empty_weights
from shardwise.smp.v2.distributed.checkpoint.state_dict_utils import _Interval, compute_auto_checkpoint_interval
from shardwise.smp.v2.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint
from tests.fork_server import run_python
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
from shardwise.smp.doors import import_hook
import_hook.install_import_hook()
assert importlib.util.find_spec("accelerate") is None
import accelerate, transformer_engine
assert accelerate.__name__.startswith("shardwise.") and transformer_engine.pytorch.fp8_autocast
import transformers
assert not transformers.utils.is_accelerate_available()
"""


@pytest.mark.skipif(find_spec("accelerate") is not None, reason="accelerate is installed")
def test_a_missing_accelerate_is_a_stand_in_for_scripts_alone() -> None:
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "accelerate is not installed" in done.stderr


APEX = """
import importlib.util
from shardwise.smp.doors import import_hook
import_hook.install_import_hook()
assert importlib.util.find_spec("apex") is None and importlib.util.find_spec("torch._six") is None
import amp_C, apex_C, torch
from apex import amp
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel
from apex.parallel.distributed import flat_dist_call
from torch._six import inf
overflow, values = torch.zeros(1, dtype=torch.int), [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [values], False)
halves = [torch.empty(2), torch.empty(1)]
multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [values, halves], 0.5)
assert norm.tolist() == [13.0] and halves[0].tolist() == [1.5, 2.0] and overflow.item() == 0
multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [values, halves], inf)
assert overflow.item() == 1
flat_dist_call(values, torch.Tensor.neg_)
assert [tensor.tolist() for tensor in values] == [[-3.0, -4.0], [-12.0]]
assert torch.equal(apex_C.flatten(values), torch.tensor([-3.0, -4.0, -12.0])) and not _amp_state.loss_scalers
try:
    amp.initialize(None, None)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(find_spec("apex") is not None, reason="apex is installed")
def test_a_missing_apex_and_a_module_that_torch_has_removed_are_stand_ins() -> None:
    done = run_python("-c", APEX)
    assert done.returncode == 0, done.stderr
    assert "SMPUnsupportedError apex.amp.initialize is not to be had" in done.stdout
    for name in ("apex", "amp_C", "apex_C", "torch._six"):
        assert f"note: {name} is not installed" in done.stderr


def test_generated_code_of_traces_knows_the_device_that_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ones, (2,), {"device": torch.device("cpu")}))
    monkeypatch.setattr(torch, "device", cpu_for_cuda.device)
    assert torch.fx.GraphModule(nn.Module(), graph)().tolist() == [1, 1]


def test_files_name_the_device_that_stands_in_as_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "device", cpu_for_cuda.device)
    written = pickle.dumps(torch.device("cuda", 1), protocol=2)
    assert b"ctorch\ndevice" in written and pickle.loads(written).type == "cpu"
    assert cpu_for_cuda._on_cpu(torch.tensor)([1], device="cuda", pin_memory=True).tolist() == [1]


META = """
import torch
from shardwise.smp.doors.cpu_for_cuda import redirect
redirect(1, "/nowhere")
with torch.device("meta"):
    assert torch.nn.Linear(2, 2).weight.is_meta
with torch.device("cuda"):
    assert torch.zeros(2).device.type == "cpu"
torch.cuda.cudart().cudaProfilerStart()
with torch.cuda.profiler.profile():
    assert torch.cuda.memory.mem_get_info() == (0, 0) and torch.cuda.memory_stats()["num_alloc_retries"] == 0
assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())
torch.ones(2).record_stream(torch.cuda.current_stream())
"""


def test_scopes_of_meta_and_what_profilers_call_work_on_the_cpu() -> None:
    done = run_python("-c", META)
    assert done.returncode == 0, done.stderr


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
        found = load_model_checkpoint(model, None, str(tmp_path / "own"), "hybrid", None)
        assert found["identity"] == {"total_steps": 3, "epoch": 0}  # which public scripts read and have not exported
        with pytest.raises(CheckpointError, match="has no optimizer"):
            load_model_checkpoint(model, None, str(tmp_path / "own"), "hybrid", None, optimizer=optimizer)
        (tmp_path / "other").mkdir()
        torch.save(model.state_dict(), tmp_path / "other" / "0.pt")
        with pytest.raises(CheckpointError, match="has no model, identity"):
            load_model_checkpoint(model, None, str(tmp_path / "other"), "hybrid", None)
    finally:
        tsm.state.reset()
