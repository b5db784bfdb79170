"""LAMB and NovoGrad against their papers' formulas, written out for one step and several."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.errors import ConfigError, ModelError
from shardwise.smp.v1.optimizers import FusedLAMB, FusedLamb, FusedNovoGrad
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model

RATE, DECAY, BETAS = 0.05, 0.1, (0.9, 0.99)


def _run(optimizer: Any, parameter: nn.Parameter, gradients: Tensor) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def _start() -> tuple[nn.Parameter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return nn.Parameter(start.clone()), start, torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)


def test_lamb_is_the_papers() -> None:
    parameter, x, gradients = _start()
    optimizer = FusedLAMB([parameter], RATE, betas=BETAS, eps=1e-6, weight_decay=DECAY)
    found = _run(optimizer, parameter, gradients)
    assert optimizer.param_groups[0]["step"] == 3  # where schedules of apex's users look for it
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step, g in enumerate(gradients, 1):
        g = g * min(1.0, 1.0 / float(g.norm()))
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        r = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + 1e-6) + DECAY * x
        x = x - RATE * x.norm() / r.norm() * r
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-6)
    assert FusedLamb is FusedLAMB


def test_novograd_is_the_papers() -> None:
    parameter, x, gradients = _start()
    optimizer = FusedNovoGrad([parameter], RATE, False, BETAS, weight_decay=DECAY, grad_averaging=False)
    found = _run(optimizer, parameter, gradients)
    m, v = torch.zeros_like(x), gradients[0].norm() ** 2
    for g in gradients:
        v = BETAS[1] * v + (1 - BETAS[1]) * g.norm() ** 2
        m = BETAS[0] * m + g / (v.sqrt() + 1e-8)
        x = x - RATE * (m + DECAY * x)
    torch.testing.assert_close(found, x)
    for kind in (FusedLAMB, FusedNovoGrad):
        with pytest.raises(ModelError, match="amsgrad"):
            kind([parameter], amsgrad=True)


def _trained(model: Any, optimizer: Any, after_step: Callable[[], Any] = lambda: None) -> list[float]:
    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    losses = []
    for ids in batches():
        optimizer.zero_grad()
        losses.append(float(step(model, ids).reduce_mean()))
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler's, that no step came before
            after_step()
    return losses


def _losses(config: dict[str, Any], kind: str) -> list[float]:
    smp.init(config)
    try:
        model = smp.DistributedModel(make_model("gpt2"))
        optimizer = smp.DistributedOptimizer(getattr(smp.optimizers, kind)(model.parameters(), lr=0.02))
        return _trained(model, optimizer)
    except ModelError as error:
        assert "not known to be elementwise" in str(error)
        return []
    finally:
        smp.state.reset()


@pytest.mark.parametrize("kind", ["FusedLAMB", pytest.param("FusedNovoGrad", marks=pytest.mark.slow)])
def test_stages_train_as_one_process_and_shards_are_refused(world_pool: WorldPool, kind: str) -> None:
    alone = _losses({"microbatches": 2}, kind)
    staged = world_pool.run(2, _losses, {"pipeline_parallel_degree": 2, "microbatches": 2}, kind)
    assert len(alone) == 3 and alone[-1] < alone[0]
    assert staged[0] == pytest.approx(alone, rel=1e-9)
    assert world_pool.run(2, _losses, {"sharded_data_parallel_degree": 2}, kind) == [[], []]


def _scheduled(config: dict[str, Any], before: bool) -> list[float]:
    """Losses with a scheduler that is made before `DistributedOptimizer`, or after it."""
    smp.init(config)
    try:
        model = smp.DistributedModel(make_model("gpt2"))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if before else []
        optimizer = smp.DistributedOptimizer(optimizer)
        schedules = schedules or [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        losses = _trained(model, optimizer, schedules[0].step)
        return [*losses, optimizer.param_groups[0]["lr"]]
    finally:
        smp.state.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline_parallel_degree": 2, "microbatches": 2},  # its step sums tied gradients
        {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.01, "ddp": True},  # its step clips
    ],
)
def test_a_scheduler_may_be_made_before_the_optimizer_is_wrapped(world_pool: WorldPool, config: dict[str, Any]) -> None:
    before, after = (world_pool.run(2, _scheduled, config, first) for first in (True, False))
    assert before == after and before[0][-1] == 0.02 / 8


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"dynamic_loss_args": {"init_scal": 4}}, r"unknown key dynamic_loss_args\.init_scal=4\. Did you mean"),
        ({"dynamic_loss_args": {"scale_window": 0}}, r"dynamic_loss_args\.scale_window=0: must be greater"),
        ({"dynamic_loss_scale": False, "static_loss_scale": -1}, "static_loss_scale=-1: must be greater than 0"),
    ],
)
def test_a_wrong_loss_scale_is_refused(settings: dict[str, Any], said: str) -> None:
    smp.init({"fp16": True})
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
        with pytest.raises(ConfigError, match=said):
            smp.DistributedOptimizer(optimizer, **{"dynamic_loss_scale": True} | settings)
    finally:
        smp.state.reset()


class Own:
    """As scripts of 2021 wrap theirs: no optimizer of torch's, with attributes of its own that it sets itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.overflow, self.seen = optimizer, True, 0.0

    def step(self) -> None:
        self.overflow = False
        self.optimizer.step()

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        self.optimizer.zero_grad(set_grads_to_None)

    def update_master_grads(self) -> None:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        self.seen = sum(float(gradient.square().sum()) for gradient in gradients)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_state_dict": self.optimizer.state_dict(), "overflow": self.overflow}


