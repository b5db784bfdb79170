"""The sessions behind `smp.state` and `tsm.state`: what they know before `init`, and what `reset` gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import shardwise.smp as smp
import shardwise.smp.v2 as tsm
from shardwise._torch_compat.fsdp1 import OffloadWrapper
from shardwise.smp.exceptions import NotInitializedError


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    yield
    smp.state.reset()
    tsm.state.reset()


@pytest.mark.parametrize("name", ["cfg", "layout", "device", "waits"])
def test_version_1_names_the_call_that_is_missing(name: str) -> None:
    with pytest.raises(NotInitializedError, match=r"^smp is used before smp\.init\(\); call smp\.init\(\) first$"):
        getattr(smp.state, name)


@pytest.mark.parametrize("name", ["layout", "device", "rank"])
def test_version_2_names_the_call_that_is_missing(name: str) -> None:
    with pytest.raises(NotInitializedError, match=r"^tsm is used before tsm\.init\(\); call tsm\.init\(\) first$"):
        getattr(tsm.state, name)


def test_a_reset_session_has_no_model_and_no_optimizer() -> None:
    smp.init({})
    model = smp.DistributedModel(nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert smp.state.model is model and smp.state.optimizer is not None
    assert smp.state.optimizer.public is optimizer and not smp.state.param_index_to_name_tp_group
    smp.state.reset()
    assert smp.state.model is None and smp.state.weights is None and smp.state.optimizer is None
    assert not smp.is_initialized()


@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_meet_in_either_order(model_first: bool) -> None:
    smp.init({})
    module, ids = nn.Linear(2, 1), torch.ones(4, 2)
    if model_first:
        model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    if not model_first:
        model = smp.DistributedModel(module)
    before = module.weight.detach().clone()

    @smp.step
    def step(model: Any, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(rows).sum()
        model.backward(loss)
        return loss

    step(model, ids)
    optimizer.step()
    assert smp.state.param_name_to_index_tp_group == {0: {"weight": 0, "bias": 1}}
    torch.testing.assert_close(model.state_dict()["weight"], before - 4.0)


def test_reset_gives_torch_and_transformers_back() -> None:
    wrapper: Any = OffloadWrapper
    fsdp: Any = FullyShardedDataParallel
    model: Any = PreTrainedModel

    def replaced() -> list[Any]:
        return [fsdp.__init__, wrapper.__init__, model.get_correct_attn_implementation]

    before = replaced()
    tsm.init({})
    assert all(now is not then for now, then in zip(replaced()[:2], before[:2], strict=True))
    assert hasattr(modeling_llama, "LlamaFlashAttention2")
    tsm.state.reset()
    assert replaced() == before
    assert not hasattr(modeling_llama, "LlamaFlashAttention2")


def test_a_distributed_model_owns_its_parts() -> None:
    """No mixins: what it is made of can be read, and handed on, by itself."""
    assert smp.DistributedModel.__bases__ == (nn.Module,)
