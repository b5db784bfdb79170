"""A loop of one's own brings microbatches of one size where rows change each other's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.collectives import registration
from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.given_model import GivenModel
from shardwise.training.session import Session
from tests.habits.building import POSITIONS, WIDTH, squared_error
from tests.model.test_row_coupling import MeanOff, Mixing
from tests.parity.jobs import make_job

SECTIONS: dict[str, Any] = {"training": {"steps": 4}, "precision": {"compute": "fp64"}, "parallel": {"device": "cpu"}}
DATA = {"factory": "tests.habits.building:Rows"}


def microbatches(session: Session, rows: int, number: int) -> list[dict[str, Tensor]]:
    """Return this rank's microbatches of a step of equal rows on any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = session.layout.data_ranks, session.layout.data_rank
    count = rows * number * ranks
    x, y = torch.randn(count, POSITIONS, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)
    starts = [(index * ranks + rank) * rows for index in range(number)]
    return [{"x": x[start : start + rows], "labels": y[start : start + rows]} for start in starts]


def losses_or_refusals(steps: list[tuple[int, int]]) -> list[float | str]:
    """Return what a session of each module comes to in each of some steps."""
    torch.manual_seed(0)
    results: list[float | str] = []
    example = {"x": torch.zeros(4, POSITIONS, WIDTH)}
    sources: list[Callable[[], nn.Module] | nn.Module] = [Mixing, MeanOff, MeanOff()]
    for source in sources:
        with Session(model=source, example=example, **SECTIONS) as session:
            results += [_came_to(session, rows, number) for rows, number in steps]
    results.append(_of_data_of_job(MeanOff()))
    return results


def _came_to(session: Session, rows: int, number: int) -> float | str:
    try:
        return session.step(microbatches(session, rows, number), loss_function=squared_error).loss
    except ShardwiseError as error:
        return str(error)


def _of_data_of_job(module: nn.Module) -> float | str:
    try:
        with Session(model=module, data=DATA, **SECTIONS):
            return 0.0
    except ShardwiseError as error:
        return str(error)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.blocks(x) * scale  # type: ignore[no-any-return]


def with_shared_inputs() -> list[tuple[float, int]]:
    """Return loss and samples of a step with one scale for all rows: ahead of them, behind them, and without dims."""
    x, labels, results = torch.ones(4, 4), torch.ones(4, 1), []
    one = torch.ones(1, 1)
    for batch in ({"scale": one, "x": x}, {"x": x, "scale": one}, {"scale": one[0, 0], "x": x}):
        example = {"x": torch.zeros(4, 4), "scale": one}
        with Session(model=Scaled, example=example, **SECTIONS) as session:
            step = (mapping for mapping in [{**batch, "labels": labels}])
            loss = session.evaluate([{**batch, "labels": labels}], loss_function=squared_error)
            results.append((session.step(step, loss_function=squared_error).loss, session.progress.samples))
            assert results[-1][0] == pytest.approx(loss)
    return results


def test_rows_are_those_of_the_labels_where_an_input_is_shared(world_pool: WorldPool) -> None:
    [[ahead, behind, number]] = world_pool.run(1, with_shared_inputs)
    assert ahead == behind == number and ahead[1] == 4


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def of_unequal_rows(sizes: list[list[int]]) -> list[Any]:
    """Return the losses and counted samples of three steps, in which each rank's microbatches have so many rows."""
    with Session(model=Dropping, example={"x": torch.zeros(4, 4)}, **SECTIONS) as session:
        results: list[Any] = []
        mine, first = [], 0
        x = torch.randn(sum(map(sum, sizes)), 4, generator=torch.Generator().manual_seed(1))
        for number in range(max(map(len, sizes))):
            for rank, of_rank in enumerate(sizes):
                rows = x[first : first + sum(of_rank[number : number + 1])]
                if rank == session.layout.data_rank and number < len(of_rank):
                    mine.append({"x": rows, "labels": rows.sum(1, keepdim=True)})
                first += len(rows)
        try:
            for _ in range(3):
                loss = session.step(mine, loss_function=squared_error).loss
                results.append((pytest.approx(loss, rel=1e-12), session.progress.samples))
        except ShardwiseError as error:
            return [str(error)]
    return results


@pytest.mark.parametrize("sizes", [[[3], [2]], pytest.param([[3, 1], [2, 4]], marks=pytest.mark.slow)])
def test_ranks_of_unequal_rows_drop_out_as_one_process_does(world_pool: WorldPool, sizes: list[list[int]]) -> None:
    [alone] = world_pool.run(1, of_unequal_rows, [[size for number in zip(*sizes, strict=True) for size in number]])
    assert [samples for _, samples in alone] == [sum(map(sum, sizes)) * step for step in (1, 2, 3)]
    assert world_pool.run(2, of_unequal_rows, sizes) == [alone, alone]


