"""`DistributedModel.cpu()`: whole weights in the script's module, and training that goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise.smp as smp
from shardwise.smp.exceptions import MessageError
from shardwise.testing.world import WorldPool
from tests.smp.scripts import LEARNING_RATE, batches, make_model, train_step

SHARDED: dict[str, Any] = {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_gradient_clipping": 0.0}
CASES: list[Any] = [
    (1, {}),
    (2, SHARDED | {"bf16": True}),
    (2, {"ddp": True, "tensor_parallel_degree": 2}),
    (2, {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}),
    (2, {"ddp": True, "shard_optimizer_state": True, "bf16": True}),
    pytest.param(4, SHARDED | {"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
]


def _step(model: Any, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    loss = float(train_step(model, batches()[number].chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean())
    optimizer.step()
    return loss


def _made() -> tuple[Any, Any]:
    model: Any = smp.DistributedModel(make_model("gpt2"))
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def _trained(config: dict[str, Any], lends: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and the weights behind them; `lends` calls `cpu()` after each, and looks."""
    smp.init(config)
    try:
        model, optimizer = _made()
        losses = []
        for number in range(3):
            losses.append(_step(model, optimizer, number))
            if lends:
                with torch.no_grad():
                    model.state_dict()
                    train_step(model, batches()[0].chunk(smp.dp_size())[smp.dp_rank()])  # leaves some gathered
                _look(model, config)
        return losses, model.cpu().state_dict()  # the exact ones, where training computes in another dtype
    finally:
        smp.state.reset()


def _look(model: Any, config: dict[str, Any]) -> None:
    plain = make_model("gpt2")
    assert model.cpu() is model and model.cpu() is model
    module = model.get_module()
    own = dict(module.named_parameters(remove_duplicate=False))
    assert all(type(each) is nn.Parameter and each.device.type == "cpu" for each in own.values())
    assert all(not isinstance(each, DTensor) for each in module.buffers())
    weights = model.state_dict() if smp.rank() == 0 else {}  # asked for by one rank alone
    expected = plain.state_dict()
    if smp.rank() == 0:
        assert {name: value.shape for name, value in weights.items()} == {
            name: value.shape for name, value in expected.items()
        }
        assert all(torch.equal(weights[name], each.detach()) for name, each in own.items())
    assert {name: each.shape for name, each in own.items()}.items() <= {n: v.shape for n, v in expected.items()}.items()
    if config.get("pipeline_parallel_degree", 1) == 1:
        assert module.state_dict().keys() == expected.keys()
        assert own["lm_head.weight"] is own["transformer.wte.weight"]
    else:
        assert 0 < len(own) < len(dict(plain.named_parameters()))


def _both(config: dict[str, Any]) -> tuple[list[float], list[float], float]:
    losses, weights = _trained(config, True)
    expected, others = _trained(config, False)
    return losses, expected, max(float((weights[name] - others[name]).abs().max()) for name in others)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, config", CASES)
def test_training_goes_on_behind_whole_weights(world_pool: WorldPool, ranks: int, config: dict[str, Any]) -> None:
    for losses, expected, far in world_pool.run(ranks, _both, config):
        assert losses == expected and len(set(losses)) == 3 and far == 0


def _touched(folder: str) -> tuple[float, list[str]]:
    """What is done to whole weights, or beside them, holds."""
    smp.init(SHARDED)
    try:
        model, optimizer = _made()
        _step(model, optimizer, 0)
        before = model.state_dict()
        wrong = []
        with torch.no_grad():
            for parameter in model.cpu().parameters():
                parameter.data.fill_(0.5)
        for what, weights in (("whole", model.state_dict()), ("partial", model.local_state_dict())):
            wrong += [what] * any(bool((value != 0.5).any()) for name, value in weights.items() if name in before)
        model.cpu().load_state_dict(before)
        far = max(float((model.state_dict()[name] - value).abs().max()) for name, value in before.items())
        model.cpu().half()
        wrong += ["half"] * any(value.dtype != torch.float16 for value in model.state_dict().values())
        assert type(model.get_module()) is type(make_model("gpt2"))
        model.get_module().load_state_dict(before)
        smp.save_checkpoint(folder, "one", partial=True)
        wrong += ["saved"] * any(not isinstance(parameter, DTensor) for parameter in model.parameters())
        model.cpu()
        model.get_module()(input_ids=batches()[0])
        wrong += ["forward"] * model._smp.weights.are_lent
        model.cpu()
        home, smp.state._device = smp.state.device, torch.device("meta")  # an accelerator that every machine has
        assert model.to("meta") is model
        smp.state._device = home
        wrong += ["back"] * any(not isinstance(parameter, DTensor) for parameter in model.parameters())
        return far, wrong
    finally:
        smp.state.reset()


@pytest.mark.slow
def test_whole_weights_can_be_changed_and_others_go_round_them(world_pool: WorldPool, tmp_path: Path) -> None:
    for far, wrong in world_pool.run(2, _touched, str(tmp_path)):
        assert far == 0 and wrong == []


class _Own:
    """An optimizer that is none of torch's, around one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def _updated_behind(own: bool) -> float:
    """How far an optimizer's step moves the weights that are whole on the CPU meanwhile."""
    smp.init(SHARDED if own else SHARDED | {"fp16": True})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2", torch.float32))
        inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer = smp.DistributedOptimizer(_Own(inner) if own else inner)
        train_step(model, batches()[0].chunk(2)[smp.rank()])
        if not own:
            optimizer.clip_master_grads(1.0)
        before = model.cpu().state_dict()
        optimizer.step()
        train_step(model, batches()[0].chunk(2)[smp.rank()])
        return max(float((model.state_dict()[name] - value).abs().max()) for name, value in before.items())
    finally:
        smp.state.reset()


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_update_is_not_lost_for_older_whole_weights(world_pool: WorldPool, own: bool) -> None:
    assert min(world_pool.run(2, _updated_behind, own)) > 1e-4


def _alone() -> str:
    smp.init(SHARDED)
    try:
        model, optimizer = _made()
        _step(model, optimizer, 0)
        smp.barrier() if smp.rank() else model.cpu()
    except MessageError as error:
        return str(error)
    finally:
        smp.state.reset()
    return "it went on"


def test_a_rank_that_does_not_come_is_named(world_pool: WorldPool) -> None:
    first, second = world_pool.run(2, _alone)
    assert "model.cpu" in first and "smp.barrier" in first + second


def test_before_the_first_step_it_is_torchs() -> None:
    smp.init({})
    try:
        module = make_model("gpt2")
        model: Any = smp.DistributedModel(module)
        held = list(module.parameters())
        assert model.cpu() is model and all(a is b for a, b in zip(model.parameters(), held))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(held, lr=LEARNING_RATE))
        assert _step(model, optimizer, 0) > 0
    finally:
        smp.state.reset()
