"""Writing that fails or is slow: nothing is lost, nothing is overtaken, and every rank hears of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint import save as saving
from shardwise.checkpoint.catalog import Retention, checkpoint_name, checkpoints, read_manifest
from shardwise.checkpoint.manifest import FILE, OWNER, Manifest, Progress
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import LocalStore, open_store
from shardwise.errors import CheckpointError
from shardwise.job.schema import CheckpointSection, EvaluationSection, Job
from shardwise.testing.world import WorldPool
from shardwise.training.checkpoints import data_facts
from shardwise.training.session import Session
from shardwise.training.setup import set_up
from shardwise.training.trainer import train_rank
from tests.checkpoint.stored import stored
from tests.fork_server import run_python
from tests.parity.jobs import make_job, make_module_job

ROOT = Path(__file__).parents[2]
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")

# --- saves of two ranks ----------------------------------------------------------------------------------------------


class SlowStore(LocalStore):
    """Every file waits for the gate. Notes what is done."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.gate, self.log = threading.Event(), list[tuple[str, str]]()

    def begin(self, name: str) -> str:
        self.log.append(("begin", name))
        return super().begin(name)

    def create(self, name: str, file: str) -> Any:
        assert self.gate.wait(100)
        return super().create(name, file)

    def commit(self, name: str, manifest: bytes) -> None:
        super().commit(name, manifest)
        self.log.append(("commit", name))


def save_twice(job: Job, path: Path) -> list[tuple[str, str]]:
    """The second save comes while the first is held up; the weights change as soon as each save is settled."""
    run, store = set_up(job, torch.device("cpu")), SlowStore(str(path))
    checkpointer = Checkpointer(run.model, run.optimizer, store, data_facts(run))
    taken = saving.snapshot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "snapshot", lambda *a: (store.log.append(("snapshot", "")), taken(*a))[1])
        for step in (1, 2):
            checkpointer.settle()
            with torch.no_grad():
                for entry in run.model.tensor_map:
                    entry.local.fill_(step)
            if step == 2:
                assert checkpoints(store) == []
                threading.Timer(0.5, store.gate.set).start()
            checkpointer.save(Progress(step=step), run.scaler)
        run.optimizer.step()  # settles by itself; without gradients it changes nothing
        with torch.no_grad():
            for entry in run.model.tensor_map:
                entry.local.fill_(3.0)
        checkpointer.wait()
    return store.log


