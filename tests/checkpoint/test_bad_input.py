"""Damaged, foreign and hostile checkpoints: an error that names file and tensors on every rank, and no code is run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.catalog import checkpoints, read_manifest
from shardwise.checkpoint.manifest import FILE, seal
from shardwise.checkpoint.save import claim
from shardwise.checkpoint.stores import LocalStore
from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.launch.process_group import process_group
from shardwise.testing.world import WorldPool
from shardwise.training.checkpoints import RunCheckpoints
from shardwise.training.output import check_output
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.trainer import train_rank
from tests.fork_server import run_python
from tests.parity.jobs import make_job, write_tokens

ROOT = Path(__file__).parents[2]
OLDER, NEWER = "step-00000002", "step-00000004"
SHARD = "rank-00001.safetensors"
WIDE = {"vocab_size": 30_002}  # so that a file has several blocks

Manifest = dict[str, Any]


def a_job(corpora: Path, output: Path, resume: str = "none", **sections: Any) -> Job:
    """Saves after steps 2 and 4."""
    sections = {"checkpoint": {"every": 2, "resume": resume}, "precision": {"compute": "fp32"}, **sections}
    sections |= {"training": {"steps": 4, "sequences_per_step": 4, "evaluate_batches": 1}}
    changed = WIDE | sections.pop("config", {})
    job = make_job(corpora, "gpt2", layers=1, **sections)
    model = job.model.model_copy(update={"config": (job.model.config or {}) | changed})
    observe = job.observe.model_copy(update={"tensorboard": False})
    return job.model_copy(update={"model": model, "output": str(output), "observe": observe})


def train_here(job: Job) -> None:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    train_rank(job, torch.device("cpu"))


@pytest.fixture(scope="module")
def written(world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two ranks with two checkpoints."""
    output = tmp_path_factory.mktemp("written") / "run"
    world_pool.run(2, train_here, a_job(corpora, output))
    shutil.rmtree(output / "model")
    assert sorted(entry.name for entry in (output / "checkpoints").iterdir()) == ["owner", OLDER, NEWER]
    return output


@pytest.fixture
def newest(written: Path, tmp_path: Path) -> Path:
    """The newer checkpoint of a copy."""
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / NEWER


def restore_here(jobs: list[Job]) -> list[tuple[str, list[str]]]:
    """For each job the error of going on from what it says, or "", and the notes. The jobs differ in that alone."""
    return restore_all(set_up(jobs[0], torch.device("cpu")), jobs)


