"""Features of torch on the engine, one by one, against the numbers of Gloo: DDP, FSDP2, DTensor, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardwise.collectives import registration
from shardwise.testing.world import WorldPool

STEPS = 4
ROUNDING = 1e-6  # of fp32; Gloo adds in another order


class Branches(nn.Module):
    """A network of which a forward may leave a branch out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.left, self.right = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor, branch: str = "both") -> Tensor:
        self.calls += 1
        hidden = self.body(values).relu()
        outputs = [
            each(hidden) for name, each in (("left", self.left), ("right", self.right)) if branch in (name, "both")
        ]
        return sum(outputs)  # type: ignore[return-value]


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, 16, generator=generator)


def train(module: nn.Module, optimizer: Any = None, branch: Callable[[int], str] = lambda _: "both") -> list[Tensor]:
    """Train; return the parameters."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        module(inputs(step), branch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in module.parameters()]


def ddp(group: Any, bucket_cap_mb: float = 0.001, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Branches(), process_group=group, bucket_cap_mb=bucket_cap_mb, **options)


def hooked(
    hook: Any, state: Callable[[Any], Any] = lambda group: group, bucket_cap_mb: float = 0.001
) -> Callable[[Any], list[Tensor]]:
    def feature(group: Any) -> list[Tensor]:
        module = ddp(group, bucket_cap_mb)
        module.register_comm_hook(state(group), hook)
        return train(module)

    return feature


def power(hook: Any, bucket_cap_mb: float = 25, **options: Any) -> Callable[[Any], list[Tensor]]:
    """A hook of PowerSGD; on one bucket: Gloo's two threads run callbacks too, and where two wait it hangs."""

    def state(group: Any) -> Any:
        return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, **options)

    return hooked(hook, state, bucket_cap_mb)