def test_a_save_waits_for_the_last_and_holds_what_was_there_when_it_began(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    coordinator, other = world_pool.run(2, save_twice, make_module_job(corpora), tmp_path)
    expected = [(what, checkpoint_name(step)) for step in (1, 2) for what in ("snapshot", "begin", "commit")]
    assert coordinator == [(what, "" if what == "snapshot" else name) for what, name in expected]
    assert other == [("snapshot", "")] * 2
    for step in (1, 2):
        weights = {n: t for n, t in stored(tmp_path / checkpoint_name(step)).items() if n.startswith("model/")}
        assert weights and all(bool((tensor == step).all()) for tensor in weights.values())


THEIRS = {"their file": len(b"theirs")}


def save_among_others(job: Job, root: str, midway: bool) -> tuple[str, list[str], dict[str, int]]:
    """Another run claims the directory between two saves and writes the second itself, or claims it midway in that."""
    run, store = set_up(job, torch.device("cpu")), open_store(root)
    checkpointer = Checkpointer(run.model, run.optimizer, store, data_facts(run))
    checkpointer.save(Progress(step=1), run.scaler, wait=True)
    dist.barrier()
    if dist.get_rank() == 0 and midway:
        create, store.create = store.create, lambda *place: (store.claim("others"), create(*place))[1]  # type: ignore[method-assign]
    elif dist.get_rank() == 0:
        store.claim("others")
        store.begin(checkpoint_name(2))
        with store.create(checkpoint_name(2), "their file") as handle:
            handle.write(b"theirs")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(Progress(step=2), run.scaler, wait=True)
    dist.barrier()
    complete = [name for name in checkpoints(store) if FILE in store.sizes(name)]
    dist.barrier()
    if dist.get_rank() == 0 and not midway:
        store.commit(checkpoint_name(2), b"{}")
    dist.barrier()
    return str(caught.value), complete, {} if midway else store.sizes(checkpoint_name(2))


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize(("scheme", "ranks"), [("", 2), ("memory://", 1)])
def test_a_run_that_finds_another_ones_owner_touches_nothing(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, scheme: str, ranks: int, midway: bool
) -> None:
    root = f"{scheme}{tmp_path}"
    for found in world_pool.run(ranks, save_among_others, make_module_job(corpora), root, midway):
        said, names, theirs = found
        assert f"another run writes into {root} now" in said
        assert names == [checkpoint_name(1)]
        assert theirs == ({} if midway else {**THEIRS, FILE: 2})


def claim_apart(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        saving.claim(LocalStore(str(path / str(dist.get_rank()))))
    return str(caught.value)


def test_directories_that_are_not_shared_are_refused_before_training(world_pool: WorldPool, tmp_path: Path) -> None:
    for rank, said in enumerate(world_pool.run(3, claim_apart, tmp_path)):
        assert f"{tmp_path}/{rank}' is not shared: 2 ranks do not see" in said


# --- a run whose second checkpoint fails -----------------------------------------------------------------------------


def a_job(corpora: Path, output: Path, resume: str = "none", **checkpoint: Any) -> Job:
    """Saves after steps 2, 4 and 6."""
    training = {"steps": 6, "sequences_per_step": 4, "evaluate_batches": 1}
    settings = {"every": 2, "resume": resume, **checkpoint}
    job = make_job(corpora, layers=1, checkpoint=settings, training=training, observe={"tensorboard": False})
    return job.model_copy(update={"output": str(output)})


def train_with_a_fault(job: Job, rank: int, point: str) -> str:
    """Trains; `point` of the store fails on `rank` as the checkpoint of step 4 is written. The error, or ""."""
    original, step = getattr(LocalStore, point), Session.step

    def failing(self: LocalStore, name: str, *arguments: Any) -> Any:
        if name == checkpoint_name(4):
            place = self._partial(name) if point == "begin" else None  # as mkdir says it, and as write does not
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        return original(self, name, *arguments)

    def after_the_writing(self: Session, batches: Any) -> Any:
        """Steps long enough that a save has ended, well or not, when the next begins."""
        for thread in threading.enumerate():
            if thread.name.startswith("shardwise-step"):
                thread.join()
        return step(self, batches)

    Path(job.output).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "step", after_the_writing)
        if dist.get_rank() == rank:
            patch.setattr(LocalStore, point, failing)
        try:
            train_rank(job, torch.device("cpu"))
        except CheckpointError as error:
            return str(error)
    return ""


def losses(output: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


@pytest.fixture(scope="module")
def undisturbed(world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert world_pool.run(2, train_with_a_fault, a_job(corpora, output), -1, "create") == ["", ""]
    return output


NAMED = {"create": "{0}/{1}, which was to hold ", "begin": ".{0}.partial: ", "commit": f"{{0}}/{FILE}: "}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rank", "point"), [(1, "create"), (0, "create"), (0, "begin"), (0, "commit")])
def test_a_failed_save_is_everyones_at_the_next_step_and_the_last_one_stays(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, undisturbed: Path, rank: int, point: str
) -> None:
    output = tmp_path / "run"
    for said in world_pool.run(2, train_with_a_fault, a_job(corpora, output), rank, point):
        assert said.startswith(f"rank {rank}: ") and "No space left on device; earlier ones are intact" in said
        assert NAMED[point].format(checkpoint_name(4), FILES[rank]) in said
    expected = losses(undisturbed)
    assert losses(output) == expected[:5]  # the step after the save, and no further
    assert sorted(entry.name for entry in (output / "checkpoints").iterdir()) == [OWNER, checkpoint_name(2)]
    assert world_pool.run(2, train_with_a_fault, a_job(corpora, output, "auto"), -1, point) == ["", ""]
    assert losses(output) == expected
    assert checkpoints(LocalStore(str(output / "checkpoints"))) == [checkpoint_name(6), checkpoint_name(4)]


# --- a disk that is full ---------------------------------------------------------------------------------------------

# In a mount namespace of its own: two runs of the command line on a small tmpfs, which is larger for the second.
FULL = """
import ctypes, json, os, sys
from pathlib import Path
from shardwise.commands.cli import main
disk, job = sys.argv[1:]

libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def unshare():  # as `unshare --map-root-user --mount` does it
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(0x10000000 | 0x00020000))  # CLONE_NEWUSER | CLONE_NEWNS
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    checked(libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None))  # MS_REC | MS_PRIVATE

def mount(flags, size):
    checked(libc.mount(b"tmpfs", disk.encode(), b"tmpfs", flags, f"size={size}".encode()))

def train(*options):
    code = main(["train", job, *options])
    print(json.dumps({"code": code, "left": sorted(os.listdir(disk))}), flush=True)

if __name__ == "__main__":
    unshare()
    mount(0, 5 << 19)
    train()
    mount(32, 1 << 26)  # MS_REMOUNT
    train("--checkpoint.resume", "auto")
"""


def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="mount namespaces are not permitted here")
def test_a_full_disk(corpora: Path, tmp_path: Path) -> None:
    disk, file = tmp_path / "disk", tmp_path / "job.yaml"
    disk.mkdir()
    job = a_job(corpora, tmp_path / "run", directory=str(disk))
    config = (job.model.config or {}) | {
        "vocab_size": 2_500
    }  # 1.6 MB of state in fp64: one checkpoint fits, two do not
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
    file.write_text(job.model_dump_json(exclude_unset=True))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    (tmp_path / "full.py").write_text(FULL)
    done = run_python(tmp_path / "full.py", disk, file, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]
    assert first == {"code": 2, "left": [OWNER, checkpoint_name(2)]}, done.stderr
    assert "No space left on device; earlier ones are intact" in done.stderr and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert any(f"{checkpoint_name(4)}/{file}, which was to hold " in said for file in FILES), done.stderr
    assert second["code"] == 0, done.stderr
    assert f"resumed from {disk}/{checkpoint_name(2)}" in done.stdout.replace("\n", "")
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


# --- which checkpoints stay ------------------------------------------------------------------------------------------

LOSSES: dict[int, float | None] = {1: 5.0, 2: None, 3: 3.0, 4: None, 5: 4.0, 6: None, 7: 4.5}
SCORES = {1: 0.25, 3: 0.5, 5: 0.75, 7: 0.5}
BEST, SCORED = CheckpointSection(keep_last=1, keep_best=True), EvaluationSection(metric="score")
KEPT: list[tuple[dict[str, Any], str, list[int]]] = [
    ({}, "validation_loss", [6, 7]),
    ({"keep_last": 1}, "validation_loss", [7]),
    ({"keep_last": 9}, "validation_loss", [1, 2, 3, 4, 5, 6, 7]),
    ({"keep_last": 1, "keep_every": 3}, "validation_loss", [3, 6, 7]),
    ({"keep_last": 1, "keep_best": True}, "validation_loss", [3, 7]),
    ({"keep_last": 2, "keep_best": True, "keep_every": 5}, "validation_loss", [3, 5, 6, 7]),
    ({"keep_last": 1, "keep_best": True}, "score", [5, 7]),
    ({"keep_last": 1, "keep_best": True}, "loss_of_another_kind", [1, 7]),
]


def empty_manifest(step: int, metric: str = "score") -> bytes:
    return Manifest(
        progress=Progress(step=step, validation_loss=LOSSES[step], judged_by=metric, metric=SCORES.get(step)),
        optimizer="AdamW", tensors={}, files={}, job={}, plan={}, data={}, versions={}, written="", version=3,
    ).to_json()  # fmt: skip


@pytest.mark.parametrize(("settings", "metric", "kept"), KEPT)
def test_retention(tmp_path: Path, settings: dict[str, Any], metric: str, kept: list[int]) -> None:
    store = LocalStore(str(tmp_path))
    for step in LOSSES:
        store.begin(checkpoint_name(step))
        store.commit(checkpoint_name(step), empty_manifest(step, metric))
    for other in (
        tmp_path / checkpoint_name(0),
        tmp_path / "step-mine",
        tmp_path / "my notes",
    ):  # no manifest, no checkpoint
        other.mkdir()
    retention = Retention(CheckpointSection(**settings), EvaluationSection(metric=metric))
    for name in retention.surplus(store, checkpoint_name(max(LOSSES))):
        store.remove(name)
    left = [int(path.name[5:]) for path in sorted(tmp_path.glob("step-*")) if (path / FILE).exists()]
    assert left == kept
    assert {"step-mine", "my notes", checkpoint_name(0)} <= {entry.name for entry in tmp_path.iterdir()}


def test_a_step_that_is_saved_again_is_judged_anew(tmp_path: Path) -> None:
    store, retention = LocalStore(str(tmp_path)), Retention(BEST, SCORED)

    def save(step: int, manifest: bytes) -> list[str]:
        store.begin(checkpoint_name(step))
        store.commit(checkpoint_name(step), manifest)
        return retention.surplus(store, checkpoint_name(step))

    best = max(SCORES, key=lambda step: SCORES[step])
    save(best, empty_manifest(best, "another"))
    save(best, empty_manifest(best))
    assert save(best + 1, empty_manifest(best + 1)) == []


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [5, 6, 7]), (2, [4, 5, 6, 7])])
def test_what_was_passed_over_takes_no_place(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    """Step 5 was saved by a run that went on from step 4, as later ones are damaged in a way that sizes do not show."""
    store = LocalStore(str(tmp_path))
    for step in LOSSES:
        store.begin(checkpoint_name(step))
        store.commit(checkpoint_name(step), empty_manifest(step))
    surplus = Retention(CheckpointSection(keep_last=keep_last), EvaluationSection()).surplus(store, checkpoint_name(5))
    assert sorted(surplus) == [checkpoint_name(step) for step in LOSSES if step not in kept]


def test_what_lies_elsewhere_stays_there(tmp_path: Path) -> None:
    """A checkpoint that was moved to a larger disk, with a link in its place."""
    store, elsewhere = LocalStore(str(tmp_path / "here")), LocalStore(str(tmp_path / "there"))
    for name in (checkpoint_name(1), checkpoint_name(2)):
        elsewhere.begin(name)
        elsewhere.commit(name, empty_manifest(1))
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / name).symlink_to(tmp_path / "there" / name)
    store.remove(checkpoint_name(1))
    store.begin(checkpoint_name(2))
    store.commit(checkpoint_name(2), empty_manifest(2))
    assert [entry.name for entry in (tmp_path / "here").iterdir()] == [checkpoint_name(2)]
    assert [read_manifest(elsewhere, name).progress.step for name in checkpoints(elsewhere)] == [1, 1]
    assert read_manifest(store, checkpoint_name(2)).progress.step == 2