def of_unequal_rows_on_engine(store: str, sizes: list[list[int]]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # Gloo hangs on a rank that still connects when its peer closes
    dist.destroy_process_group()
    registration.register()
    dist.init_process_group("shardwise", store=dist.FileStore(store, size), rank=rank, world_size=size)
    return of_unequal_rows(sizes)


def test_unequally_many_microbatches_are_refused(world_pool: WorldPool, tmp_path: Path) -> None:
    for (said,) in world_pool.run(2, of_unequal_rows_on_engine, str(tmp_path / "store"), [[3], [2, 2]]):
        assert "(microbatches of a rank: 1) over world" in said and "bring equally many microbatches" in said


def refusals_of_shared_sequences(job: Job) -> list[str]:
    """Return what a session of context ranks says of microbatches of which they would see less than one process."""
    said: list[str] = []
    ids = torch.arange(16).view(2, 8)
    padded_ahead, padded_behind, counted = torch.ones(3, 2, 8, dtype=torch.int64)
    padded_ahead[0, :3] = padded_behind[0, 5:] = counted[0, 5:] = 0
    labels = ids.masked_fill(padded_behind == 0, -100)
    starting_anew = torch.arange(8).remainder(5).expand(2, 8)
    refused = [
        {"attention_mask": padded_ahead},
        {"attention_mask": counted, "labels": ids},
        {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)},
        {"position_ids": starting_anew},
    ]
    with Session(job) as session:
        for more in refused:
            with pytest.raises(ShardwiseError) as error:
                session.step({"input_ids": ids, "labels": labels, **more})
            said.append(str(error.value))
        with pytest.raises(ShardwiseError) as error:
            session.step({"inputs_embeds": torch.zeros(2, 8, 26), "labels": labels})
        said.append(str(error.value))
        session.step({"input_ids": ids, "labels": labels, "attention_mask": padded_behind})
        session.step({"input_ids": ids, "labels": labels, "position_ids": torch.arange(8).expand(2, 8) + 3})
        ones = torch.ones_like(ids)
        session.step({"input_ids": ids, "labels": labels, "position_ids": starting_anew, "attention_mask": ones})
    return said


def test_masks_and_positions_that_context_ranks_do_not_see_are_refused(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, "llama", layers=1, parallel={"context_parallel_degree": 2})
    for masked, counted, dims, positions, embeddings in world_pool.run(2, refusals_of_shared_sequences, job):
        assert "hides tokens from others" in masked and "hides tokens from others" in counted
        assert "attention_mask of [2, 1, 8, 8]" in dims and "no input_ids" in embeddings
        assert "do not count up" in positions and "parallel.context_parallel_degree 1" in positions


def test_a_sessions_own_module_is_tried_too() -> None:
    job = Job.model_validate(SECTIONS)
    example = {"x": torch.zeros(2, POSITIONS, WIDTH)}
    found = [GivenModel.of(module, 0, example).study(job).couples_rows for module in (Mixing(), MeanOff())]
    assert found == [False, True]


def refusals(job: Job) -> list[str]:
    """Return what a session says of calls that have no loss, and of saves among another run's checkpoints."""
    sections = job.model_dump(mode="json", include={"model", "data", "training", "parallel", "output"})
    said: list[str] = []
    with Session(sections) as session:
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        calls: list[Callable[[], object]] = [
            lambda: session.evaluate([]),
            lambda: session.step([{"input_ids": tokens}]),
            lambda: session.step([{"input_ids": tokens, "labels": tokens}], learning_rate=float("nan")),
        ]
        for call in calls:
            with pytest.raises(ShardwiseError) as refused:
                call()
            said.append(str(refused.value))
        session.step([{"input_ids": tokens, "labels": tokens}])
        judged = session.evaluate()
        assert session.evaluate([[{"input_ids": tokens, "labels": tokens}]]) != judged
        assert session.progress.validation_loss == judged  # what the caller brings decides nothing
        session.save(wait=True)
    for looks in (False, True):  # a look for a checkpoint to go on from, of which the job wants none, changes nothing
        with Session(sections) as session, pytest.raises(ShardwiseError) as refused:
            if looks:
                assert session.restore() == 0
            session.save(wait=True)
        said.append(str(refused.value))
    return said


def test_a_learning_rate_that_the_schedule_would_overwrite_is_refused(world_pool: WorldPool) -> None:
    [(refused, rates)] = world_pool.run(1, with_a_scheduler)
    assert "give step(learning_rate=...)" in refused
    assert rates == pytest.approx([3e-4, 3e-5])  # of 3e-3, the default


def with_a_scheduler() -> tuple[str, list[float]]:
    """Return what a step says of a scheduler on the optimizer, and the rates of steps that are given its own."""
    with Session(model=Dropping, example={"x": torch.zeros(4, 4)}, **SECTIONS) as session:
        batch = {"x": torch.ones(4, 4), "labels": torch.ones(4, 1)}
        inner, rates = session.optimizer.inner, []
        session.step(batch, loss_function=squared_error)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.1 ** (step + 1))
        with pytest.raises(ShardwiseError) as refused:
            session.step(batch, loss_function=squared_error)
        for _ in range(2):
            rates.append(scheduler.get_last_lr()[0])
            session.step(batch, loss_function=squared_error, learning_rate=rates[-1])
            scheduler.step()
        return str(refused.value), rates


