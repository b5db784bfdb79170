"""`register_comm_hook`: a script's own mean of gradients, against the library's and against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

import shardwise.smp as smp
from shardwise.smp.exceptions import ShardwiseError, SMPUnsupportedError, SMPValidationError, StepUsageError
from shardwise.testing.world import WorldPool
from tests.smp.scripts import LEARNING_RATE, batches, make_model, reference, train_step

SMALL = 8192 / 2**20  # MiB of a bucket, so that the tiny model has several
HALF = ("bf16", "fp16")
DDP: dict[str, Any] = {"ddp": True, "microbatches": 2}


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def _mean(seen: list[Any], bucket: Any) -> Any:
    """Over the data ranks and the microbatches, as SMP asks of a hook."""
    shapes = [parameter.shape for parameter in bucket.parameters()]
    views = [gradient.shape for gradient in bucket.gradients()] == shapes
    seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), views))
    bucket.buffer().div_(smp.rdp_size() * smp.num_microbatches())
    work = dist.all_reduce(bucket.buffer(), group=smp.get_rdp_process_group(), async_op=True)
    assert work is not None
    return work.get_future()


def _zeros(_: Any, bucket: Any) -> Any:
    return _done(torch.zeros_like(bucket.buffer()))


def _train(model: Any, optimizer: Any) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by step and microbatch of this rank, and the weights afterwards."""
    shared = smp.state.cfg.prescaled_batch
    ranks, mine = (smp.rdp_size(), smp.rdp_rank()) if shared else (smp.dp_size(), smp.dp_rank())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        out = train_step(model, batch.chunk(ranks)[mine])
        optimizer.step()
        losses.append([float(loss) for loss in out.outputs])
    return losses, model.state_dict()


def _hooked(config: dict[str, Any], hook: Any, state: Any = None, family: str = "gpt2", **wrapping: Any) -> Any:
    """(losses, weights) of training with `hook`, or without one."""
    smp.init(config)
    try:
        dtype = torch.float64 if config.keys().isdisjoint(HALF) else torch.float32
        model: Any = smp.DistributedModel(make_model(family, dtype), **wrapping)
        if hook is not None:
            model.register_comm_hook(state, hook)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), 1024.0)
        return _train(model, optimizer)
    finally:
        smp.state.reset()


