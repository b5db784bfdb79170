"""What goes wrong without a word in plain FSDP, and is refused or kept right here: SMP version 2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise.smp.v2 as tsm
from shardwise.errors import CheckpointError, ConfigError, LegalityError
from shardwise.smp.v2.grad_norm import clip_grad_norm_
from shardwise.smp.v2.options import read_parameters
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches
from tests.smp.sharded_scripts import make_model, wrap

REENTRANT = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)


def test_parameters_that_are_switched_off_are_said() -> None:
    off = {"enabled": False, "parameters": {"hybrid_shard_degree": 2}}
    values, notes = read_parameters(off, {})
    assert values["hybrid_shard_degree"] == 0 and ["enabled=False" in note for note in notes] == [True]


def _refused(config: dict[str, Any], transforms: bool) -> str:
    """What FSDP says to a model that was not transformed, or that got a layer beside a split projection since, as
    adapters of low rank put it there."""
    try:
        tsm.init(config)
        model = make_model("llama")
        if transforms:
            model = tsm.transform(model)
            model.model.layers[1].self_attn.q_proj.low_rank = torch.nn.Linear(8, 8)
        wrap(model)
    except ConfigError as error:
        return str(error)
    finally:
        tsm.state.reset()
    return ""


@pytest.mark.parametrize(
    "config, transforms, says",
    [
        (
            {"context_parallel_degree": 2},
            False,
            "context_parallel_degree=2 and expert_parallel_degree=1 split models that",
        ),
        ({"expert_parallel_degree": 2}, False, "expert_parallel_degree=2 split models that tsm.transform is given"),
        ({"tensor_parallel_degree": 2}, True, "q_proj.low_rank.bias is in the model since tsm.transform"),
    ],
)
def test_what_degrees_would_not_split_is_refused(
    world_pool: WorldPool, config: dict[str, Any], transforms: bool, says: str
) -> None:
    for said in world_pool.run(2, _refused, config, transforms):
        assert says in said


def _refused_by_transform() -> str:
    """Of a model that cannot be told positions, whose inputs a script would split."""
    try:
        tsm.init({"context_parallel_degree": 2})
        config = toy_config("mamba")
        tsm.transform(AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)))
    except LegalityError as error:
        return str(error)
    finally:
        tsm.state.reset()
    return ""


def test_a_model_that_has_to_see_whole_sequences_is_refused(world_pool: WorldPool) -> None:
    for said in world_pool.run(2, _refused_by_transform):
        assert "the script splits the inputs of mamba, which has to see sequences whole" in said


def _frozen_names() -> set[str]:
    """Of a split model of which a projection was frozen before."""
    try:
        tsm.init({"tensor_parallel_degree": 2})
        model: Any = make_model("llama")
        model.model.layers[0].self_attn.q_proj.requires_grad_(False)
        model = tsm.transform(model)
        return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    finally:
        tsm.state.reset()


@pytest.mark.slow
def test_frozen_weights_that_are_split_stay_frozen(world_pool: WorldPool) -> None:
    assert world_pool.run(2, _frozen_names) == [{"model.layers.0.self_attn.q_proj.weight"}] * 2


def _norms() -> tuple[float, float]:
    """Of a model that is not transformed and keeps a cache, its blocks recomputed, and of plain transformers."""
    try:
        tsm.init({"hybrid_shard_degree": 1, "sm_activation_offloading": False})
        ids, plain = batches()[0], make_model("llama")
        plain(input_ids=ids, labels=ids).loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        model = wrap(make_model("llama"), classes=(LlamaDecoderLayer,))
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=REENTRANT, check_fn=lambda part: isinstance(part, LlamaDecoderLayer)
        )
        model(input_ids=ids, labels=ids)["loss"].backward()
        return float(clip_grad_norm_(model, 1e9)), float(expected)
    finally:
        tsm.state.reset()


def test_recomputation_does_not_add_to_a_cache(world_pool: WorldPool) -> None:
    found, expected = world_pool.run(1, _norms)[0]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_of_other_degrees_is_named(tmp_path: Path) -> None:
    weights = {"model": {"weight": torch.ones(2)}}
    checkpoint.save(weights, storage_writer=checkpoint.FileSystemWriter(tmp_path / "tp2-0"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"no \.metadata of a finished checkpoint, and tp2-0 below it"):
        checkpoint.load_state_dict(weights, checkpoint.FileSystemReader(tmp_path), no_dist=True)
