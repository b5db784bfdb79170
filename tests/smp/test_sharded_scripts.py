"""SMP version 2's own ways: delayed weights, checkpoints, state, options, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

import shardwise.smp.v2 as tsm
from shardwise.errors import CheckpointError, ConfigError, ModelError
from shardwise.smp.v2.checkpoint.utils import limit_num_subdirs
from shardwise.smp.v2.delayed_param import DelayedParamIniter
from shardwise.smp.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
from shardwise.smp.v2.distributed.checkpoint.filesystem import DistributedFileSystemReader, DistributedFileSystemWriter
from shardwise.smp.v2.distributed.checkpoint.state_dict_loader import load
from shardwise.smp.v2.distributed.checkpoint.state_dict_saver import async_save, save
from shardwise.smp.v2.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from shardwise.smp.v2.distributed.fsdp.checkpoint import load_model_checkpoint, save_model_checkpoint
from shardwise.smp.v2.moe.moe_config import MoEConfig
from shardwise.testing.world import WorldPool
from tests.fork_server import run_python
from tests.smp.scripts import batches
from tests.smp.sharded_scripts import make_model, whole, wrap

BOTH = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}


def _drawn(config: dict[str, Any], family: str) -> dict[str, torch.Tensor]:
    try:
        tsm.init(config)
        with torch.device("meta"):
            model = make_model(family, torch.float32)
        model = tsm.transform(model)
        delayed = DelayedParamIniter(model)
        count = delayed.count_num_params(model)
        with delayed.validate_params_and_buffers_inited():
            wrapped = wrap(model, param_init_fn=delayed.get_param_init_fn(), after=delayed.get_post_param_init_fn())
        assert count > 0
        return whole(wrapped)
    finally:
        tsm.state.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_delayed_weights_are_equal_on_every_layout(world_pool: WorldPool, family: str) -> None:
    one = world_pool.run(1, _drawn, {"hybrid_shard_degree": 1}, family)[0]
    degrees = {"expert_parallel_degree": 2} if family == "mixtral" else BOTH
    four = world_pool.run(4, _drawn, degrees, family)[0]
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert torch.equal(four["lm_head.weight"], four["model.embed_tokens.weight"]) == (family == "llama_tied")
    inner = "mlp.experts.gate_up_proj" if family == "mixtral" else "self_attn.q_proj.weight"
    assert 0.01 < float(four[f"model.layers.0.{inner}"].std()) < 0.03


def _unfilled() -> str:
    try:
        tsm.init({"hybrid_shard_degree": 1})
        with torch.device("meta"):
            delayed = DelayedParamIniter(tsm.transform(make_model("llama")))
        try:
            with delayed.validate_params_and_buffers_inited():
                pass
        except AssertionError as error:
            return str(error)
        return ""
    finally:
        tsm.state.reset()


def test_weights_without_values_are_named(world_pool: WorldPool) -> None:
    assert "model.embed_tokens.weight" in world_pool.run(1, _unfilled)[0]


# ---- checkpoints


def _start(config: dict[str, Any], family: str = "llama") -> tuple[Any, Any, Any]:
    tsm.init(config)
    model = wrap(tsm.transform(make_model(family)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return model, optimizer, train


def _sharded(model: Any, optimizer: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "step": 2}


def _go_on(
    directory: str, how: str, family: str = "llama", degrees: dict[str, int] | None = None
) -> tuple[float, float]:
    first, second, third = batches()
    config = {**(degrees or BOTH), "sm_activation_offloading": False}
    try:
        model, optimizer, train = _start(config, family)
        train(first), train(second)
        tensor = tsm.state.tp_rank
        place = f"{directory}/two_tp{tensor}_ep{tsm.state.ep_rank}"
        queue = AsyncCallsQueue()
        writes = tsm.state.ranker.get_rep_rank(tsm.state.rank) == 0
        group = model.process_group
        if how in ("sharded", "async_sharded") and writes:
            content = _sharded(model, optimizer)
            if how == "sharded":
                save(content, checkpoint_id=place, process_group=group)
            else:
                async_save(content, checkpoint_id=place, process_group=group, queue=queue)
        if how == "local":
            save_model_checkpoint(model, None, directory, "hybrid", None, optimizer=optimizer)
        if how == "async_local":
            groups = tsm.state.ranker.get_rep_groups()
            made = [dist.new_group(ranks) for ranks in groups]
            group = next(each for each, ranks in zip(made, groups) if tsm.state.rank in ranks)
            place = f"{directory}/tp{tensor}_fsdp{model.rank}"
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
                async_save(content, checkpoint_id=place, process_group=group, queue=queue)
        straight = train(third)
        assert queue.maybe_finalize_async_calls(blocking=True) == ([1] if queue._count else [])
        dist.barrier()
        model, optimizer, train = _start(config, family)
        if how in ("sharded", "async_sharded"):
            train(first)
            content = _sharded(model, optimizer)
            content["step"] = 0
            load(content, checkpoint_id=place, process_group=model.process_group)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                model.load_state_dict(content["model"])
                found = FSDP.optim_state_dict_to_load(model, optimizer, content["optimizer"])
            optimizer.load_state_dict(found)
            assert content["step"] == 2
        if how == "local":
            load_model_checkpoint(model, None, directory, "hybrid", None, optimizer=optimizer)
        if how == "async_local":
            init_optim_state(optimizer)
            groups = tsm.state.ranker.get_rep_groups()
            made = [dist.new_group(ranks) for ranks in groups]
            group = next(each for each, ranks in zip(made, groups) if tsm.state.rank in ranks)
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
                load(content, checkpoint_id=place, process_group=group)
            assert content["step"] == 2
        return straight, train(third)
    finally:
        tsm.state.reset()


@pytest.mark.parametrize("how", ["async_sharded", "local"])
def test_training_goes_on_as_if_it_had_not_stopped(world_pool: WorldPool, tmp_path: Path, how: str) -> None:
    for straight, resumed in world_pool.run(4, _go_on, str(tmp_path), how):
        assert resumed == pytest.approx(straight, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "async_local"])
def test_training_goes_on_from_other_checkpoints(world_pool: WorldPool, tmp_path: Path, how: str) -> None:
    test_training_goes_on_as_if_it_had_not_stopped(world_pool, tmp_path, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "local"])
def test_training_of_experts_goes_on(world_pool: WorldPool, tmp_path: Path, how: str) -> None:
    for degrees in (BOTH, {"hybrid_shard_degree": 2, "expert_parallel_degree": 2}):
        for straight, resumed in world_pool.run(4, _go_on, str(tmp_path), how, "mixtral_balanced", degrees):
            assert resumed == pytest.approx(straight, rel=1e-6)


def test_a_checkpoint_is_not_trusted(tmp_path: Path) -> None:
    content = {"weight": torch.ones(2), "object": Path("x")}
    checkpoint.save(content, storage_writer=DistributedFileSystemWriter(tmp_path / "one"), no_dist=True)
    target = {"weight": torch.zeros(2), "object": None}
    with pytest.raises(CheckpointError, match="'object' of the checkpoint is no plain data"):
        load(target, checkpoint_id=tmp_path / "one")
    load({"weight": target["weight"]}, checkpoint_id=tmp_path / "one")
    assert target["weight"].tolist() == [1, 1]
    (tmp_path / "one" / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # which is not read
    load({"weight": target["weight"]}, checkpoint_id=tmp_path / "one")
    with pytest.raises(CheckpointError, match="give a directory of a finished save"):
        load(target, checkpoint_id=tmp_path / "none")
    with pytest.raises(ConfigError, match="gs://bucket/key is neither a directory nor in S3"):
        load(target, checkpoint_id="gs://bucket/key")


def _other_types(directory: str) -> None:
    """As the adapter for NeMo takes them: whole states by the same name, optimizers through torch's own loader."""
    try:
        model, optimizer, train = _start({"hybrid_shard_degree": 2, "sm_activation_offloading": False})
        train(batches()[0])
        settings = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with sm_state_dict_type(model, StateDictType.FULL_STATE_DICT, state_dict_config=settings):
            found = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
            expected = model.state_dict()
        assert found.keys() == expected.keys() and bool(found) == (dist.get_rank() == 0)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        state = _sharded(model, optimizer)
        save({"state_dict": state["model"], "optimizer_0": state["optimizer"]}, checkpoint_id=directory)
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optimizer_0",
            storage_reader=DistributedFileSystemReader(directory),
        )
        before = [{key: torch.as_tensor(v).clone() for key, v in each.items()} for each in optimizer.state.values()]
        train(batches()[1])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, loaded["optimizer_0"]))
        after = list(optimizer.state.values())
        assert before and all(torch.equal(a[key], b[key]) for a, b in zip(before, after, strict=True) for key in a)
        for kind, config in ((SMStateDictType.SM_LOCAL_STATE_DICT, settings), ("local", None)):
            with pytest.raises(ConfigError, match="sm_state_dict_type"), sm_state_dict_type(model, kind, config):
                pass
    finally:
        tsm.state.reset()