def _error(config: dict[str, Any], family: str) -> tuple[float, float, float, list[Any]]:
    """Largest differences of losses and weights from those without a hook, how far the weights have moved, and what
    the hook saw."""
    seen: list[Any] = []
    losses, weights = _hooked(config, _mean, seen, family, bucket_cap_mb=SMALL)
    expected, others = _hooked(config, None, None, family)
    start = make_model(family).state_dict()
    moved = max(float((weights[name].double() - start[name]).abs().max()) for name in start)
    far = max(float((weights[name] - others[name]).abs().max()) for name in others)
    return float((torch.tensor(losses) - torch.tensor(expected)).abs().max()), far, moved, seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, config, family",
    [
        (2, DDP, "gpt2"),  # whose embeddings are tied
        pytest.param(2, DDP | {"bf16": True}, "gpt_neox", marks=pytest.mark.slow),
        pytest.param(2, DDP | {"fp16": True}, "gpt2", marks=pytest.mark.slow),
        (2, DDP | {"pipeline_parallel_degree": 2}, "gpt2"),
        (2, DDP | {"tensor_parallel_degree": 2}, "gpt2"),
        pytest.param(4, DDP | {"pipeline_parallel_degree": 2}, "gpt2", marks=pytest.mark.slow),
        pytest.param(
            *(4, DDP | {"tensor_parallel_degree": 2, "prescaled_batch": True}, "gpt_neox"), marks=pytest.mark.slow
        ),
    ],
)
def test_the_mean_as_a_hook_trains_as_without_one(
    world_pool: WorldPool, ranks: int, config: dict[str, Any], family: str
) -> None:
    tolerance = 1e-9 if config.keys().isdisjoint(HALF) else 1e-4  # what fp16 and bf16 round
    for losses, weights, moved, seen in world_pool.run(ranks, _error, config, family):
        assert losses <= tolerance and weights <= tolerance < moved
        steps = [seen[first : first + len(seen) // 3] for first in range(0, len(seen), len(seen) // 3)]
        assert len(steps) == 3 and steps[0] == steps[1] == steps[2] and len(steps[0]) > 2
        assert [index for index, *_ in steps[0]] == list(range(len(steps[0])))
        assert [last for _, last, *_ in steps[0]] == [False] * (len(steps[0]) - 1) + [True]
        assert all(size and views for *_, size, views in steps[0])


@pytest.mark.slow
def test_a_hook_on_one_rank_is_plain_torchs_training() -> None:
    losses, weights = _hooked(DDP, _mean, [])
    expected, others = reference(make_model("gpt2"), 2, None)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-9)
    assert max(float((weights[name] - others[name]).abs().max()) for name in others) <= 1e-9


def _stock(kind: str) -> tuple[Any, Any]:
    if kind == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    hooks["wrapped"] = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    return None, hooks.get(kind, default_hooks.allreduce_hook)


def _compressed(kind: str) -> tuple[float, float, float]:
    """How far the weights are from those without a hook and from the other rank's, and how far they have moved."""
    config = {"ddp": True}  # one microbatch: these hooks take no mean over several
    hook_state, hook = _stock(kind)
    _, weights = _hooked(config, hook, hook_state, bucket_cap_mb=SMALL)
    _, others = _hooked(config, None)
    start = make_model("gpt2").state_dict()
    far = max(float((weights[name] - others[name]).abs().max()) for name in others)
    moved = max(float((weights[name] - start[name]).abs().max()) for name in start)
    smp.init(config)
    try:
        other = smp.allgather(weights, smp.WORLD)
    finally:
        smp.state.reset()
    apart = max(float((other[0][name] - other[1][name]).abs().max()) for name in weights)
    return far, apart, moved


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, least, most",
    [
        ("allreduce", -1.0, 1e-12),
        pytest.param("fp16", 0.0, 1e-4, marks=pytest.mark.slow),
        pytest.param("bf16", 0.0, 1e-3, marks=pytest.mark.slow),
        pytest.param("wrapped", 0.0, 1e-4, marks=pytest.mark.slow),
        ("power_sgd", 0.0, 0.01),
    ],
)
def test_torchs_own_hooks_act(world_pool: WorldPool, kind: str, least: float, most: float) -> None:
    for far, apart, moved in world_pool.run(2, _compressed, kind):
        assert least < far <= most < moved and apart == 0


def _held_back() -> tuple[float, int, float, float]:
    """Gradients inside of `no_sync` come to the hook with those behind it; zeros and unused parameters."""
    smp.init(DDP)
    try:
        module = make_model("gpt2")
        module.lonely = torch.nn.Parameter(torch.ones(3))  # no backward reaches it
        model: Any = smp.DistributedModel(module)
        calls: list[Any] = []
        model.register_post_partition_hook(lambda model, optimizer: model.register_comm_hook(calls, _mean))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.5))
        rows = [batch.chunk(2)[smp.rank()] for batch in batches()]
        with model.no_sync():
            train_step(model, rows[0])
        early = len(calls)
        train_step(model, rows[1])
        found = {entry.name: entry.local_gradient for entry in model._smp.weights.parallel.tensor_map}
        optimizer.step()
        lonely = float(model.state_dict()["lonely"].sum())
    finally:
        smp.state.reset()
    plain = make_model("gpt2")
    for ids in [piece for batch in batches()[:2] for piece in batch.chunk(4)]:
        (plain(input_ids=ids, labels=ids).loss / 4).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    far = max(float((found[name] - theirs[name]).abs().max()) for name in theirs)  # type: ignore[operator]
    return far, early, float(found["lonely"] is not None), lonely