def _owned(config: dict[str, Any], own: bool) -> Any:
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = smp.DistributedOptimizer(Own(inner) if own else inner, dynamic_loss_args={})

        @smp.step
        def step(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
            model.backward(loss)
            return loss

        losses, seen = [], 0.0
        for ids in batches():
            optimizer.zero_grad(set_grads_to_None=True)
            losses.append(float(step(model, ids).reduce_mean()))
            if own:
                optimizer.update_master_grads()
                seen = optimizer.seen
            optimizer.step()
        if own:
            optimizer.overflow = "set"
            assert optimizer.local_state_dict()["overflow"] == "set" and optimizer.optimizer is inner
        assert optimizer.redefined_params
        return losses, seen, _numbers(model, optimizer)
    finally:
        smp.state.reset()


def _numbers(model: Any, optimizer: Any) -> tuple[int, int]:
    """How many numbers there are, and how many lead by every way to the same parameter of the right name and size."""
    index, by_id, local = optimizer.param_name_to_index(), optimizer._param_id_to_index(), {}
    names = smp.state_mod.state.param_index_to_name_tp_group[smp.tp_rank()]
    back = smp.state_mod.state.param_name_to_index_tp_group[smp.tp_rank()]
    local = optimizer._param_index_to_param_local()
    virtual = dict(model.virtual_named_parameters())
    right = [
        name for name, number in index.items()
        if names[number] == name and back[name] == number and by_id[id(local[number])] == number
        and local[number] is virtual[name]
    ]  # fmt: skip
    return len(local), len(right)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config",
    [{"pipeline_parallel_degree": 2, "microbatches": 2}, {"tensor_parallel_degree": 2, "prescaled_batch": True}],
)
def test_an_optimizer_of_the_scripts_own_class_keeps_its_ways(world_pool: WorldPool, config: dict[str, Any]) -> None:
    owned, plain = (world_pool.run(2, _owned, config, own) for own in (True, False))
    for rank, ((losses, seen, numbers), (expected, _, same)) in enumerate(zip(owned, plain)):
        assert losses == expected and seen > 0  # gradients are complete before its own step
        tied = rank if "microbatches" in config else 0  # the embedding is on both stages, and in the first one's groups
        assert 0 < numbers[0] == numbers[1] == same[0] - tied and same[0] == same[1]


def test_what_holds_no_optimizer_is_refused() -> None:
    smp.init({})
    try:
        plain: Any = smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        assert plain.optimizer is plain and not hasattr(plain, "inner")  # SMP's may be a wrapper of it
        with pytest.raises(ModelError, match="object is none of torch"):
            smp.DistributedOptimizer(object())
    finally:
        smp.state.reset()