def without_gradients() -> tuple[list[float], str]:
    """Return the gradient norms of a step, and of one under `no_grad`, and what one says of inference mode."""
    batch = {"x": torch.ones(4, 4), "labels": torch.ones(4, 1)}
    with Session(model=Dropping, example={"x": torch.zeros(4, 4)}, **SECTIONS) as session:
        norms = [session.step(batch, loss_function=squared_error).grad_norm]
        with pytest.raises(ShardwiseError) as refused, torch.inference_mode():
            session.step(batch, loss_function=squared_error)
    with Session(model=Dropping, example={"x": torch.zeros(4, 4)}, **SECTIONS) as session, torch.no_grad():
        norms.append(session.step(batch, loss_function=squared_error).grad_norm)
    return norms, str(refused.value)


def test_a_step_has_gradients_under_no_grad_too(world_pool: WorldPool) -> None:
    [((norm, under_no_grad), refused)] = world_pool.run(1, without_gradients)
    assert norm == under_no_grad != 0
    assert "inference_mode() has no gradients" in refused


def detached_error(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return tuple(value.detach() for value in squared_error(output, batch))  # type: ignore[return-value]


def with_a_detached_loss() -> tuple[str, bool]:
    """Return what a step says of a loss without a gradient, and whether it has updated anything."""
    with Session(model=Dropping, example={"x": torch.zeros(4, 4)}, **SECTIONS) as session:
        with pytest.raises(ShardwiseError) as refused:
            session.step({"x": torch.ones(4, 4), "labels": torch.ones(4, 1)}, loss_function=detached_error)
        return str(refused.value), any("step" in state for state in session.optimizer.inner.state.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_detached_on_every_rank_is_refused(world_pool: WorldPool, ranks: int) -> None:
    for refused, is_updated in world_pool.run(ranks, with_a_detached_loss):
        assert "have no gradient on any rank" in refused and not is_updated


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Residuals(nn.Module):
    """A chain of blocks whose loss is the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def steps_on_stages(stages: int) -> tuple[list[float], float, str]:
    """Return losses and norms of steps, the loss of an evaluation, and what a step without a loss function says."""
    torch.manual_seed(0)
    sections = {
        **SECTIONS, "training": {"steps": 4, "microbatch_size": 4},
        "parallel": {"device": "cpu", "pipeline_parallel_degree": stages},
    }  # fmt: skip
    generator, results = torch.Generator().manual_seed(1), list[float]()
    with Session(model=Residuals(), example={"x": torch.zeros(4, 4)}, **sections) as session:
        x, y = torch.randn(8, 4, generator=generator).double(), torch.randn(8, 1, generator=generator).double()
        batches = [{"x": x[:4], "labels": y[:4]}, {"x": x[4:], "labels": y[4:]}]
        for _ in range(2):
            result = session.step(batches, loss_function=squared_error)
            results += [result.loss, result.grad_norm]
        loss, refused = session.evaluate([batches], loss_function=squared_error), ""
        if stages > 1:
            with pytest.raises(ShardwiseError) as error:
                session.step(batches)
            refused = str(error.value)
    return results, loss, refused


def test_a_loop_brings_the_loss_of_a_module_on_stages(world_pool: WorldPool) -> None:
    [(expected, evaluated, _)] = world_pool.run(1, steps_on_stages, 1)
    for results, loss, refused in world_pool.run(2, steps_on_stages, 2):
        assert results == pytest.approx(expected, rel=1e-9) and loss == pytest.approx(evaluated, rel=1e-9)
        assert "give step() and evaluate() a loss_function" in refused


def test_calls_that_cannot_be_meant_are_refused(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = make_job(corpora, "gpt2", layers=1).model_copy(update={"output": str(tmp_path / "run")})
    for said in world_pool.run(2, refusals, job):
        batches, labels, rate, *saves = said
        assert "evaluate() got no batches" in batches and "has no labels" in labels
        assert "learning_rate=nan" in rate
        for save in saves:
            assert "holds checkpoints of an earlier run, the newest step-00000001; call restore()" in save


@pytest.mark.slow
def test_rows_that_change_each_other_come_in_microbatches_of_one_size(world_pool: WorldPool) -> None:
    [alone] = world_pool.run(1, losses_or_refusals, [(4, 2), (2, 2), (8, 1)])
    for shared in world_pool.run(2, losses_or_refusals, [(4, 1), (2, 1)]):
        assert shared[0] == pytest.approx(alone[0], rel=1e-9) and shared[2] == pytest.approx(alone[3], rel=1e-9)
        assert shared[4] == pytest.approx(alone[6], rel=1e-9)
        assert isinstance(shared[1], float) and "bring 4 on every layout" in str(shared[3])
        assert "MeanOff" in str(shared[5]) and "set training.microbatch_size, such as" in str(shared[6])
    assert [isinstance(result, float) for result in alone[:9]] == [True] * 4 + [False, True] + [True, False, True]