def test_what_was_held_back_comes_to_the_hook_once(world_pool: WorldPool) -> None:
    for far, early, shown, lonely in world_pool.run(2, _held_back):
        assert far <= 1e-12 and early == 0
        assert shown == 0.0 and lonely == 3.0  # as without a hook: no gradient, no weight decay


def _not_zeroed() -> float:
    """How far the gradients of a second step on top of the first one's are from what the hook makes of both."""
    smp.init(DDP)
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        model.register_comm_hook([], _mean)
        for batch in batches()[:2]:
            train_step(model, batch.chunk(smp.dp_size())[smp.dp_rank()])
        found = {entry.name: entry.local_gradient for entry in model._smp.weights.parallel.tensor_map}
    finally:
        smp.state.reset()
    plain = make_model("gpt2")
    for batch, again in zip(batches()[:2], (2, 1)):  # what the hook has averaged is divided by the microbatches again
        (plain(input_ids=batch, labels=batch).loss / again).backward()
    return max(float((found[name] - each.grad).abs().max()) for name, each in plain.named_parameters())  # type: ignore[operator]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_were_not_zeroed_go_through_the_hook(world_pool: WorldPool, ranks: int) -> None:
    assert max(world_pool.run(ranks, _not_zeroed)) <= 1e-12


def _nothing() -> float:
    _, weights = _hooked(DDP, _zeros)
    return max(float((weights[name] - value).abs().max()) for name, value in make_model("gpt2").state_dict().items())


def test_a_hook_that_brings_zeros_leaves_the_weights(world_pool: WorldPool) -> None:
    assert world_pool.run(2, _nothing) == [0.0, 0.0]


MISTAKES: list[tuple[dict[str, Any], Any, Any, str, str]] = [
    ({"sharded_data_parallel_degree": 2}, {}, _mean, "SMPUnsupportedError", "sharded_data_parallel_degree=2 leaves"),
    ({"shard_optimizer_state": True}, {}, _mean, "SMPUnsupportedError", "shard_optimizer_state=True leaves"),
    ({}, {"overlapping_allreduce": False}, _mean, "SMPValidationError", "needs overlapping_allreduce=True"),
    ({}, {}, 3, "SMPValidationError", "hook=3 cannot be called"),
    ({"tensor_parallel_degree": 2}, {}, default_hooks.allreduce_hook, "SMPValidationError", "mean over 2 ranks, and 1"),
    ({"partitions": 2}, {}, default_hooks.fp16_compress_hook, "SMPValidationError", "get_rdp_process_group"),
    ({}, {}, lambda state, bucket: bucket.buffer(), "StepUsageError", "returned Tensor; return a torch.futures.Future"),
    ({}, {}, lambda state, bucket: _done(bucket.buffer()[1:]), "StepUsageError", "one tensor of the bucket's"),
    ({}, {}, lambda state, bucket: _done("x"), "StepUsageError", "brought str"),
]


def _mistake(number: int) -> tuple[str, str]:
    config, wrapping, hook, _, _ = MISTAKES[number]
    try:
        _hooked({"ddp": True} | config, hook, None, **wrapping)
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", "it went on"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_have_names_and_fixes(world_pool: WorldPool, number: int) -> None:
    for kind, said in world_pool.run(2, _mistake, number):
        assert kind == MISTAKES[number][3] and MISTAKES[number][4] in said
    assert issubclass(SMPUnsupportedError, ShardwiseError) and issubclass(SMPValidationError, ValueError)


def test_a_model_has_one_hook_from_the_start() -> None:
    smp.init({"microbatches": 2})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        model.register_comm_hook(state=[], hook=_mean)
        with pytest.raises(StepUsageError, match="one communication hook"):
            model.register_comm_hook([], _mean)
    finally:
        smp.state.reset()
    smp.init({"microbatches": 2})
    try:
        model = smp.DistributedModel(make_model("gpt2"))
        train_step(model, batches()[0])
        with pytest.raises(StepUsageError, match="before the first step"):
            model.register_comm_hook([], _mean)
    finally:
        smp.state.reset()