def test_states_of_torchs_types(world_pool: WorldPool, tmp_path: Path) -> None:
    world_pool.run(2, _other_types, str(tmp_path))


def _several(directory: str) -> list[Any]:
    try:
        tsm.init({"hybrid_shard_degree": 1})
        queue = AsyncCallsQueue()
        for number in range(4):
            content = {"weight": torch.full((2,), float(number))}
            async_save(content, checkpoint_id=f"{directory}/{number}", queue=queue)
        done = queue.maybe_finalize_async_calls(blocking=True)
        target = {"weight": torch.zeros(2)}
        load(target, checkpoint_id=f"{directory}/3")
        if tsm.state.rank == 0:  # as of several replicas one writes
            alone = dist.new_group([0], use_local_synchronization=True)
            async_save(target, checkpoint_id=f"{directory}/alone", process_group=alone, queue=queue)
        assert queue.maybe_finalize_async_calls(blocking=True) == [5][tsm.state.rank :]
        return [done, target["weight"].tolist()]
    finally:
        tsm.state.reset()


def test_saves_that_are_begun_at_once_take_turns(world_pool: WorldPool, tmp_path: Path) -> None:
    assert world_pool.run(2, _several, str(tmp_path)) == [[[1, 2, 3, 4], [3, 3]]] * 2


