"""Checkpoints of version 1's scripts as Hugging Face directories: partial and full, of every kind of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel

import shardwise.smp as smp
from shardwise.commands.cli import main
from shardwise.errors import CheckpointError
from shardwise.smp.v1.exporting import export_v1_checkpoint, is_v1_checkpoint
from shardwise.smp.v1.replacement import translate_out
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model

Whole = dict[str, torch.Tensor]
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed"}
STAGES: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


def _saved(directory: str, family: str, config: dict[str, Any], how: str) -> Whole:
    """One step and a save, as public scripts have it; the weights that were saved, by transformers' names."""
    try:
        smp.init(config)
        if "replaced" in how:
            with smp.model_creation(tensor_parallelism=True):
                made = make_model(family, torch.float32)
        else:
            made = make_model(family, torch.float32)
        described: Any = made.config
        model: Any = smp.DistributedModel(made)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=ids, labels=ids)["loss"]
            model.backward(loss)
            return loss

        step(model, batches()[0])
        optimizer.step()
        kept = {"model_config": described, "total_steps": 1}
        if "save" in how:
            smp.save({"model": model.local_state_dict(), **kept}, f"{directory}/state.pt", partial=True)
        else:
            partial = "full" not in how
            smp.save_checkpoint(
                directory, "one", partial, model, optimizer, kept, translate_if_full="untranslated" not in how
            )
        return dict(translate_out(model.get_module(), model.state_dict()))
    finally:
        smp.state.reset()


CASES = [
    (4, "gpt_neox", {**STAGES, **TENSOR}, "replaced"),
    (2, "gpt2", {"sharded_data_parallel_degree": 2, "ddp": True}, ""),
]
SLOW = [
    (4, "gpt2", {**STAGES, **TENSOR}, ""),
    (2, "t5_tied", STAGES, ""),
    (2, "gpt2", {"shard_optimizer_state": True, "ddp": True}, "replaced"),
    (4, "gpt2", {**STAGES, "shard_optimizer_state": True}, ""),
    (2, "gpt_neox", TENSOR, "full replaced"),
    (2, "gpt2", STAGES, "full replaced untranslated"),
    (2, "gpt2", STAGES, "save"),
    (1, "gpt2", {}, "replaced save"),
]


def _check(pool: WorldPool, tmp_path: Path, ranks: int, family: str, config: dict[str, Any], how: str) -> None:
    expected = pool.run(ranks, _saved, str(tmp_path / "all"), family, config, how)[0]
    place = tmp_path / "all" / "state.pt" if "save" in how else tmp_path / "all"
    assert main(["export", str(place), str(tmp_path / "out")]) == 0
    kind: Any = AutoModelForSeq2SeqLM if family.startswith("t5") else AutoModelForCausalLM
    found = kind.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() <= expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks, family, config, how", CASES)
def test_a_checkpoint_of_a_script_is_exported(
    world_pool: WorldPool, tmp_path: Path, ranks: int, family: str, config: dict[str, Any], how: str
) -> None:
    (tmp_path / "all").mkdir()
    _check(world_pool, tmp_path, ranks, family, config, how)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, family, config, how", SLOW)
def test_checkpoints_of_every_kind_are_exported(
    world_pool: WorldPool, tmp_path: Path, ranks: int, family: str, config: dict[str, Any], how: str
) -> None:
    (tmp_path / "all").mkdir()
    _check(world_pool, tmp_path, ranks, family, config, how)


def _tiny() -> GPT2LMHeadModel:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 5, "n_positions": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_amazons_stages_and_raw_files_are_exported(tmp_path: Path) -> None:
    """By the documented layout: `module.` before names, no cuts and no partition of ours."""
    model = _tiny()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    folder = tmp_path / "ten_partial"
    folder.mkdir()
    half = len(weights) // 2
    for stage, names in enumerate((list(weights)[:half], list(weights)[half:])):
        torch.save({name: weights[name] for name in names} | {"_smp_is_partial": True}, folder / f"model_{stage}_0.pt")
    torch.save({"model_config": model.config}, folder / "user_content.pt")
    (tmp_path / "newest").write_text("ten_partial")
    torch.save(model.state_dict(), tmp_path / "fullmodel.pt")
    model.config.save_pretrained(tmp_path)
    for source in (tmp_path, folder, tmp_path / "fullmodel.pt"):
        out = export_v1_checkpoint(source, tmp_path / f"out-{source.name}")
        found = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_put_together_is_named(tmp_path: Path) -> None:
    model = _tiny()
    for ranks in ("0_0", "0_1"):
        torch.save({"model": model.state_dict()}, tmp_path / f"state.pt_{ranks}")
    assert (
        is_v1_checkpoint(tmp_path / "state.pt")
        and not is_v1_checkpoint(tmp_path)
        and not is_v1_checkpoint(tmp_path / "no")
    )
    with pytest.raises(CheckpointError, match=r"state\.pt_0_1 is of tensor ranks"):
        export_v1_checkpoint(tmp_path / "state.pt", tmp_path / "out")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match=r"keeps no 'model_config'.*put the model's config\.json into"):
        export_v1_checkpoint(tmp_path / "bare.pt", tmp_path / "out")
    torch.save({"model": {"other": torch.ones(1)}, "model_config": model.config}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"lacks transformer\.wte\.weight.* of gpt2, and holds other"):
        export_v1_checkpoint(tmp_path / "other.pt", tmp_path / "out")
    (tmp_path / "one_partial").mkdir()
    torch.save({"pipeline": 1, "tensor": 2, "shard": 1, "steps": 1}, tmp_path / "one_partial" / "partition.pt")
    torch.save(model.state_dict(), tmp_path / "one_partial" / "model_0_0.pt")
    with pytest.raises(CheckpointError, match=r"cuts_0_0\.pt is not there"):
        export_v1_checkpoint(tmp_path / "one_partial", tmp_path / "out")
    assert not (tmp_path / "out").exists()
