"""Mixers of states that tensor ranks share by heads or channels, found on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.mixers import mixer_splits
from shardwise.model.tensor_split import TensorSplit
from shardwise.testing.toy_configs import toy_config


def facts_of(model_type: str, **config: Any) -> ModelFacts:
    """The facts of a toy."""
    job = Job.model_validate({"model": {"config": toy_config(model_type, **config)}})
    return discover(build_model(job), job)


def kinds(facts: ModelFacts, mixer: str) -> dict[str, str]:
    """How the modules of a mixer are split, by their names in it."""
    splits = facts.tensor_splits.items()
    return {name.removeprefix(f"{mixer}."): split.kind for name, split in splits if name.startswith(f"{mixer}.")}


def test_mamba_is_split_by_channels() -> None:
    facts = facts_of("mamba")
    assert facts.mixers["backbone.layers.0.mixer"].heads == 48
    assert kinds(facts, "backbone.layers.0.mixer") == {
        "in_proj": "column",
        "conv1d": "channels",
        "x_proj": "row",
        "dt_proj": "channels",
        "out_proj": "row",
    }
    assert facts.tensor_splits["backbone.layers.0.mixer.x_proj"].inside
    assert facts.sequence_parallel.ok and facts.supports(Axis.TENSOR).ok


def test_mamba_2_is_split_by_heads() -> None:
    facts = facts_of("mamba2", n_groups=2)
    fused = facts.tensor_splits["backbone.layers.0.mixer.in_proj"]
    assert fused.sizes == (64, 64, 32, 32, 8)
    assert kinds(facts, "backbone.layers.1.mixer") == {
        "in_proj": "column",
        "conv1d": "channels",
        "norm": "channels",
        "out_proj": "row",
    }


def test_a_rank_has_its_heads_and_what_its_group_shares() -> None:
    fused = TensorSplit("column", sizes=(8, 8, 4, 4, 4), shared=2, groups=2, behind=1, heads=4)
    taken = [[(part.start, part.stop) for part in fused.own_slices(28, degree, 1)] for degree in (2, 4)]
    assert taken == [
        [(4, 8), (12, 16), (18, 20), (22, 24), (26, 28)],
        [(2, 4), (10, 12), (16, 18), (20, 22), (25, 26)],
    ]
    assert [degree for degree in range(1, 9) if fused.shares_heads(degree)] == [1, 2, 4]


@pytest.mark.parametrize("degrees", [(3, 1), (2, 2)])
def test_where_heads_are_not_shared_out_mixers_are_split_by_outputs(degrees: tuple[int, int]) -> None:
    """Three does not divide eight heads; a state that goes from context rank to context rank is of all of them."""
    facts = facts_of("mamba2")
    assert facts.for_degrees(4, 1) is facts
    whole = facts.for_degrees(*degrees)
    assert not whole.mixers and "mixers" in whole.sequence_parallel.reason
    assert kinds(whole, "backbone.layers.0.mixer") == {"in_proj": "gathered"}


def interleaved(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A mixer with gate and values in turns, where Mamba has them side by side."""
    values, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    steps = self.x_proj(values)[..., : self.time_step_rank] @ self.dt_proj.weight.T
    moved = F.conv1d(values.mT, self.conv1d.weight, padding=3, groups=values.shape[-1])[..., : values.shape[1]].mT
    made: Tensor = self.out_proj(moved * gate * steps + self.D)
    return made


def test_a_mixer_whose_parts_do_not_make_the_whole_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its names and sizes it is Mamba's."""
    job = Job.model_validate({"model": {"config": toy_config("mamba")}})
    mamba: Any = build_model(job)
    assert len(mixer_splits(mamba)) == 2
    monkeypatch.setattr(type(mamba.backbone.layers[0].mixer), "forward", interleaved)
    assert not mixer_splits(mamba)


def test_a_mixer_that_holds_anything_else_is_none() -> None:
    job = Job.model_validate({"model": {"config": toy_config("mamba2")}})
    mamba: Any = build_model(job)
    mamba.backbone.layers[0].mixer.scale = nn.Parameter(torch.empty(8, device="meta"))
    assert list(mixer_splits(mamba)) == ["backbone.layers.1.mixer"]
