"""Weight-decay groups, options and schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _device_dtype_check_for_fused
from transformers import get_scheduler

from shardwise._torch_compat.optimizers import fuses_on_gpu
from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.schedules import FALLING, SHAPES
from shardwise.model.parameter_optimizers import optimizer_of
from shardwise.parallel.layout import Layout
from shardwise.parallel.tensor_map import TensorMap
from shardwise.testing.oracle import scheduled_rate
from shardwise.training.optimizer import ShardedOptimizer, learning_rate, make_torch_optimizer


def made(model: nn.Module, **settings: Any) -> ShardedOptimizer:
    return ShardedOptimizer(TensorMap.of([model], Layout({})), OptimizerSection(**settings))


EVERY_SCHEDULE: list[dict[str, Any]] = [
    *({"schedule": name} for name in sorted(SHAPES.keys() - {"piecewise"})),
    {"schedule": "piecewise", "milestones": {2: 0.5, 300: 0.25}},
    *({"schedule": "warmup_stable_decay", "decay_type": kind, "decay_steps": 1} for kind in ("cosine", "1-sqrt")),
    {"schedule": "cosine_with_restarts", "cycles": 7},
]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))


def test_only_matrices_decay() -> None:
    net = model()
    optimizer = made(net, weight_decay=0.25)
    decay = {id(p): group["weight_decay"] for group in optimizer.inner.param_groups for p in group["params"]}
    by_name = {entry.name: decay[id(local)] for entry, local in optimizer.locals}
    assert by_name == {"0.weight": 0.25, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.25}


def test_updates_the_models_own_storage_as_torch_would() -> None:
    torch.manual_seed(0)
    net, twin = model(), model()
    twin.load_state_dict(net.state_dict())
    ours = made(net, name="AdamW", weight_decay=0.1, learning_rate=0.01, options={"betas": [0.8, 0.9]})
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), foreach=False)
    for _ in range(3):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad, q.grad = (torch.randn_like(p),) * 2
        ours.step()
        theirs.step()
        ours.zero_grad()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert ours.state_bytes() >= 2 * 4 * sum(p.numel() for p in net.parameters())


def test_frozen_and_unused_parameters_stay() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = made(net, weight_decay=0.5)
    assert [entry.name for entry, _ in optimizer.locals] == ["0.bias", "1.weight", "1.bias", "2.weight"]
    before = net[2].weight.detach().clone()
    net[0].bias.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(net[2].weight, before)


def test_a_rank_without_elements_can_step() -> None:
    optimizer = made(nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4))}))
    assert not optimizer.locals
    optimizer.set_learning_rate(0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state_bytes() == 0


def test_the_gradient_of_a_parameter_without_elements_here_is_dropped_too() -> None:
    net = nn.ParameterDict({"empty": nn.Parameter(torch.zeros(0, 4))})
    net["empty"].grad = torch.ones(100)[:0].view(0, 4)
    made(net).zero_grad()
    assert net["empty"].grad is None


@pytest.mark.parametrize("name", ["SGD", "Rprop", "Adagrad"])
def test_other_classes_and_their_options(name: str) -> None:
    options = {"SGD": {"momentum": 0.9}, "Rprop": {"etas": [0.5, 1.2]}}.get(name, {})
    optimizer = made(model(), name=name, options=options)
    assert type(optimizer.inner) is getattr(torch.optim, name)
    optimizer.set_learning_rate(0.5)
    assert {group["lr"] for group in optimizer.inner.param_groups} == {0.5}


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_no_class_is_fused_on_a_gpu_that_refuses_to_be(name: str) -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(3, device="cuda"))
        parameter.grad = torch.zeros(3, device="cuda")
        optimizer = make_torch_optimizer(
            optimizer_of(OptimizerSection(name=name)), [{"params": [parameter]}], torch.device("cuda")
        )
        try:
            optimizer.step()
        except (RuntimeError, AssertionError) as error:  # fake tensors do not know every kernel
            assert "fused=True" not in str(error)


def test_a_refusal_is_seen_before_the_first_step() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            _device_dtype_check_for_fused(self.param_groups[0]["params"][0], cuda_unsupported=True)

    assert fuses_on_gpu(torch.optim.AdamW) and not fuses_on_gpu(Refusing)


@pytest.mark.parametrize("given", EVERY_SCHEDULE, ids=str)
@pytest.mark.parametrize("warmup, steps", [(0, 10), (4, 10), (0, 1), (1, 2), (9, 10), (7, 400)])
def test_schedules(given: dict[str, Any], warmup: int, steps: int) -> None:
    settings = OptimizerSection(learning_rate=2.0, warmup_steps=warmup, final_learning_rate_ratio=0.25, **given)
    schedule = settings.schedule
    rates = [learning_rate(settings, step, steps, warmup) for step in range(steps)]
    assert rates[:warmup] == [2.0 * (step + 1) / warmup for step in range(warmup)]
    if schedule in ("constant", "linear", "cosine", "cosine_with_restarts"):
        assert rates[warmup] == 2.0
    rest = rates[warmup:]
    if schedule in FALLING and len(rest) > 1:
        assert rest[-1] == pytest.approx(0.5)
    if schedule != "cosine_with_restarts":
        assert all(a >= b for a, b in itertools.pairwise(rest))
    assert rates == pytest.approx([scheduled_rate(settings, step, steps) for step in range(steps)], rel=1e-14)
    if schedule in FALLING and len(rest) > 1:  # a loop of one's own may go on
        assert {learning_rate(settings, step, steps, warmup) for step in (steps, 3 * steps)} == {rates[-1]}


def test_known_points_of_the_schedules() -> None:
    linear = OptimizerSection(learning_rate=1.0, schedule="linear", final_learning_rate_ratio=0.0)
    assert [learning_rate(linear, step, 5, 0) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimizerSection(learning_rate=1.0, schedule="cosine", final_learning_rate_ratio=0.0)
    assert learning_rate(cosine, 2, 5, 0) == pytest.approx(0.5)
    assert learning_rate(cosine, 1, 4, 0) == pytest.approx(0.75)


def test_known_points_of_further_schedules() -> None:
    def rates(steps: int, warmup: int = 0, **settings: Any) -> list[float]:
        section = OptimizerSection(learning_rate=1.0, final_learning_rate_ratio=0.0, **settings)
        return [learning_rate(section, step, steps, warmup) for step in range(steps)]

    stable = {"schedule": "warmup_stable_decay", "decay_steps": 4}
    assert rates(8, 2, **stable) == [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(8, **stable, decay_type="1-sqrt")[4] == 0.5
    assert rates(8, **stable, decay_type="cosine")[5] == pytest.approx(0.5)
    assert rates(30, schedule="warmup_stable_decay")[26:] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])  # a tenth
    assert rates(16, 4, schedule="inverse_sqrt")[3::12] == [1.0, 0.5]
    restarts = rates(9, schedule="cosine_with_restarts", cycles=2)
    assert restarts == pytest.approx([1.0, 0.853553, 0.5, 0.146447] * 2 + [0.0], abs=1e-6)
    piecewise = {"schedule": "piecewise", "milestones": {4: 0.1, 2: 0.3}}
    assert rates(6, **piecewise) == [1.0, 1.0, 0.3, 0.3, 0.1, 0.1]


def test_schedules_of_transformers_are_the_same_functions() -> None:
    """Where theirs end at the last step too, or at none."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=4, num_training_steps=20)
    ours = OptimizerSection(learning_rate=1.0, schedule="inverse_sqrt")
    factor = theirs.lr_lambdas[0]  # of a count of steps that are done, which is one more here
    assert [learning_rate(ours, step, 20, 4) for step in range(20)] == pytest.approx([factor(i + 1) for i in range(20)])


def test_sgd_with_momentum_takes_a_late_first_gradient() -> None:
    settings = OptimizerSection(name="SGD", learning_rate=0.5, options={"momentum": 0.9})
    early, late = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = make_torch_optimizer(optimizer_of(settings), [{"params": [early, late]}], torch.device("cpu"))
    early.grad = torch.ones_like(early)
    optimizer.step()
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert early.tolist() == pytest.approx([-0.45, -0.45])
    assert late.tolist() == [0.5, 0.5]
