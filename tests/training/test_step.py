"""What a step promises besides right numbers: agreement of ranks, skipped steps, ragged batches, empty shards."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import DataError, ModelError
from shardwise.job import devices
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.testing.world import WorldPool
from shardwise.training.init import fingerprint
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.setup import AssembledJob, check_whole_batches, set_up
from shardwise.training.step import (
    Control,
    ControlMessage,
    StepResult,
    _check_count,
    evaluate,
    exchange_control,
    read_at_once,
    squared_share,
    train_step,
)
from tests.parity.jobs import make_job, make_module_job
from tests.parity.test_experts import experts_job

CPU = torch.device("cpu")


def one_step(run: AssembledJob, step: int = 0, stop: bool = False) -> StepResult:
    return train_step(run.model, run.objective, run.stream.batches(step), run.optimizer, run.scaler, step, stop)


def weights(run: AssembledJob) -> str:
    return fingerprint((entry.name, entry.whole()) for entry in run.model.tensor_map)


def steps(job: Job, count: int) -> list[tuple[float, float, int]]:
    run = set_up(job, CPU)
    results = [one_step(run, step) for step in range(count)]
    return [(result.loss, result.grad_norm, result.count) for result in results]


def steps_in_fp32(job: Job, count: int) -> list[tuple[float, float, int]]:
    """The same where the device has no fp64 to sum in."""
    with mock.patch.object(devices, "has_fp64", lambda device_type: False):
        assert squared_share([], CPU).dtype == torch.float32
        return steps(job, count)


def overflowing(job: Job, count: int) -> list[tuple[bool, float, bool]]:
    """(skipped, loss scale of the step, did weights change) of each step."""
    run = set_up(job, CPU)
    found = []
    for step in range(count):
        before = weights(run)
        result = one_step(run, step)
        found.append((result.skipped, result.loss_scale, weights(run) != before))
    return found


def poisoned(job: Job, value: float) -> tuple[bool, bool, bool]:
    """Gradients of rank 1 are not finite in the first step: (skipped, weights changed, next step skipped)."""
    run = set_up(job, CPU)
    before, original = weights(run), LanguageModelling.loss

    def bad(self: Any, microbatch: Any, output: Any) -> Any:
        loss, count = original(self, microbatch, output)
        return loss * (value if dist.get_rank() == 1 else 1.0), count

    with mock.patch.object(LanguageModelling, "loss", bad):
        first = one_step(run)
    changed = weights(run) != before
    return first.skipped, changed, one_step(run, 1).skipped


def stopping(job: Job) -> list[bool]:
    run = set_up(job, CPU)
    return [one_step(run, 0).stop, one_step(run, 1, stop=dist.get_rank() == 1).stop]


def validation(job: Job) -> tuple[float, float, bool]:
    run = set_up(job, CPU)
    batches = list(run.stream.evaluation(run.data.validation, 2))
    losses = [evaluate(run.model, run.objective, batches).loss for _ in range(2)]
    return losses[0], losses[1], run.model.module.training


def local_sizes(job: Job) -> tuple[list[int], float]:
    run = set_up(job, CPU)
    result = one_step(run)
    return [entry.local.numel() for entry in run.model.tensor_map], result.loss


def test_fp16_overflow_skips_the_step_and_halves_the_scale(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, precision={"compute": "fp16", "loss_scale": {"init_scale": 2.0**24}})
    everyone = world_pool.run(2, overflowing, job, 12)
    assert everyone[0] == everyone[1]
    skipped = [one[0] for one in everyone[0]]
    first_good = skipped.index(False)
    assert first_good >= 1 and all(skipped[:first_good])
    assert [one[1] for one in everyone[0][: first_good + 1]] == [2.0 ** (24 - n) for n in range(first_good + 1)]
    assert [one[2] for one in everyone[0]] == [not flag for flag in skipped]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_ranks_non_finite_gradient_skips_the_step_of_all(
    world_pool: WorldPool, corpora: Path, value: float
) -> None:
    everyone = world_pool.run(2, poisoned, make_job(corpora), value)
    assert everyone == [(True, False, False)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, microbatch", [(2, 2), (4, 1), (3, 2)])
def test_a_ragged_step_counts_each_sample_once(
    world_pool: WorldPool, corpora: Path, ranks: int, microbatch: int
) -> None:
    """5 samples; padding rows count nowhere."""
    training = {"sequences_per_step": 5, "microbatch_size": microbatch}
    alone = world_pool.run(1, steps, make_job(corpora, dropout=0.1, training={"sequences_per_step": 5}), 2)[0]
    ragged = world_pool.run(ranks, steps, make_job(corpora, dropout=0.1, training=training), 2)
    for found in ragged:
        assert [count for *_, count in found] == [5 * 16] * 2
        assert [value for *pair, _ in found for value in pair] == pytest.approx(
            [value for *pair, _ in alone for value in pair], rel=1e-11
        )


def test_ranks_without_any_row_take_part(world_pool: WorldPool, corpora: Path) -> None:
    job = make_module_job(corpora)  # weights of 6 rows
    alone = world_pool.run(1, local_sizes, job)[0]
    everyone = world_pool.run(8, local_sizes, job)
    assert 0 in everyone[6][0] and any(everyone[6][0]) and not any(everyone[7][0])
    assert [sum(sizes) for sizes in zip(*(sizes for sizes, _ in everyone))] == alone[0]
    assert all(loss == pytest.approx(alone[1], rel=1e-12) for _, loss in everyone)


def test_any_ranks_wish_to_stop_is_everyones(world_pool: WorldPool, corpora: Path) -> None:
    assert world_pool.run(2, stopping, make_job(corpora)) == [[False, True]] * 2


def test_evaluation_is_the_same_on_every_layout_and_without_dropout(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, dropout=0.3, data={"validation_fraction": 0.2})
    alone = world_pool.run(1, validation, job)[0]
    for first, second, training in world_pool.run(3, validation, job):
        assert first == second == pytest.approx(alone[0], rel=1e-12) and training


def test_same_numbers_again(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, dropout=0.1, parallel={"sharded_data_parallel_degree": 2})
    assert world_pool.run(4, steps, job, 3) == world_pool.run(4, steps, job, 3)


def hash_of_samples(hashes: list[int], data_ranks: int) -> int | str:
    """The hash of a step's samples, or what is wrong with them, where this rank has read its own of `hashes`."""
    rank = dist.get_rank()
    is_first = rank == 0 or data_ranks == 2
    layout = mock.Mock(data_ranks=data_ranks, is_first_of_rows=is_first)
    # What ranks that share rows read is summed in host memory, wherever the model is: none has to be waited for.
    device = CPU if data_ranks == 2 else torch.device("meta")
    model = mock.Mock(is_reporting_rank=is_first, layout=layout, device=device)
    try:
        control = exchange_control(model, ControlMessage(3, 3, 0, 0, hashes[rank]))
        is_read = control.on_device is None  # ranks that share no rows leave it to the read behind backward
        assert is_read == (data_ranks == 1)
        return (control.message or ControlMessage(*control.on_device.tolist())).data_hash
    except DataError as error:
        return str(error)


