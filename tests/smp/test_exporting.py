"""Checkpoints of version 2's scripts as Hugging Face directories, and torch's metadata read without unpickling it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise.smp.v2 as tsm
from shardwise.commands.cli import main
from shardwise.errors import CheckpointError
from shardwise.smp.v2.distributed.checkpoint import torch_metadata
from shardwise.smp.v2.distributed.checkpoint.state_dict_loader import load
from shardwise.smp.v2.distributed.checkpoint.state_dict_saver import save
from shardwise.smp.v2.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type
from shardwise.smp.v2.distributed.fsdp.checkpoint import save_model_checkpoint
from shardwise.smp.v2.exporting import export_v2_checkpoint, is_v2_checkpoint
from shardwise.smp.v2.local_state import LocalFile
from shardwise.smp.v2.tensor_parallel.transformer import TransformerLayer
from shardwise.testing.world import WorldPool
from tests.smp.sharded_scripts import make_model, whole, wrap

Whole = dict[str, torch.Tensor]
SHARED = (TransformerLayer, GPTNeoXLayer, LlamaDecoderLayer)


def _saved(directory: str, how: str, family: str, config: dict[str, Any]) -> Whole:
    """Saves as public scripts do, in their directories; the weights that were saved, on rank 0."""
    try:
        tsm.init({**config, "sm_activation_offloading": False})
        made = make_model(family, torch.float32)
        kept = made if how == "local, flat" else tsm.transform(made)
        model = wrap(kept, checkpointed="local" in how, classes=SHARED, use_orig_params=how != "local, flat")
        state, folder = tsm.state, Path(directory, f"{family}-2steps")
        if how in ("sharded", "async_sharded"):
            documented = f"tp{state.tp_rank}_ep{state.ep_rank}"  # in SMP's documents, as against public scripts
            part = documented if how == "async_sharded" else f"tp{state.tp_size}-{state.tp_rank}"
            place = folder / part if state.tp_size > 1 else folder
            place = folder / f"ep{state.ep_size}-{state.ep_rank}" if state.ep_size > 1 and how == "sharded" else place
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                content = {"model": model.state_dict(), "model_config": model.config, "total_steps": 2}
            if state.ranker.get_rep_rank(state.rank) == 0 and how == "sharded":
                ranks = dist.get_process_group_ranks(model.process_group)
                checkpoint.save_state_dict(
                    content, checkpoint.FileSystemWriter(place), model.process_group, coordinator_rank=min(ranks)
                )
            elif state.ranker.get_rep_rank(state.rank) == 0:
                save(content, checkpoint_id=place, process_group=model.process_group)
        elif how == "async_local":
            made = [(ranks, dist.new_group(ranks)) for ranks in state.ranker.get_rep_groups()]
            group = next(group for ranks, group in made if state.rank in ranks)
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                content = {"model": model.state_dict(), "model_config": model.config}
            place = folder / f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{model.rank}"
            save(content, checkpoint_id=place, process_group=group)
        elif how.startswith("local"):
            with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                content = {"model": model.state_dict(), "model_config": model.config}
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, folder / f"{state.rank}.pt")
        elif how == "nemo":
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                save({"state_dict": model.state_dict(), "epoch": 0}, checkpoint_id=folder / "tp0_ep0")
            if state.rank == 0:
                model.config.save_pretrained(folder)
        elif how == "use_pg_with_util":
            save_model_checkpoint(model, None, str(folder), "hybrid", None)
            model.config.save_pretrained(folder)
        found = whole(model)
        if how == "full" and state.rank == 0:
            folder.mkdir(parents=True)
            torch.save(found, folder / "pytorch_model.bin")
            model.config.save_pretrained(folder)
        dist.barrier()
        return found
    finally:
        tsm.state.reset()


BOTH = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}
HYBRID = {"hybrid_shard_degree": 2}
CASES = [(4, "sharded", "llama_1", BOTH), (2, "async_local", "mixtral", {"tensor_parallel_degree": 2})]
CASES += [(4, "local", "llama_tied", HYBRID), (2, "local, flat", "gpt_neox", HYBRID)]
SLOW = [
    (4, "async_sharded", "mixtral", BOTH),
    (4, "async_local", "llama_tied", BOTH),
    (4, "use_pg_with_util", "gpt_neox", BOTH),
    (4, "sharded", "mistral", HYBRID),
    (3, "local", "llama_1", {"hybrid_shard_degree": 3}),
    (3, "local, flat", "llama_tied", {}),
    (2, "local", "mixtral", {"hybrid_shard_degree": 1}),
    (2, "nemo", "llama_1", HYBRID),
    (2, "full", "gpt_neox", {"tensor_parallel_degree": 2}),
    (2, "sharded", "gpt_neox", {}),
    (2, "sharded", "mixtral", {"expert_parallel_degree": 2}),
    (4, "async_sharded", "mixtral", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    (8, "async_local", "mixtral", {"expert_parallel_degree": 2, **BOTH}),
]


def _check(pool: WorldPool, path: Path, ranks: int, how: str, family: str, config: dict[str, Any]) -> None:
    expected = pool.run(ranks, _saved, str(path / "all"), how, family, config)[0]
    assert main(["export", str(path / "all"), str(path / "out")]) == 0
    found = AutoModelForCausalLM.from_pretrained(path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, how, family, config", CASES)
def test_a_checkpoint_of_a_script_is_exported(
    world_pool: WorldPool, tmp_path: Path, ranks: int, how: str, family: str, config: dict[str, Any]
) -> None:
    _check(world_pool, tmp_path, ranks, how, family, config)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, how, family, config", SLOW)
def test_checkpoints_of_scripts_of_every_kind_are_exported(
    world_pool: WorldPool, tmp_path: Path, ranks: int, how: str, family: str, config: dict[str, Any]
) -> None:
    _check(world_pool, tmp_path, ranks, how, family, config)


def _alone(path: Path, content: dict[str, Any]) -> Path:
    checkpoint.save(content, storage_writer=checkpoint.FileSystemWriter(path), no_dist=True)
    return path


def test_what_cannot_be_put_together_is_named(tmp_path: Path) -> None:
    model: Any = make_model("llama", torch.float32)
    weights = model.state_dict()
    bare = _alone(tmp_path / "bare", {"model": weights})
    with pytest.raises(CheckpointError, match=r"keeps no 'model_config'.* put the model's config\.json into"):
        export_v2_checkpoint(bare, tmp_path / "out")
    model.config.save_pretrained(bare)
    export_v2_checkpoint(bare, tmp_path / "out")
    flat = _alone(tmp_path / "flat", {"model": {"_flat_param": torch.ones(3)}, "model_config": model.config})
    with pytest.raises(
        CheckpointError, match=r"lacks model\.embed_tokens\.weight.* holds _flat_param; flat parameters in"
    ):
        export_v2_checkpoint(flat, tmp_path / "other")
    _alone(tmp_path / "half" / "tp2-1", {"model": weights})
    with pytest.raises(CheckpointError, match="tp2-0 is not there, or its save has not finished"):
        export_v2_checkpoint(tmp_path / "half", tmp_path / "other")
    (tmp_path / "local").mkdir()
    torch.save({"weights": weights}, tmp_path / "local" / "0.pt")
    with pytest.raises(CheckpointError, match="holds no state of a 'model'"):
        export_v2_checkpoint(tmp_path / "local", tmp_path / "other")
    object_there = _alone(tmp_path / "object", {"model": weights, "model_config": Path("x")})
    with pytest.raises(CheckpointError, match="object cannot be read"):
        export_v2_checkpoint(object_there, tmp_path / "other")
    assert not (tmp_path / "other").exists() and not is_v2_checkpoint(tmp_path)


def test_local_state_of_which_ranks_are_missing_or_another_config_is_named(
    world_pool: WorldPool, tmp_path: Path
) -> None:
    world_pool.run(2, _saved, str(tmp_path), "local, flat", "llama", HYBRID)
    folder = tmp_path / "llama-2steps"
    content = LocalFile(folder / "0.pt").content
    with pytest.raises(CheckpointError, match=r"_flat_param has \d+ elements, and the model's parameters there have 1"):
        LocalFile(folder / "0.pt").by_name({"lm_head.weight": (1,)})
    assert content["model_config"].hidden_size == 24
    (folder / "1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"1\.pt is not there"):
        export_v2_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.target,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_of_torch_is_read_and_never_unpickled(tmp_path: Path, protocol: int) -> None:
    nested = {"a": [1, {"b": torch.ones(2, dtype=torch.bfloat16)}]}
    path = _alone(tmp_path / "one", {"model": {"w": torch.arange(6.0).view(2, 3)}, "n": nested, "step": 3})
    file = path / ".metadata"
    theirs = pickle.loads(file.read_bytes())
    ours = torch_metadata.from_pickle(pickle.dumps(theirs, protocol), None)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data and ours.storage_data == theirs.storage_data
    target: dict[str, Any] = {"model": {"w": torch.zeros(2, 3)}, "n": {"a": [0, {"b": torch.zeros(2).bfloat16()}]}}
    load(target, checkpoint_id=path)
    assert target["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and target["n"]["a"][1]["b"].sum() == 2
    theirs.planner_data["model.w"] = _Bomb(tmp_path / "made")
    file.write_bytes(pickle.dumps(theirs, protocol))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        load(target, checkpoint_id=path)
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="opcode STRING has no place"):
        load(target, checkpoint_id=path)
    assert not (tmp_path / "made").exists()