LOST = """
from shardwise.smp.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
queue = AsyncCallsQueue()
queue.schedule(lambda: None)
queue.schedule(lambda: 1 / 0)
"""


def test_a_save_that_fails_after_the_last_question_is_named() -> None:
    done = run_python("-c", LOST)
    assert done.stderr.count("error: the asynchronous save 2 failed and its checkpoint is incomplete: division") == 1


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for name in ("llama-20steps", "llama-100steps", "llama-30steps", "data"):
        (tmp_path / name).mkdir()
    limit_num_subdirs(tmp_path / "llama-200steps", 2, log=False)  # about to be written
    assert {path.name for path in tmp_path.iterdir()} == {"llama-100steps", "llama-30steps", "data"}
    limit_num_subdirs(tmp_path / "llama-100steps" / "tp2-1" / "ep2-0", 1, regex=r"^.*\d+steps$", log=False)
    limit_num_subdirs(tmp_path / "nowhere", 1, log=False)
    limit_num_subdirs(tmp_path, 0, log=False)
    assert {path.name for path in tmp_path.iterdir()} == {"llama-100steps", "data"}


# ---- state and options


def _state() -> dict[str, Any]:
    try:
        tsm.state.tensor_parallel_degree = 1
        tsm.init({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2, "context_parallel_degree": 2})
        groups = tsm.state.ranker.get_rep_groups()
        found = {
            "sizes": (tsm.state.tp_size, tsm.state.cp_size, tsm.state.ep_size, tsm.state.hybrid_shard_degree),
            "ranks": (tsm.state.rank, tsm.state.tp_rank, tsm.state.cp_rank, tsm.state.ep_rank),
            "groups": groups,
            "rep": tsm.state.ranker.get_rep_rank(tsm.state.rank),
            "shard": dist.get_process_group_ranks(tsm.state.rep_rank_process_group),
            "offload": tsm.state.sm_activation_offloading > 0,
        }
        with pytest.raises(ConfigError, match="set it before"):
            tsm.state.hybrid_shard_degree = 4
        return found
    finally:
        tsm.state.reset()


def _expert_state() -> dict[str, Any]:
    try:
        tsm.init({"hybrid_shard_degree": 2, "expert_parallel_degree": 2})
        ranker = tsm.state.ranker
        return {
            "expert": (tsm.state.ep_size, tsm.state.ep_rank),
            "writes": ranker.get_rep_rank(tsm.state.rank) == 0,
            "groups": ranker.get_rep_groups(),
        }
    finally:
        tsm.state.reset()