def test_ranks_that_share_rows_compare_their_samples(world_pool: WorldPool) -> None:
    lowest = -(1 << 63)
    for hashes, data_ranks, expected in (([5, 6], 2, 11), ([5, 5], 1, 5), ([lowest, lowest], 1, lowest)):
        assert world_pool.run(2, hash_of_samples, hashes, data_ranks) == [expected] * 2
    for said in world_pool.run(2, hash_of_samples, [5, 6], 1):
        assert "have read different samples" in said and "seed what it draws with the index" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalisation", ["token", "sample", "pair"])
def test_a_seed_from_counts_on_the_device_is_the_hosts(normalisation: str, dtype: torch.dtype) -> None:
    model = mock.Mock(plan=mock.Mock(normalisation=normalisation), device=CPU, accumulation_dtype=dtype)
    for labels, scale in ((0, 1.0), (3, 1.0), (1_000_003, 65536.0), ((1 << 53) - 1, 3.0)):
        message = ControlMessage(labels, labels if normalisation == "token" else labels // 2, 0, 0, -5)
        here, there = Control(message), Control(None, torch.tensor(message))
        assert torch.equal(here.seed(model, scale), there.seed(model, scale))


def test_values_are_read_at_once_and_as_they_are() -> None:
    floats = [0.1, -0.0, math.inf, -math.inf, 5e-324]
    tensors = [
        torch.tensor(floats, dtype=torch.float64),
        torch.tensor([-1, 1 << 62]),
        torch.empty(0, dtype=torch.int64),
    ]
    tensors.append(torch.tensor([math.nan], dtype=torch.float64))
    real, whole, none, [not_a_number] = read_at_once(tensors)
    assert real == floats and math.copysign(1, real[1]) == -1
    assert whole == [-1, 1 << 62] and none == [] and math.isnan(not_a_number)


def test_values_of_fp32_are_read_beside_whole_ones() -> None:
    real, whole = read_at_once([torch.tensor([0.5, -math.inf, 1e-45]), torch.tensor([-1, 1 << 62])])
    assert real[:2] == [0.5, -math.inf] and 0 < real[2] < 2e-45 and whole == [-1, 1 << 62]


EXPERTS = {"balancing_loss": "global", "balancing_coefficient": 0.1}


@pytest.mark.parametrize("model", ["llama", "experts", "experts by sequence"])
def test_sums_in_fp32_train_as_those_in_fp64(world_pool: WorldPool, corpora: Path, model: str) -> None:
    router = {**EXPERTS, "balancing_loss": "sequence"} if "sequence" in model else EXPERTS
    fp32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"clip_norm": 0.1}}
    job = make_job(corpora, **fp32) if model == "llama" else experts_job(corpora, "qwen3_moe", router=router, **fp32)
    [wide], [narrow] = world_pool.run(1, steps, job, 3), world_pool.run(1, steps_in_fp32, job, 3)
    assert narrow != wide  # norms are rounded
    assert [one[2] for one in narrow] == [one[2] for one in wide]
    for (loss, norm, _), (exact_loss, exact_norm, _) in zip(narrow, wide, strict=True):
        assert loss == pytest.approx(exact_loss, rel=1e-5) and norm == pytest.approx(exact_norm, rel=1e-4)


