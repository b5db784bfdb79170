"""A run that is interrupted and resumed has the losses of one that is not; on another layout the same to rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import truncate
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.stores import LocalStore
from shardwise.commands import train as entry
from shardwise.errors import CheckpointError, DamagedError, DataError, OutputError, WorkerError
from shardwise.job.schema import Job
from shardwise.observe.metrics import read_metrics
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.checkpoints import RunCheckpoints, resume_hint
from shardwise.training.output import check_output, check_resume, claim_output, clear_output
from shardwise.training.session import TrainingResult
from shardwise.training.setup import set_up
from shardwise.training.trainer import train_rank
from tests.checkpoint.stored import stored
from tests.parity.jobs import make_job, make_module_job

STEPS = 6
QUIET = {"tensorboard": False, "sample": False}


def a_job(corpora: Path, output: Path, **sections: Any) -> Job:
    """Six steps, a checkpoint after every second one."""
    base: dict[str, Any] = {"training": {"steps": STEPS, "sequences_per_step": 8}, "checkpoint": {"every": 2}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    job = make_job(corpora, observe=QUIET, **base)
    return job.model_copy(update={"output": str(output)})


def resumed(job: Job, **more: Any) -> Job:
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto", **more})})


def train(job: Job) -> TrainingResult:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    return train_rank(job, torch.device("cpu"))


def losses(job: Job) -> list[float]:
    records = [record for record in read_metrics(Path(job.output) / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def cut(job: Job, step: int) -> None:
    """As if the run had been killed after `step`: later checkpoints are gone, its results were never written."""
    for path in (Path(job.output) / "checkpoints").iterdir():
        if path.is_dir() and int(path.name.removeprefix("step-")) > step:
            rmtree(path)


EXACT: dict[str, dict[str, Any]] = {
    "fp32, dropout, fused attention": {
        "precision": {"compute": "fp32"}, "dropout": 0.1, "attention": "sdpa",
        "training": {"sequences_per_step": 7, "microbatch_size": 2},
    },
    "fp16, loss scale": {"precision": {"compute": "fp16", "loss_scale": {"scale_window": 2, "init_scale": 2.0**40}}},
    "zero-1, schedule": {
        "parallel": {"shard_optimizer_state": True},
        "optimizer": {"schedule": "linear", "warmup_steps": 3, "name": "RAdam"},
    },
    "synchronous": {"checkpoint": {"asynchronous": False}, "memory": {"offload_parameters": True}},
    "state of another shape than its parameter": {
        "optimizer": {"name": "torch.optim:Adafactor"}, "parallel": {"sharded_data_parallel_degree": 1},
    },
    "rows and columns of cut tensors": {"optimizer": {"name": "Adafactor"}},
    "averages": {"optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant"}},
    "an own optimizer with a number in its groups": {
        "optimizer": {"name": "tests.training.user_code:CountsInGroup"}, "precision": {"compute": "fp32"},
    },
}  # fmt: skip


QUICK = ("fp32, dropout, fused attention", "an own optimizer with a number in its groups")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in EXACT]
)
def test_same_layout_bit_for_bit(world_pool: WorldPool, corpora: Path, tmp_path: Path, case: str) -> None:
    job = a_job(corpora, tmp_path / "run", **{"checkpoint": {"keep_last": 3}, **EXACT[case]})
    job = resumed(job, resume="none", keep_last=3)
    whole = world_pool.run(2, train, job)[0]
    undisturbed, weights = losses(job), (tmp_path / "run/model/model.safetensors").read_bytes()
    cut(job, 4)
    again = world_pool.run(2, train, resumed(job))[0]
    assert losses(job) == undisturbed
    assert (again.validation_loss, again.tokens, again.skipped) == (whole.validation_loss, whole.tokens, whole.skipped)
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == weights


def test_buffers_of_any_dtype_are_kept(world_pool: WorldPool, tmp_path: Path) -> None:
    sections = {"model": {"factory": "tests.checkpoint.models:Phases"}, "checkpoint": {"every": 2, "keep_last": 2}}
    job = make_module_job(tmp_path, observe=QUIET, **sections).model_copy(update={"output": str(tmp_path / "run")})
    world_pool.run(2, train, job)
    undisturbed = losses(job)
    kept = stored(tmp_path / "run/checkpoints/step-00000002")
    assert torch.equal(kept["buffer/phases"], torch.polar(torch.ones(3), torch.arange(3.0)))
    assert kept["buffer/places"].tolist() == [65_530, 65_531, 65_532]
    cut(job, 2)
    world_pool.run(1, train, resumed(job))
    assert losses(job) == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.parametrize(
    "ranks, parallel",
    [
        *(pytest.param(ranks, {}, marks=pytest.mark.slow) for ranks in (1, 3)),
        (4, {"sharded_data_parallel_degree": 2}),
    ],
)
def test_another_layout_to_rounding(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    job = resumed(a_job(corpora, tmp_path / "run", dropout=0.1), resume="none", keep_last=3)
    world_pool.run(2, train, job)
    undisturbed, hashes = losses(job), data_hashes(job)
    cut(job, 2)
    other = resumed(a_job(corpora, tmp_path / "run", dropout=0.1, parallel=parallel))
    world_pool.run(ranks, train, other)
    assert losses(job) == pytest.approx(undisturbed, rel=1e-6)
    assert losses(job)[:2] == undisturbed[:2]
    assert data_hashes(job) == hashes  # the same tokens in the same order


def data_hashes(job: Job) -> list[str]:
    return [r["data_hash"] for r in read_metrics(Path(job.output) / "metrics.jsonl") if "data_hash" in r]


def test_the_token_stream_depends_on_the_seed_and_nothing_else(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    found = {}
    for name, ranks, training in (
        ("two", 2, {}),
        ("three, accumulation", 3, {"microbatch_size": 1}),
        ("seed", 2, {"seed": 1}),
    ):
        job = a_job(corpora, tmp_path / name, training={"steps": 2, **training})
        world_pool.run(ranks, train, job)
        found[name] = data_hashes(job)
    assert found["two"] == found["three, accumulation"] != found["seed"]
    assert len(set(found["two"])) == 2


@pytest.mark.slow
def test_more_steps_and_a_finished_run(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run", optimizer={"schedule": "constant"})
    first = world_pool.run(2, train, job)[0]
    same = world_pool.run(2, train, resumed(job))[0]
    assert (same.validation_loss, same.training_loss) == (first.validation_loss, None)
    longer = resumed(a_job(corpora, tmp_path / "run", optimizer={"schedule": "constant"}, training={"steps": 8}))
    assert world_pool.run(2, train, longer)[0].steps == 8
    whole = a_job(corpora, tmp_path / "whole", optimizer={"schedule": "constant"}, training={"steps": 8})
    world_pool.run(2, train, whole)
    assert losses(longer) == losses(whole)


def claimed(job: Job) -> None:
    claim_output(job).release()


def test_what_an_output_directory_with_checkpoints_takes(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run")
    claimed(job)
    world_pool.run(2, train, job)
    (tmp_path / "run" / "sample.txt").write_text("old")
    before = losses(job)
    with pytest.raises(OutputError, match=r"step-00000006.*--checkpoint.resume auto"):
        check_output(job)
    claimed(resumed(job))
    claimed(resumed(a_job(corpora, tmp_path / "run", parallel={"sharded_data_parallel_degree": 1})))  # another layout
    assert (tmp_path / "run" / "sample.txt").exists()  # until it is known what the run goes on from
    clear_output(tmp_path / "run", step=6)
    assert losses(job) == before  # records stay, results go
    assert not (tmp_path / "run" / "sample.txt").exists() and not (tmp_path / "run" / "model").exists()
    with pytest.raises(OutputError, match="another job"):
        check_output(resumed(a_job(corpora, tmp_path / "run", layers=2)))


def test_a_run_that_came_to_nothing_does_not_bind_its_directory(corpora: Path, tmp_path: Path) -> None:
    claimed(a_job(corpora, tmp_path / "run"))
    corrected = a_job(corpora, tmp_path / "run", layers=2)
    claimed(corrected)
    (tmp_path / "run/metrics.jsonl").touch()  # the first thing that a run writes
    claimed(corrected)
    with pytest.raises(OutputError, match="another job"):
        claim_output(a_job(corpora, tmp_path / "run"))


def test_a_checkpoint_to_resume_from_is_looked_for_before_workers_start(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = a_job(corpora, tmp_path / "run")
    world_pool.run(2, train, job)
    new = a_job(corpora, tmp_path / "new")
    named = {
        tmp_path / "nothing": "does not exist; give the path of a checkpoint, or auto",
        tmp_path / "run": "holds checkpoints and is none itself; use .*step-00000006, the newest complete one",
        tmp_path / "run/model": "checkpoint.resume=.*model. has no manifest.json, .*; use .*step-00000006, the newest",
    }
    for path, message in named.items():
        with pytest.raises(CheckpointError, match=message):
            entry.train(resumed(new, resume=str(path)))
    assert not (tmp_path / "new").exists()
    check_resume(resumed(new, resume=str(tmp_path / "run/checkpoints/step-00000006")))


def test_a_run_that_is_behind_its_checkpoint_is_refused(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    world_pool.run(2, train, a_job(corpora, tmp_path / "run"))
    fewer = a_job(corpora, tmp_path / "run", training={"steps": STEPS - 1})
    with pytest.raises(WorldError, match=rf"has {STEPS} steps behind it, and training.steps={STEPS - 1}; give more"):
        world_pool.run(2, train, resumed(fewer))


def test_a_stable_part_goes_on_with_its_warm_up(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """A run is made longer in its stable part: `warmup_steps: auto` would then be more, and the rate rise again."""
    stable = {"schedule": "warmup_stable_decay", "decay_steps": 1, "warmup_steps": "auto"}
    world_pool.run(2, train, a_job(corpora, tmp_path / "run", optimizer=stable))
    longer = {"training": {"steps": 60}, "optimizer": stable}
    with pytest.raises(WorldError, match=r"1 steps of warm-up, .* would be 10, .*set optimizer.warmup_steps=1"):
        world_pool.run(2, train, resumed(a_job(corpora, tmp_path / "run", **longer)))


def notes_of_a_resume(job: Job) -> list[str]:
    return RunCheckpoints(set_up(job, torch.device("cpu"))).restore()[1]


def test_what_becomes_of_tokens_is_a_note_where_it_changes(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = a_job(corpora, tmp_path / "run")
    world_pool.run(1, train, job)
    isolating = a_job(corpora, tmp_path / "run", data={"isolate_documents": True})
    ((*notes,),) = world_pool.run(1, notes_of_a_resume, resumed(isolating))
    assert "note: data.isolate_documents was False in the checkpoint, is True now" in notes


def resume_with_an_old_listing(job: Job) -> tuple[float, int]:
    """Go on while rank 1 sees the first checkpoint alone; a weight, and the step. Run on every rank."""
    run = set_up(job, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(LocalStore, "names", lambda store: ["step-00000002"])
        progress, _ = RunCheckpoints(run).restore()
    return float(next(iter(run.model.tensor_map)).whole().double().sum()), progress.step


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_sees(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = a_job(corpora, tmp_path / "run", parallel={"sharded_data_parallel_degree": 2})
    world_pool.run(2, train, job)
    stale = world_pool.run(2, resume_with_an_old_listing, resumed(job))
    assert stale[0] == stale[1] and stale[0][1] == STEPS


def test_two_runs_never_write_into_one_directory(corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run")
    first = claim_output(job)
    for second in (job, resumed(job)):
        with pytest.raises(OutputError, match="another run is writing there now"):
            claim_output(second)
    first.release()
    claim_output(job).release()


def test_a_run_that_cannot_start_says_so_before_it_works(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a corpus is prepared for a directory that is another run's, nor an engine compiled for a bad corpus."""
    monkeypatch.setattr(entry, "usable_backend", lambda *_: pytest.fail("the engine was compiled"))
    empty = tmp_path / "empty.txt"
    empty.touch()
    job = a_job(corpora, tmp_path / "run", data={"path": str(empty)})
    with pytest.raises(DataError, match="empty"):
        entry.train(job)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(entry, "prepare_data", lambda *_: pytest.fail("the corpus was prepared"))
    with claim_output(job), pytest.raises(OutputError, match="another run is writing there now"):
        entry.train(job)


