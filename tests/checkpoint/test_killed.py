"""Runs that are killed with SIGKILL at a chosen point go on as if nothing had happened.

The killed runs are started by the real launcher; where it is itself the victim, its workers must follow it. Each is
then resumed from its newest complete checkpoint, and its losses, weights and optimizer state must be those of a run
that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from shardwise.checkpoint import storage_write, stores
from shardwise.checkpoint.catalog import checkpoint_name, checkpoints
from shardwise.checkpoint.manifest import FILE
from shardwise.checkpoint.staging import Staging
from shardwise.checkpoint.stores import LocalStore
from shardwise.collectives import fsdp
from shardwise.errors import WorkerError
from shardwise.job.schema import Job
from shardwise.launch.local import run_local
from shardwise.launch.process_group import process_group
from shardwise.testing.world import WorldPool
from shardwise.training.output import claim_output
from shardwise.training.trainer import train_rank
from tests.checkpoint.stored import scalars, stored
from tests.fork_server import run_python
from tests.parity.jobs import make_job

ROOT = Path(__file__).parents[2]
STEPS, EVERY, LAYERS, SEED = 6, 2, 2, 20_261_121
SAVES = STEPS // EVERY


@dataclass(frozen=True)
class Fault:
    """SIGKILL at the `call`-th time (from 1) that `rank` comes to `point`, for itself or for the launcher."""

    point: str
    call: int
    rank: int
    launcher: bool = False

    def __str__(self) -> str:
        return f"{self.point}-{self.call}-{'launcher' if self.launcher else f'rank{self.rank}'}"


# How often a rank comes to each point in a run. Forward: each block. Backward: each block, and the rest. Optimizer:
# before and after its update. Staging: as a block is taken and as it is handed over. Commit: the manifest is written,
# the directory not yet renamed; only rank 0 is there.
POINTS = {"forward": LAYERS * STEPS, "backward": (LAYERS + 1) * STEPS, "optimizer": 2 * STEPS, "staging": 2 * SAVES,
          "write": SAVES, "commit": SAVES}  # fmt: skip


def draw_faults(seed: int) -> list[Fault]:
    """Thirty: at each point four times one rank, and once the launcher."""
    draw, found = random.Random(seed), list[Fault]()
    for point, calls in POINTS.items():
        ranks = [0] if point == "commit" else [0, 1]
        places = [(call, rank) for call in range(1, calls + 1) for rank in ranks]
        drawn = draw.sample(places, min(4, len(places)))
        drawn += [draw.choice(places) for _ in range(4 - len(drawn))]  # the commit has three places
        found += [Fault(point, *place) for place in drawn]
        found.append(Fault(point, *draw.choice(places), launcher=True))
    return found


FAULTS = draw_faults(SEED)
FEW = [Fault("commit", 2, 0), Fault("write", 3, 1, launcher=True)]


# --- in the worker ---------------------------------------------------------------------------------------------------


def work(job: Job, fault: Fault) -> None:
    """A rank of a run that `fault` ends."""
    with process_group("cpu", "gloo", timeout_seconds=100) as device:
        rank = dist.get_rank()
        (Path(job.output) / f"{rank}.pid").write_text(str(os.getpid()))
        if rank == fault.rank:
            arm(fault)
        train_rank(job, device)


def arm(fault: Fault) -> None:
    """Patch the point of `fault` in this process."""
    calls = 0

    def hit(last_words: Callable[[], Any] = lambda: None) -> None:
        nonlocal calls
        calls += 1
        if calls == fault.call:
            last_words()
            os.kill(os.getppid() if fault.launcher else os.getpid(), signal.SIGKILL)
            time.sleep(100)  # until the launcher's death has come to us

    {"forward": arm_forward, "backward": arm_backward, "optimizer": arm_optimizer, "staging": arm_staging,
     "write": arm_write, "commit": arm_commit}[fault.point](hit)  # fmt: skip


Hit = Callable[..., None]


def arm_forward(hit: Hit) -> None:
    """As a block runs. Plain wrappers: a module hook would send autograd another way, which rounds otherwise."""
    original = GPT2Block.forward

    def forward(self: GPT2Block, *arguments: Any, **settings: Any) -> Any:
        if self.training:
            hit()
        return original(self, *arguments, **settings)

    GPT2Block.forward = forward


def arm_backward(hit: Hit) -> None:
    """As the gradients of a block, or of what is in none, are reduced in the midst of backward."""
    wrap(fsdp, "reduce_scatter_single", hit)


def arm_optimizer(hit: Hit) -> None:
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        register(lambda *_: hit())


def arm_staging(hit: Hit) -> None:
    for name in ("_take", "_hand_over"):
        wrap(Staging, name, hit)


def arm_write(hit: Hit) -> None:
    """With half of a block written."""
    original = storage_write.write_all

    def half(handle: Any, block: memoryview) -> None:
        hit(lambda: original(handle, block[: len(block) // 2]))
        original(handle, block)

    storage_write.write_all = half


def arm_commit(hit: Hit) -> None:
    """Everything is written and synced, the manifest too; the directory does not have its name yet."""
    original = stores._sync_directory

    def before_rename(path: Path) -> None:
        original(path)
        if path.name.endswith(".partial"):
            assert (path / FILE).exists()
            hit()

    stores._sync_directory = before_rename


def wrap(owner: Any, name: str, hit: Hit) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        hit()
        return original(*arguments, **settings)

    setattr(owner, name, wrapped)


# --- in the launcher -------------------------------------------------------------------------------------------------

LAUNCHER = """
import sys
from tests.checkpoint.test_killed import launch
if __name__ == "__main__":
    launch(sys.argv[1])