def restore_all(run: AssembledJob, jobs: list[Job]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for job in jobs:
        checkpoint = job.checkpoint.model_copy(update={"every": 0})  # reads only
        run.plan = run.model.plan = replace(run.plan, job=job.model_copy(update={"checkpoint": checkpoint}))
        try:
            found.append(("", RunCheckpoints(run).restore()[1]))
        except CheckpointError as error:
            found.append((str(error), []))
    return found


# --- what can be wrong: a function of the checkpoint's directory each ------------------------------------------------

Damage = Callable[[Path], Any]


def truncated(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 1)


def missing(path: Path) -> None:
    (path / SHARD).unlink()


def unreadable(path: Path) -> None:
    """A directory in the place of a file."""
    missing(path)
    (path / SHARD).mkdir()


def flipped(file: str, where: Callable[[Manifest, int], int], bit: int = 3) -> Damage:
    """One bit of the byte that `where` finds by manifest and size."""

    def damage(path: Path) -> None:
        content = bytearray((path / file).read_bytes())
        content[where(manifest_of(path), len(content))] ^= 1 << bit
        (path / file).write_bytes(content)

    return damage


def in_tensor(name: str) -> Callable[[Manifest, int], int]:
    def where(manifest: Manifest, size: int) -> int:
        return next(int(part["start"]) for part in manifest["tensors"][name]["slices"] if part["file"] == SHARD) + 5

    return where


def manifest_of(path: Path) -> Manifest:
    content: Manifest = json.loads((path / FILE).read_text())
    return content


def edited(change: Callable[[Manifest], Any]) -> Damage:
    """A manifest of somebody who knows how to make its hash."""

    def damage(path: Path) -> None:
        manifest = manifest_of(path)
        del manifest["hash"]
        change(manifest)
        (path / FILE).write_bytes(seal(json.dumps(manifest).encode()))

    return damage


def replaced(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        (path / FILE).write_bytes(content)

    return damage


def cut(path: Path) -> None:
    os.truncate(path / FILE, (path / FILE).stat().st_size // 2)


def renamed(name: str) -> Damage:
    """A hostile name, in slices and list of files alike."""

    def change(manifest: Manifest) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)
        for tensor in manifest["tensors"].values():
            for part in tensor["slices"]:
                if part["file"] == SHARD:
                    part["file"] = name

    return edited(change)


def slices(manifest: Manifest, name: str = "model/transformer.wte.weight") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest["tensors"][name]["slices"]
    return found


def scalars(manifest: Manifest) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = manifest["optimizer_scalars"]
    return found


WTE = "model/transformer.wte.weight"
BIAS = "model/transformer.h.0.ln_1.bias"
LN_MOMENT = "optimizer/exp_avg/transformer.h.0.ln_1.bias"
MOMENT = "optimizer/exp_avg_sq/transformer.wte.weight"
DAMAGES: list[tuple[str, Damage, list[str]]] = [
    ("truncated file", truncated, [NEWER, SHARD, "bytes; it holds", "model/", " and ", "older checkpoint"]),
    ("missing shard", missing, [NEWER, SHARD, "is missing; it holds", "model/"]),
    ("directory for a shard", unreadable, [NEWER, SHARD, "is missing"]),
    ("bit in a weight", flipped(SHARD, in_tensor(WTE)), [f"{NEWER}/{SHARD}", "not those that were written", WTE]),
    ("bit in a bias", flipped(SHARD, in_tensor(BIAS), 7), [f"{NEWER}/{SHARD}", "not those", "it holds model/"]),
    ("bit in a moment", flipped(SHARD, in_tensor(MOMENT), 0), [f"{NEWER}/{SHARD}", "not those", MOMENT]),
    ("bit in the header", flipped(SHARD, lambda _, size: 20), [f"{NEWER}/{SHARD}", "at bytes 0 to", "not those"]),
    ("last bit", flipped(SHARD, lambda _, size: size - 1, 7), [f"{NEWER}/{SHARD}", "not those", "it holds"]),
    ("bit in the manifest", flipped(FILE, lambda _, size: size // 2, 0), [f"{NEWER}/{FILE}", "damaged"]),
    ("manifest cut in half", cut, [f"{NEWER}/{FILE}", "is damaged"]),
    ("manifest empty", replaced(b""), [f"{NEWER}/{FILE}", "is damaged"]),
    ("manifest not JSON", replaced(b"\x80\x04\x95\xff"), [f"{NEWER}/{FILE}", "is damaged"]),
    ("manifest too deep", replaced(b"[" * 100_000), [f"{NEWER}/{FILE}", "is damaged"]),
    ("another format", replaced(b'{"format": "other"}'), [f"{NEWER}/{FILE}", "is not the manifest"]),
    ("a list", replaced(b"[1, 2]"), [f"{NEWER}/{FILE}", "is not the manifest"]),
    ("no manifest", lambda path: (path / FILE).unlink(), [NEWER, "not a complete checkpoint", FILE]),
    ("no version", edited(lambda m: m.pop("version")), [f"{NEWER}/{FILE}", "version None"]),
    ("unknown key", edited(lambda m: m.update(surprise=1)), [f"{NEWER}/{FILE}", "surprise"]),
    ("negative step", edited(lambda m: m["progress"].update(step=-1)), [f"{NEWER}/{FILE}", "progress.step"]),
    ("name leads up", renamed("../x"), [f"{NEWER}/{FILE}", "'../x' leads out"]),
    ("absolute name", renamed("/etc/passwd"), [f"{NEWER}/{FILE}", "'/etc/passwd' leads out"]),
    ("hidden name", renamed(".hidden"), [f"{NEWER}/{FILE}", "'.hidden' leads out"]),
    ("backslash", renamed("..\\x"), [f"{NEWER}/{FILE}", "leads out"]),
    ("unlisted file", edited(lambda m: slices(m)[0].update(file="x")), [f"{NEWER}/{FILE}", WTE, "in x, which"]),
    ("outside of tensor", edited(lambda m: slices(m)[0].update(offset=[30_000, 0])), [FILE, WTE, "lies outside"]),
    ("wrong dims", edited(lambda m: slices(m)[0].update(offset=[0])), [FILE, WTE, "a slice of shape"]),
    ("negative offset", edited(lambda m: slices(m)[0].update(offset=[-1, 0])), [FILE, WTE, "offset"]),
    ("outside of file", edited(lambda m: slices(m)[0].update(start=1 << 40)), [FILE, "behind the end of rank-0000"]),
    ("a slice too few", edited(lambda m: slices(m).pop()), [FILE, WTE, "do not make up the shape"]),
    ("a slice twice", edited(lambda m: slices(m)[0].update(offset=slices(m)[1]["offset"])), [FILE, WTE, "make up"]),
    ("shared bytes", edited(lambda m: slices(m)[0].update(start=slices(m, MOMENT)[0]["start"])), [FILE, "overlap"]),
    ("unknown dtype", edited(lambda m: m["tensors"][WTE].update(dtype="F7")), [FILE, WTE, "unknown dtype 'F7'"]),
    ("unknown dtype of a number", edited(lambda m: next(iter(scalars(m).values())).update(step=[1, "F7"])),
     [f"{NEWER}/{FILE}", "optimizer_scalars", "unknown dtype 'F7'"]),
    ("a size beyond torch's", edited(lambda m: m["tensors"].update(huge={"dtype": "F32", "shape": [0, 1 << 70],
     "slices": []})), [f"{NEWER}/{FILE}", "tensors.huge.shape"]),
    ("no sections", edited(lambda m: m["plan"].update(world=2)), [f"{NEWER}/{FILE}", "plan: world is no object"]),
    ("too few hashes", edited(lambda m: m["files"][SHARD]["hashes"].pop()), [FILE, SHARD, "hashes for"]),
    ("a size that is a lie", edited(lambda m: m["files"][SHARD].update(bytes=m["files"][SHARD]["bytes"] + 1)),
     [NEWER, SHARD, "bytes; it holds"]),
    ("a moment's shape", edited(lambda m: m["tensors"].update({LN_MOMENT: m["tensors"].pop(MOMENT)})),
     [LN_MOMENT, "has shape [30002, 26] in the checkpoint, not [26]"]),
]  # fmt: skip


def content_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


Answers = list[tuple[str, list[str]]]


def restore_damaged(jobs: list[Job], checkpoint: Path, spare: Path) -> dict[str, tuple[Answers, bool]]:
    """For each damage what `restore_all` gives of it, and whether that has left the files as they were."""
    run = set_up(jobs[0], torch.device("cpu"))
    writes = dist.get_rank() == 0
    results = {}
    for name, damage, _ in DAMAGES:
        if writes:
            damage(checkpoint)
        dist.barrier()
        before = content_of(checkpoint.parent)
        answers = restore_all(run, jobs)
        results[name] = answers, content_of(checkpoint.parent) == before
        dist.barrier()
        if writes:
            shutil.rmtree(checkpoint)
            shutil.copytree(spare, checkpoint)
    return results


@pytest.fixture(scope="module")
def damaged(
    world_pool: WorldPool, corpora: Path, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[Answers, bool]]]:
    """The answers of each rank to one checkpoint, damaged in every way in turn."""
    output = shutil.copytree(written, tmp_path_factory.mktemp("damaged") / "run")
    newest = output / "checkpoints" / NEWER
    jobs = [a_job(corpora, output, resume) for resume in (str(newest), "auto")]
    return world_pool.run(2, restore_damaged, jobs, newest, written / "checkpoints" / NEWER)


@pytest.mark.parametrize(("name", "said"), [pytest.param(name, said, id=name) for name, _, said in DAMAGES])
def test_damage_is_named_on_every_rank_and_auto_takes_the_older_one(
    damaged: list[dict[str, tuple[Answers, bool]]], name: str, said: list[str]
) -> None:
    for ((error, _), (problem, notes)), is_unchanged in (answers[name] for answers in damaged):
        assert is_unchanged
        assert [part for part in said if part not in error] == [], error
        assert problem == ""
        (passed,) = [note for note in notes if "passed over" in note]
        assert NEWER in passed and [part for part in said if part not in passed] == [], passed
        assert any(f"{OLDER}: step 2" in note for note in notes)


def test_a_newer_version_is_not_passed_over(world_pool: WorldPool, corpora: Path, newest: Path) -> None:
    """It is whole: to go on from an older one would lose its steps, and then replace it."""
    edited(lambda manifest: manifest.update(version=99))(newest)
    before = content_of(newest.parent)
    jobs = [a_job(corpora, newest.parents[1], resume) for resume in ("auto", str(newest))]
    for answers in world_pool.run(2, restore_here, jobs):
        for error, _ in answers:
            assert f"{NEWER}/{FILE} has version 99" in error and "upgrade shardwise" in error
    with pytest.raises(CheckpointError, match="has version 99"):  # before workers start
        check_output(jobs[0])
    assert content_of(newest.parent) == before


def test_the_untouched_one_is_read(world_pool: WorldPool, corpora: Path, newest: Path) -> None:
    for (error, notes), (problem, _) in world_pool.run(
        2, restore_here, [a_job(corpora, newest.parents[1], resume) for resume in ("auto", str(newest))]
    ):
        assert (error, problem) == ("", "")
        assert any(f"{NEWER}: step 4" in note for note in notes)


def test_a_damaged_checkpoint_is_replaced_once_its_step_is_reached_again(
    world_pool: WorldPool, corpora: Path, newest: Path
) -> None:
    intact = content_of(newest)
    flipped(SHARD, in_tensor(WTE))(newest)
    world_pool.run(2, train_here, a_job(corpora, newest.parents[1], "auto"))
    assert sorted(entry.name for entry in newest.parent.iterdir()) == ["owner", OLDER, NEWER]
    found = content_of(newest)
    assert {name: found[name] for name in found if name != FILE} == {n: intact[n] for n in intact if n != FILE}


def test_nothing_is_made_up_where_every_checkpoint_is_damaged(
    world_pool: WorldPool, corpora: Path, newest: Path
) -> None:
    for path in (newest, newest.parent / OLDER):
        flipped(SHARD, in_tensor(WTE))(path)
    for ((error, _),) in world_pool.run(2, restore_here, [a_job(corpora, newest.parents[1], "auto")]):
        assert OLDER in error and NEWER in error and error.count(WTE) == 2 and "none that is whole" in error


def begin_here(job: Job) -> None:
    """A run that saves, and that cannot begin."""
    with pytest.raises(CheckpointError, match="is damaged at bytes"):
        RunCheckpoints(set_up(job, torch.device("cpu"))).restore()


def test_a_run_that_cannot_begin_takes_the_store_from_nobody(
    world_pool: WorldPool, corpora: Path, newest: Path
) -> None:
    owner = (newest.parent / "owner").read_text()
    flipped(SHARD, in_tensor(WTE))(newest)
    world_pool.run(2, begin_here, a_job(corpora, newest.parents[1], str(newest)))
    assert (newest.parent / "owner").read_text() == owner


def test_damage_of_every_kind_is_named_where_nothing_is_left(
    world_pool: WorldPool, corpora: Path, newest: Path
) -> None:
    truncated(newest)
    flipped(SHARD, in_tensor(WTE))(newest.parent / OLDER)
    for ((error, _),) in world_pool.run(2, restore_here, [a_job(corpora, newest.parents[1], "auto")]):
        assert f"{NEWER}: {SHARD} has" in error and f"{OLDER}/{SHARD} is damaged at bytes" in error


# --- a checkpoint of something else ----------------------------------------------------------------------------------

OTHERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("width", {"config": {"n_inner": 17}}, ["another model", "transformer.h.0.mlp.c_fc.bias has shape [13], not [17]"]),
    ("layers", {"config": {"n_layer": 2}}, ["another model", "transformer.h.1.", "is missing", " more;"]),
    ("vocabulary", {"config": {"vocab_size": 97}}, ["another model", "transformer.wte.weight has shape [30002, 26]"]),
    ("untied", {"config": {"tie_word_embeddings": False}}, ["another model", "lm_head.weight is missing"]),
    ("optimizer", {"optimizer": {"name": "NAdam"}}, ["holds the state of AdamW", "optimizer.name='NAdam'"]),
    ("options", {"optimizer": {"options": {"amsgrad": True}}}, ["lacks max_exp_avg_sq of", "={}", "'amsgrad'"]),
    ("sequences", {"data": {"validation_fraction": 0.3}}, ["trained on other data", "sequences"]),
    (
        "held out",
        {"data": {"validation_split": "place"}},
        ["held out by documents, this job holds them out by place", "set data.validation_split to documents"],
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("sections", "said"), [pytest.param(d, s, id=name) for name, d, s in OTHERS])
def test_a_checkpoint_of_another_run_is_refused_not_passed_over(
    world_pool: WorldPool, corpora: Path, newest: Path, sections: dict[str, Any], said: list[str]
) -> None:
    before = content_of(newest.parent)
    jobs = [a_job(corpora, newest.parents[1], resume, **sections) for resume in ("auto", str(newest))]
    for answers in world_pool.run(2, restore_here, jobs):
        for error, _ in answers:
            assert [part for part in [f"{NEWER} ", *said] if part not in error] == [], error
    assert content_of(newest.parent) == before


def test_options_that_need_no_other_state_may_change(world_pool: WorldPool, corpora: Path, newest: Path) -> None:
    options = {"optimizer": {"options": {"betas": [0.8, 0.9]}}}
    for ((error, notes),) in world_pool.run(2, restore_here, [a_job(corpora, newest.parents[1], "auto", **options)]):
        assert error == "" and any("optimizer.options was {} in the checkpoint" in note for note in notes)


def test_another_corpus_is_refused(world_pool: WorldPool, newest: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path)
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    (tmp_path / "tokens.jsonl").write_text("\n".join(reversed(lines)))
    for ((error, _),) in world_pool.run(2, restore_here, [a_job(tmp_path, newest.parents[1], "auto")]):
        assert "trained on other data" in error and NEWER in error


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere/step-1", "nowhere/step-1 does not exist"), (".", "is not a complete"),
     (f"{NEWER}/{FILE}", "cannot be read")],
)  # fmt: skip
def test_a_path_without_a_checkpoint(world_pool: WorldPool, corpora: Path, newest: Path, path: str, said: str) -> None:
    for ((error, _),) in world_pool.run(2, restore_here, [a_job(corpora, newest, str(newest.parent / path))]):
        assert error.startswith("checkpoint.resume='") and said in error


# --- in a process of its own -----------------------------------------------------------------------------------------


def alone(module: str, function: str, *arguments: Path) -> list[str]:
    """The lines that `function(*arguments)` prints in a new process."""
    code = f"import sys; from tests.checkpoint.{module} import {function} as f; f(*sys.argv[1:])"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = run_python("-c", code, *arguments, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def without_permission(root: str) -> None:
    """Prints what each use of a store says to a user who may not enter it."""
    store = LocalStore(root)
    with process_group("cpu", "gloo"):
        if os.geteuid() == 0:
            os.seteuid(65534)
        for use in (lambda: checkpoints(store), lambda: read_manifest(store, NEWER), lambda: claim(store)):
            try:
                use()
            except CheckpointError as error:
                print(error)


@pytest.mark.parametrize("closed", ["checkpoints", f"checkpoints/{NEWER}"])
def test_a_path_without_permission(newest: Path, closed: str) -> None:
    for path in (*newest.parents[3:0:-1], newest.parent, newest):
        path.chmod(0o755)
    target = newest.parents[1] / closed
    target.chmod(0)
    try:
        said = alone("test_bad_input", "without_permission", newest.parent)
    finally:
        target.chmod(0o755)
    assert all("Permission denied" in line for line in said)
    wanted = ["checkpoints cannot be read", f"{NEWER} cannot be read", "cannot be written"]
    assert [part for part in (wanted if closed == "checkpoints" else wanted[1:]) if part not in "\n".join(said)] == []
