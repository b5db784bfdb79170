"""Mixers of states that tensor ranks share by heads or channels, found on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.mixers import mixer_splits
from shardwise.model.tensor_split import TensorSplit
from shardwise.testing.toy_configs import toy_config

NORM_OF_GROUPS = "group_size" in inspect.signature(MambaRMSNormGated).parameters
BY_OUTPUTS = "the norm of transformers 5.17's Mamba-2 goes over all groups, so that it is split by outputs"
by_heads = pytest.mark.skipif(not NORM_OF_GROUPS, reason=BY_OUTPUTS)


def toy(model_type: str, **config: Any) -> Any:
    """A toy on the meta device."""
    return build_model(Job.model_validate({"model": {"config": toy_config(model_type, **config)}}))


def kinds(splits: Mapping[str, TensorSplit], mixer: str) -> dict[str, str]:
    """How the modules of a mixer are split, by their names in it, itself by ""."""
    own = {name: split for name, split in splits.items() if name.startswith(mixer)}
    return {name.removeprefix(mixer).lstrip("."): split.kind for name, split in own.items()}


def test_mamba_is_split_by_channels() -> None:
    name = "backbone.layers.0.mixer"
    splits = mixer_splits(toy("mamba"))[name]
    assert splits[name].heads == 48
    assert kinds(splits, name) == {
        "": "mixer",
        "in_proj": "column",
        "conv1d": "channels",
        "x_proj": "row",
        "dt_proj": "channels",
        "out_proj": "row",
    }
    assert splits[f"{name}.x_proj"].inside and not splits[f"{name}.out_proj"].inside


@by_heads
def test_mamba_2_is_split_by_heads() -> None:
    name = "backbone.layers.1.mixer"
    splits = mixer_splits(toy("mamba2", n_groups=2))[name]
    assert splits[f"{name}.in_proj"].sizes == (64, 64, 32, 32, 8)
    assert kinds(splits, name) == {
        "": "mixer",
        "in_proj": "column",
        "conv1d": "channels",
        "norm": "channels",
        "out_proj": "row",
    }


@pytest.mark.parametrize("model_type", ["falcon_mamba", "jamba", "bamba", "falcon_h1", "nemotron_h", "zamba", "zamba2"])
def test_mixers_of_their_kin_are_found(model_type: str) -> None:
    """Norms of what steers a scan, factors of a projection, and weights that lie by head are among them."""
    model = toy(model_type)
    assert mixer_splits(model).keys() == {n for n, module in model.named_modules() if hasattr(module, "A_log")}


def test_a_rank_has_its_heads_and_what_its_group_shares() -> None:
    fused = TensorSplit("column", sizes=(8, 8, 4, 4, 4), shared=2, groups=2, behind=1, heads=4)
    taken = [[(part.start, part.stop) for part in fused.own_slices(28, degree, 1)] for degree in (2, 4)]
    assert taken == [
        [(4, 8), (12, 16), (18, 20), (22, 24), (26, 28)],
        [(2, 4), (10, 12), (16, 18), (20, 22), (25, 26)],
    ]
    assert [degree for degree in range(1, 9) if fused.shares_heads(degree)] == [1, 2, 4]


@by_heads
def test_where_heads_are_not_shared_out_mixers_are_split_by_outputs() -> None:
    """Three does not divide eight heads; a state that goes from context rank to context rank is of all of them."""
    job = Job.model_validate({"model": {"config": toy_config("mamba2", num_hidden_layers=1)}})
    facts = discover(build_model(job), job)
    assert facts.supports(Axis.TENSOR).ok and facts.sequence_parallel.ok
    assert facts.mixers and facts.for_degrees(4, 1) is facts
    for degrees in ((3, 1), (2, 2)):
        whole = facts.for_degrees(*degrees)
        assert not whole.mixers and "mixers" in whole.sequence_parallel.reason
        assert kinds(whole.tensor_splits, "backbone.layers.0.mixer") == {"in_proj": "gathered"}


def interleaved(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A mixer with gate and values in turns, where Mamba has them side by side."""
    values, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    steps = self.x_proj(values)[..., : self.time_step_rank] @ self.dt_proj.weight.T
    moved = F.conv1d(values.mT, self.conv1d.weight, padding=3, groups=values.shape[-1])[..., : values.shape[1]].mT
    made: Tensor = self.out_proj(moved * gate * steps + self.D)
    return made


def test_a_mixer_whose_parts_do_not_make_the_whole_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its names and sizes it is Mamba's."""
    mamba = toy("mamba")
    assert len(mixer_splits(mamba)) == 2
    monkeypatch.setattr(type(mamba.backbone.layers[0].mixer), "forward", interleaved)
    assert not mixer_splits(mamba)


@by_heads
def test_a_mixer_that_holds_anything_else_is_none() -> None:
    mamba = toy("mamba2")
    mamba.backbone.layers[0].mixer.scale = nn.Parameter(torch.empty(8, device="meta"))
    assert list(mixer_splits(mamba)) == ["backbone.layers.1.mixer"]