"""


def launch(runs: str) -> None:
    """One run after the other; a line with what became of each."""
    for settings, fault in json.loads(Path(runs).read_text()):
        job = Job.model_validate(settings)
        with claim_output(job):
            try:
                run_local(work, (job, Fault(**fault)), 2)
                print("ended", flush=True)
            except WorkerError as error:
                print("killed" if "SIGKILL" in str(error) else error, flush=True)


def kill_all(runs: Sequence[tuple[Job, Fault]], directory: Path) -> None:
    """Every run to its death. Those whose launcher lives share one."""
    shared = [run for run in runs if not run[1].launcher]
    groups = [shared] if shared else []
    for number, group in enumerate([*groups, *([run] for run in runs if run[1].launcher)]):
        file, script = directory / f"{number}.json", directory / "launcher.py"
        file.write_text(json.dumps([(job.model_dump(mode="json"), asdict(fault)) for job, fault in group]))
        script.write_text(LAUNCHER)
        environment = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(directory)}
        done = run_python(script, file, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}, timeout=3600)
        if group[0][1].launcher:
            assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        else:
            outcomes = [line for line in done.stdout.splitlines() if line in ("killed", "ended")]
            assert outcomes == ["killed"] * len(group), done.stdout + done.stderr


# --- in the test -----------------------------------------------------------------------------------------------------


def a_job(corpora: Path, output: Path, resume: str) -> Job:
    job = make_job(
        corpora,
        layers=LAYERS,
        precision={"compute": "fp32"},
        training={"steps": STEPS, "sequences_per_step": 4, "evaluate_batches": 1},
        checkpoint={"every": EVERY, "resume": resume, "keep_last": SAVES},
        observe={"tensorboard": False},
        parallel={"device": "cpu", "workers": 2},
    )
    config = (job.model.config or {}) | {"n_embd": 16, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    return job.model_copy(update={"output": str(output), "model": job.model.model_copy(update={"config": config})})


def train_here(job: Job) -> None:
    train_rank(job, torch.device("cpu"))


def train(pool: WorldPool, job: Job) -> None:
    with claim_output(job):  # a dead run does not hold it any more
        pool.run(2, train_here, job)


def records(output: Path) -> list[dict[str, Any]]:
    """What a step computed; not how long it took."""
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss", "data_hash")
    return [{key: record[key] for key in keys if key in record} for record in found]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    first, second = stored(one), stored(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), f"{one}: {name}"
    assert scalars(one) == scalars(other)


def ended(file: Path) -> bool:
    try:
        return psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_no_process_is_left(output: Path) -> None:
    files = [output / f"{rank}.pid" for rank in range(2)]
    end = time.monotonic() + 60
    while not all(map(ended, files)):  # the kernel tells the workers of a launcher that was killed
        assert time.monotonic() < end, f"workers of {output} live on"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    train(world_pool, a_job(corpora, output, "none"))
    return output


def kill_and_resume(pool: WorldPool, corpora: Path, directory: Path, undisturbed: Path, faults: list[Fault]) -> None:
    outputs = [directory / f"{number}-{fault}" for number, fault in enumerate(faults)]  # a fault may be drawn twice
    runs = [(a_job(corpora, output, "none"), fault) for output, fault in zip(outputs, faults, strict=True)]
    kill_all(runs, directory)
    for output, fault in zip(outputs, faults, strict=True):
        assert_no_process_is_left(output)
        left = checkpoints(LocalStore(str(output / "checkpoints")))
        for name in left:
            assert_same_checkpoint(output / "checkpoints" / name, undisturbed / "checkpoints" / name)
        before = len(records(output)) if (output / "metrics.jsonl").exists() else 0
        assert before < len(records(undisturbed)) or checkpoint_name(STEPS) not in left  # it did not come to its end
        train(pool, a_job(corpora, output, "auto"))
        assert records(output) == records(undisturbed), str(fault)
        names = sorted(entry.name for entry in (output / "checkpoints").iterdir() if entry.name.startswith("step"))
        assert names == [checkpoint_name(step) for step in range(EVERY, STEPS + 1, EVERY)]
        assert_same_checkpoint(output / "checkpoints" / names[-1], undisturbed / "checkpoints" / names[-1])


def test_two_killed_runs_go_on_bit_for_bit(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, undisturbed: Path
) -> None:
    kill_and_resume(world_pool, corpora, tmp_path, undisturbed, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_killed_runs_go_on_bit_for_bit(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, undisturbed: Path
) -> None:
    kill_and_resume(world_pool, corpora, tmp_path, undisturbed, FAULTS)


def test_the_thirty_are_what_they_are_said_to_be() -> None:
    assert draw_faults(SEED) == FAULTS and len(FAULTS) == 30
    for point, calls in POINTS.items():
        here = [fault for fault in FAULTS if fault.point == point]
        assert len([fault for fault in here if not fault.launcher]) >= 4
        assert all(1 <= fault.call <= calls for fault in here)
    assert {fault.rank for fault in FAULTS} == {0, 1}