@pytest.mark.parametrize("counted", [True, False])
def test_a_loss_function_that_counts_otherwise_is_refused(counted: bool) -> None:
    with nullcontext() if counted else pytest.raises(ModelError, match=r"model\.loss counts 8, the batches"):
        _check_count(7 if counted else 8, 7)


def without_labels(job: Job) -> tuple[bool, float, float]:
    run = set_up(job, CPU)
    batches = run.stream.batches(0)
    for batch in batches:
        assert batch.labels is not None
        batch.labels.fill_(IGNORED)
    result = train_step(run.model, run.objective, batches, run.optimizer, run.scaler, 0)
    return result.skipped, run.scaler.scale, evaluate(run.model, run.objective, [batches]).loss


def test_without_a_label_there_is_no_loss_and_no_overflow(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, precision={"compute": "fp16"})
    [(skipped, scale, loss)] = world_pool.run(1, without_labels, job)
    assert (skipped, scale) == (True, 2.0**16) and math.isnan(loss)


class ManyLabels(LanguageModelling):
    """Counts one label more in each microbatch than fp32 can."""

    def loss(self, microbatch: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().loss(microbatch, output)[0], torch.tensor(2**24 + 1)


def counted_labels(job: Job) -> float:
    run = set_up(job, CPU)
    return float(run.model.run(ManyLabels(run.model), run.stream.batches(0), 0)[1])


def test_labels_are_counted_where_fp32_cannot(world_pool: WorldPool, corpora: Path) -> None:
    """A count that differs from the batches' own is refused as the loss's mistake."""
    job = make_job(corpora, training={"sequences_per_step": 3, "microbatch_size": 1}, precision={"compute": "fp32"})
    assert world_pool.run(1, counted_labels, job) == [3 * (2**24 + 1)]


@pytest.mark.parametrize(
    ("first", "step", "validation", "says"),
    [
        (4, 8, 8, None),
        (4, 7, 8, "1 padding rows of training.sequences_per_step=7; use 8"),
        (4, 8, 7, "7 samples, fewer than"),
        (3, 8, 8, "1 padding rows of training.sequences_per_step=3 of training.batch_size_schedule; use 4"),
    ],
)
def test_a_modules_own_mean_needs_whole_batches(first: int, step: int, validation: int, says: str | None) -> None:
    sizes = StepSizes((SizeStage(first), SizeStage(step, 2, 2 * first)))
    plan = mock.Mock(
        data_ranks=2, microbatch=2, accumulations=[1, 2], sequences_per_step=step, step_sizes=sizes, steps=4,
        sequences_of=sizes.of,
    )  # fmt: skip
    data = mock.Mock(validation=range(validation), sets={})
    with nullcontext() if says is None else pytest.raises(ModelError, match=says):
        check_whole_batches(plan, data)