def test_a_run_that_fails_says_what_it_can_go_on_from(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, said = a_job(corpora, tmp_path / "run"), list[str]()
    claimed(job)

    def killed(*_: Any, **__: Any) -> Any:
        world_pool.run(2, train, job)
        raise WorkerError("rank 1 of 2 was killed")

    monkeypatch.setattr(entry, "run_local", killed)
    with pytest.raises(WorkerError, match="was killed"):
        entry.train(job, say=said.append)
    assert said[-1] == "note: the newest complete checkpoint is step-00000006; --checkpoint.resume auto goes on from it"
    assert resume_hint(a_job(corpora, tmp_path / "never")) is None


def notes(job: Job) -> str:
    """What resuming says."""
    return "\n".join(RunCheckpoints(set_up(job, torch.device("cpu"))).restore()[1])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_replaced(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run")
    world_pool.run(2, train, job)
    undisturbed = losses(job)
    newest = tmp_path / "run/checkpoints/step-00000006"
    with_a_bit_flipped(newest)
    content = (newest / "rank-00001.safetensors").read_bytes()
    said = world_pool.run(2, notes, resumed(job))[0]
    assert "step-00000006 is passed over" in said
    assert "rank-00001.safetensors is damaged" in said
    world_pool.run(2, train, resumed(job))
    assert losses(job) == undisturbed
    assert (newest / "rank-00001.safetensors").read_bytes() != content
    assert stored(newest)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["owner", "step-00000004", "step-00000006"]


def with_a_bit_flipped(path: Path) -> None:
    content = bytearray((path / "rank-00001.safetensors").read_bytes())
    content[-9000] ^= 1
    (path / "rank-00001.safetensors").write_bytes(content)


def truncated(path: Path) -> None:
    truncate(path / "rank-00001.safetensors", 3000)


def train_or_say(job: Job) -> str:
    try:
        train(job)
    except DamagedError as error:
        return str(error)
    return ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", [truncated, with_a_bit_flipped])
def test_a_run_whose_only_checkpoint_is_damaged_ends_and_changes_nothing(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    job = a_job(corpora, tmp_path / "run", checkpoint={"every": STEPS})
    world_pool.run(2, train, job)
    damage(tmp_path / "run/checkpoints/step-00000006")
    before = {str(f): f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file() and f.name != "owner"}
    for said in world_pool.run(2, train_or_say, resumed(job)):
        assert "none that is whole:\n" in said and "start over with another --output" in said
        assert "step-00000006" in said and "rank-00001.safetensors" in said and "it holds" in said
    after = {str(f): f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file() and f.name != "owner"}
    assert after == before  # the exported model and the records among them
    if damage is truncated:  # which shows before any worker starts
        with pytest.raises(DamagedError, match=r"has 3000 of \d+ bytes"):
            check_output(resumed(job))


@pytest.mark.slow
def test_a_checkpoint_that_was_never_finished_is_no_reason_to_stop(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = a_job(corpora, tmp_path / "run", checkpoint={"every": STEPS})
    world_pool.run(2, train, job)
    undisturbed = losses(job)
    (tmp_path / "run/checkpoints/step-00000006/manifest.json").unlink()
    check_output(resumed(job))
    assert "step-00000006 is passed over" in world_pool.run(2, notes, resumed(job))[0]
    world_pool.run(2, train, resumed(job))
    assert losses(job) == undisturbed


@pytest.mark.slow
def test_a_decay_begins_at_a_named_checkpoint_of_another_run(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    """The losses are those of a run that was that long from the start."""

    def stable(name: str, steps: int, decay: int, resume: str = "none") -> Job:
        optimizer = {"schedule": "warmup_stable_decay", "warmup_steps": 1, "decay_steps": decay}
        training = {"steps": steps}
        return a_job(corpora, tmp_path / name, optimizer=optimizer, training=training, checkpoint={"resume": resume})

    world_pool.run(2, train, stable("run", 6, 1))
    start = str(tmp_path / "run" / "checkpoints" / "step-00000004")
    world_pool.run(2, train, stable("other", 8, 4, start))
    whole = stable("whole", 8, 4)
    world_pool.run(2, train, whole)
    records = read_metrics(tmp_path / "other" / "metrics.jsonl")
    assert [r["loss"] for r in records if "loss" in r] == losses(whole)[4:]


def generators(job: Job) -> list[float]:
    RunCheckpoints(set_up(job, torch.device("cpu"))).restore()
    return torch.rand(2).tolist()


@pytest.mark.slow
def test_random_state_returns_to_the_same_ranks(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """Fused attention dropout draws from it, so an exact resume needs it."""
    sections: dict[str, Any] = {"dropout": 0.1, "attention": "sdpa", "precision": {"compute": "fp32"}}
    job = a_job(corpora, tmp_path / "run", **sections)
    world_pool.run(2, train, job)
    first, second = world_pool.run(2, generators, resumed(job))
    fresh = world_pool.run(2, generators, a_job(corpora, tmp_path / "other", **sections))
    assert first != second
    assert [first, second] != fresh
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000006/manifest.json").read_text())
    assert {"random/cpu/0", "random/cpu/1"} <= manifest["tensors"].keys()