def test_a_run_that_was_killed_as_it_replaced_a_checkpoint(tmp_path: Path) -> None:
    """The damaged one has its other name still; that is no reason for the next to fail."""
    store = LocalStore(str(tmp_path))
    for name in (f".{checkpoint_name(1)}.old", checkpoint_name(1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"damaged")
    store.begin(checkpoint_name(1))
    store.commit(checkpoint_name(1), empty_manifest(1))
    assert [entry.name for entry in tmp_path.iterdir()] == [checkpoint_name(1)] and list(
        store.sizes(checkpoint_name(1))
    ) == [FILE]


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is killed between the two renames; whoever comes next finds the first save, and may replace it."""
    store, name = LocalStore(str(tmp_path)), checkpoint_name(1)
    store.begin(name)
    store.commit(name, empty_manifest(1))
    renames: list[Path] = []

    def rename(path: Path, target: Path) -> None:
        if renames:
            raise KeyboardInterrupt
        renames.append(path)
        os.rename(path, target)

    store.begin(name)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        store.commit(name, empty_manifest(2))
    assert not (tmp_path / name).exists() and checkpoints(store) == [name]
    assert read_manifest(store, name).progress.step == 1 and list(store.sizes(name)) == [FILE]
    store.begin(name)
    store.commit(name, empty_manifest(3))
    assert [entry.name for entry in tmp_path.iterdir()] == [name] and read_manifest(store, name).progress.step == 3


def test_retention_removes_as_the_run_goes(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = a_job(corpora, tmp_path / "run", keep_last=1, keep_every=4)
    assert world_pool.run(2, train_with_a_fault, job, -1, "create") == ["", ""]
    store = LocalStore(str(tmp_path / "run" / "checkpoints"))
    assert checkpoints(store) == [checkpoint_name(6), checkpoint_name(4)]
    assert read_manifest(store, checkpoint_name(6)).progress.validation_loss is not None