def test_each_expert_rank_has_shards_of_its_own(world_pool: WorldPool) -> None:
    for rank, found in enumerate(world_pool.run(4, _expert_state)):
        assert found == {"expert": (2, rank // 2), "writes": True, "groups": [[0], [1], [2], [3]]}


def test_state_says_where_a_rank_is(world_pool: WorldPool) -> None:
    for rank, found in enumerate(world_pool.run(4, _state)):
        assert found["sizes"] == (1, 2, 1, 2) and found["ranks"] == (rank, 0, rank % 2, 0)
        assert found["groups"] == [[0, 2], [1, 3]] and found["rep"] == rank // 2 and found["offload"]
        assert found["shard"] == [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize(
    "config, said",
    [
        ({"tensor_paralel_degree": 2}, "Did you mean 'tensor_parallel_degree'"),
        ({"microbatches": 2}, "is no parameter of SMP version 2"),
        ({"expert_parallel_degree": 2}, "expert_parallel_degree=2 does not divide the 1 ranks that"),
        ({"hybrid_shard_degree": 3}, "does not divide the 1 ranks"),
        ({"tensor_parallel_degree": 2}, "does not divide the 1 ranks"),
        ({"activation_loading_horizon": 0}, "must be at least 1"),
        ({"hybrid_shard_degree": "two"}, "must be of type int"),
        ("nowhere.json", "is not a file of JSON"),
        (7, "takes a dict or the path"),
    ],
)
def test_wrong_options_are_refused(world_pool: WorldPool, config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tsm.init(config)
    assert not tsm.is_initialized()


def test_environment_wins_and_notes_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"random_seed": 1, "allow_empty_shards": True}))
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"random_seed": 2}')
    try:
        tsm.init(str(file))
        assert tsm.state.random_seed == 2 and tsm.is_initialized()
        assert "allow_empty_shards=True has no effect here" in capsys.readouterr().err
        with pytest.raises(ModelError, match="is none"):
            tsm.transform(torch.nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="p2p, all_gather, a2a"):
            tsm.transform(make_model("llama"), cp_comm_type="ring")
        flash = LlamaForCausalLM._from_config(make_model("llama").config, attn_implementation="flash_attention_2")
        assert flash.config._attn_implementation == "sdpa" or is_flash_attn_2_available()
    finally:
        tsm.state.reset()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config, said",
    [
        (MoEConfig(), "moe_load_balancing='sinkhorn'"),
        (MoEConfig(moe_load_balancing="none", global_token_shuffle=True), "global_token_shuffle=True"),
        (MoEConfig(moe_load_balancing="none", moe_all_to_all_dispatcher=False), "moe_all_to_all_dispatcher=False"),
        (MoEConfig(moe_load_balancing="none", use_cpu_initialization=True), "use_cpu_initialization=True"),
        (MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=-1.0), "moe_z_loss_coeff=-1.0 must be at least 0"),
        (MoEConfig(moe_load_balancing="none"), "llama has no router"),
    ],
)
def test_settings_of_experts_without_a_counterpart_are_refused(
    world_pool: WorldPool, config: MoEConfig, said: str
) -> None:
    try:
        tsm.init({})
        with pytest.raises(ConfigError, match=said):
            tsm.transform(make_model("llama"), config=config)
        tsm.transform(make_model("llama"), config=MoEConfig(smp_moe=False))
    finally:
        tsm.state.reset()


def _cannot_be_split() -> str:
    try:
        tsm.init({"tensor_parallel_degree": 2})
        model: Any = make_model("mixtral")
        model.config.router_jitter_noise = 0.1
        tsm.transform(model)
    except ConfigError as error:
        return str(error)
    finally:
        tsm.state.reset()
    return ""


@pytest.mark.slow
def test_noise_of_routers_over_tensor_ranks_is_refused(world_pool: WorldPool) -> None:
    assert all("router_jitter_noise over tensor ranks" in said for said in world_pool.run(2, _cannot_be_split))


# ---- imports


SCRIPT = """
import importlib.util, sys
from shardwise.smp.doors import import_hook
import_hook.install_import_hook()
assert importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("transformer_engine") is None
import torch.sagemaker as tsm
from torch.sagemaker.state_handler import state
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
import torch.sagemaker.distributed.checkpoint.state_dict_saver
from transformer_engine.common.recipe import Format
import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import MultiheadAttention
from flash_attn.flash_attention import FlashAttention
import shardwise.smp.v2.tensor_parallel.transformer as ours
assert state is tsm.state and TransformerLayer is ours.TransformerLayer
try:
    import torch.sagemaker.nothing
except ModuleNotFoundError:
    pass
with te.fp8_autocast(enabled=False):
    print(FlashAttention()(__import__("torch").ones(1, 4, 3, 2, 8), causal=True)[0].sum().item())
import_hook.remove_import_hook()
assert not hasattr(sys.modules["torch"], "sagemaker")
"""


def test_imports_lead_here_and_missing_packages_are_said() -> None:
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 64
    assert "flash_attn is not installed" in done.stderr and "transformer_engine is not installed" in done.stderr