def power_in_turn(state: Any, bucket: Any) -> Any:
    """PowerSGD that waits for a bucket before the next one."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def post_local_sgd(group: Any) -> list[Tensor]:
    module = ddp(group)
    state = post_localSGD_hook.PostLocalSGDState(process_group=group, subgroup=group, start_localSGD_iter=2)
    module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
    return train(module, PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), 0.1), averager))


def overlapped_optimizer(group: Any) -> list[Tensor]:
    module = ddp(group)
    module._register_fused_optim(torch.optim.SGD, lr=0.1)
    return train(module, torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))


def zero(group: Any) -> list[Tensor]:
    module = ddp(group)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    parameters = train(module, optimizer)
    optimizer.consolidate_state_dict(0)
    return parameters


def overlapped_zero(group: Any) -> list[Tensor]:
    module = ddp(group)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.1
    )
    module.register_comm_hook(
        None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, module, optimizer, shard_buckets=True)
    )
    return train(module, optimizer)


def late_steps(group: Any) -> list[Tensor]:
    """The same without overlap: its first iterations see the buckets and update nothing."""
    module = ddp(group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        module(inputs(step)).square().mean().backward()
        if step >= 2:
            optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in module.parameters()]


def accumulated(group: Any) -> list[Tensor]:
    module = ddp(group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        with module.no_sync():
            module(inputs(step)).square().mean().backward()
        module(inputs(step + 100)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in module.parameters()]


def unused(group: Any) -> list[Tensor]:
    branches = ("left", "right")
    return train(ddp(group, find_unused_parameters=True), branch=lambda step: branches[(step + dist.get_rank()) % 2])


def static(group: Any) -> list[Tensor]:
    return train(ddp(group, static_graph=True), branch=lambda _: "left")


def bucket_views(group: Any) -> list[Tensor]:
    module = ddp(group, gradient_as_bucket_view=True)
    parameters = train(module)
    module(inputs(9)).square().mean().backward()
    return [*parameters, *(each.grad for each in module.parameters() if each.grad is not None)]


def mixed_precision(group: Any) -> list[Tensor]:
    from torch.nn.parallel.distributed import _MixedPrecision

    return train(ddp(group, mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)))


def uneven_inputs(group: Any) -> list[Tensor]:
    """The first rank has more steps than the others."""
    module = ddp(group)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    with Join([module, optimizer]):
        for step in range(STEPS + 2 * (dist.get_rank() == 0)):
            module(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in module.parameters()]


def early_end(group: Any) -> list[Tensor]:
    """The rank that has more inputs has an error when another one has none left."""
    module = ddp(group)
    steps = 0
    with pytest.raises(RuntimeError, match="exhausted"), module.join(throw_on_early_termination=True):
        for step in range(STEPS + 2 * (dist.get_rank() == 0)):
            module(inputs(step)).square().mean().backward()
            steps += 1
    return [torch.tensor(float(steps))]


def fsdp2(group: Any) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    module = Branches()
    fully_shard(module.body, mesh=DeviceMesh.from_group(group, "cpu"))
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    train(module)
    return [each.full_tensor().detach() for each in module.parameters()]  # type: ignore[attr-defined]


def placements(group: Any) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(35.0).view(5, 7)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    found = [rows.redistribute(placements=[each]) for each in (Shard(1), Replicate())]
    product = rows @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)])
    return [each.full_tensor() for each in (*found, product, rows.sum(), rows.softmax(0), rows.mean(1))]


def checkpointed(group: Any) -> list[Tensor]:
    """Save on both ranks what DTensors hold, and load it into others."""
    import os

    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(35.0).view(5, 7)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "steps": 3,
        "own": torch.ones(2) * dist.get_rank(group),
    }
    directory = os.path.join(os.environ["DIRECTORY"], dist.get_backend(group))
    dcp.save(state, checkpoint_id=directory, process_group=group)
    columns = {"rows": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]), "steps": 0, "own": torch.zeros(2)}
    dcp.load(columns, checkpoint_id=directory, process_group=group, planner=DefaultLoadPlanner())
    assert columns["steps"] == 3
    return [columns["rows"].full_tensor(), columns["own"]]


FEATURES: dict[str, Callable[[Any], list[Tensor]]] = {
    "allreduce_hook": hooked(default_hooks.allreduce_hook),
    "fp16_compress_hook": hooked(default_hooks.fp16_compress_hook),
    # In a lambda, since torch refuses the hook by its name where there is no CUDA.
    "bf16_compress_hook": hooked(lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)),
    "fp16_compress_wrapper": power(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "noop_hook": hooked(debugging_hooks.noop_hook, lambda _: None),
    "powerSGD_hook": power(powerSGD_hook.powerSGD_hook),
    "powerSGD_hook, several buckets": power(powerSGD_hook.powerSGD_hook, bucket_cap_mb=0.001),
    "powerSGD_hook, rank 2": power(powerSGD_hook.powerSGD_hook, matrix_approximation_rank=2),
    "post_localSGD_hook": post_local_sgd,
    "_register_fused_optim": overlapped_optimizer,
    "ZeroRedundancyOptimizer": zero,
    "hook_with_zero_step": overlapped_zero,
    "no_sync": accumulated,
    "find_unused_parameters": unused,
    "static_graph": static,
    "gradient_as_bucket_view": bucket_views,
    "join": uneven_inputs,
    "join, throw_on_early_termination": early_end,
    "fully_shard": fsdp2,
    "DTensor": placements,
    "torch.distributed.checkpoint": checkpointed,
}
# What gives Gloo's numbers where torch refuses it the feature by name, or Gloo hangs.
WITHOUT = {
    "hook_with_zero_step": late_steps,
    "powerSGD_hook, several buckets": power(lambda state, bucket: power_in_turn(state, bucket), bucket_cap_mb=0.001),
}
QUICK = ("find_unused_parameters", "join")


def difference(name: str) -> float:
    """The largest difference of a number between Gloo and the engine, over the largest number."""
    registration.register()
    ours = FEATURES[name](dist.new_group(backend="shardwise"))
    right = WITHOUT.get(name, FEATURES[name])(dist.new_group(backend="gloo"))
    assert len(ours) == len(right) > 0
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in zip(ours, right))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_a_feature_has_gloos_numbers(
    world_pool: WorldPool, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIRECTORY", str(tmp_path))
    assert max(world_pool.run(2, difference, name)) < ROUNDING


# What ends in an error of torch's own on every CPU backend. The hooks of quantization read the value of an all-gather's
# future as NCCL gives it, PowerSGD's batched hook has a matrix where its orthogonalization takes several, and mixed
# precision asks the CPU for events.
REFUSED: dict[str, Callable[[Any], list[Tensor]]] = {
    "quantization_pertensor_hook": hooked(quantization_hooks.quantization_pertensor_hook),
    "quantization_perchannel_hook": hooked(quantization_hooks.quantization_perchannel_hook),
    "batched_powerSGD_hook": power(powerSGD_hook.batched_powerSGD_hook),
    "bf16_compress_hook": hooked(default_hooks.bf16_compress_hook),
    "mixed_precision": mixed_precision,
}


def refused(name: str) -> list[str]:
    registration.register()
    told = []
    for backend in ("shardwise", "gloo"):
        with pytest.raises(Exception) as caught:
            REFUSED[name](dist.new_group(backend=backend))
        told.append(f"{type(caught.value).__name__}: {caught.value}".partition("\n")[0])
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_ends_as_on_gloo(world_pool: WorldPool, name: str) -> None:
    for ours, of_gloo in world_pool.run(2, refused, name):
        assert ours == of_gloo
