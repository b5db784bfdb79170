"""The examples of docs/how-to/extend.md, run from the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from pydantic import create_model
from torch import nn

from shardwise.errors import ConfigError, KernelError, LegalityError
from shardwise.job import attention_kernels, axes, schema
from shardwise.job.attention_kernels import AttentionKernel
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.kernels import attention as attention_functions
from shardwise.kernels.attention import dispatch
from shardwise.launch import jobs, launcher
from shardwise.model import attention_choice
from shardwise.model.attention_choice import AttentionNeeds
from shardwise.observe.callback import HOOKS
from shardwise.parallel import apply
from shardwise.plan import rules
from shardwise.plan.plan import World, precheck
from shardwise.planner.constants.inventory import cluster, presets, stack_of
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.testing.world import WorldPool
from shardwise.training.objectives import choose
from shardwise.training.session import Session
from shardwise.training.trainer import train_rank
from tests.job.axis_tables import axis_tables
from tests.launch.targets.conftest import FakeClients
from tests.launch.targets.jobs_for_launch import JOB
from tests.pages import DOCS, block_with, load_block
from tests.parallel.test_apply import parallelized
from tests.parity.jobs import make_job
from tests.studied import each_rank_studies

PAGE = "how-to/extend.md"


def test_the_page_has_the_hooks_in_their_order() -> None:
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    positions = [text.index(f"| `{hook}(") for hook in HOOKS if hook != "on_note"]
    assert positions == sorted(positions)


def train_with_metric(job: Any) -> float:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    train_rank(job, torch.device("cpu"), [load_block(PAGE, "LargestWeight").LargestWeight()])
    torch.distributed.barrier()
    records = [json.loads(line) for line in (Path(job.output) / "metrics.jsonl").read_text().splitlines()]
    return next(float(record["largest_weight"]) for record in records if "loss" in record)


def test_a_metric_of_ones_own_is_recorded_alike_on_two_ranks(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    job = make_job(corpora, layers=1, training={"steps": 1}, observe={"tensorboard": False, "sample": False})
    largest = []
    for ranks in (1, 2):
        output = job.model_copy(update={"output": str(tmp_path / f"run{ranks}")})
        largest.append(world_pool.run(ranks, train_with_metric, output)[0])
    assert largest[0] > 0 and largest[1] == pytest.approx(largest[0], rel=1e-12)


def train_until_it_stops(job: Any) -> tuple[int, str]:
    callback = load_block(PAGE, "EarlyStopping").EarlyStopping(patience=1)
    with Session(job, callbacks=[callback], optimizer={"learning_rate": 1e-30, "weight_decay": 0.0}) as session:
        for batches in session.batches():
            session.step(batches)
            session.evaluate()
        return session.steps_done, session.stopped or ""


def test_early_stopping_ends_the_loop_on_every_rank(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, training={"steps": 9}, precision={"compute": "fp32"})
    for steps, stopped in world_pool.run(2, train_until_it_stops, job):
        assert steps < 9 and stopped.startswith("no better validation loss than ")


def losses_of_objective() -> list[float]:
    example = load_block(PAGE, "WeightedRegression").WeightedRegression
    row = choose.ObjectiveChoice(lambda job, facts: not facts.returns_logits, example)
    tensors = {"x": torch.ones(4, 3), "weight": torch.tensor([0.0, 1.0, 2.0, 3.0]), "labels": torch.zeros(4, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "OBJECTIVES", (row, *choose.OBJECTIVES))
        model = nn.Linear(3, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        with Session(model=Named(model), example={"x": tensors["x"]}) as session:
            return [session.step(tensors).loss]


class Named(nn.Module):
    """A layer whose forward takes `x` by name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def test_an_objective_is_one_class_and_one_row(world_pool: WorldPool) -> None:
    [losses] = world_pool.run(1, losses_of_objective)
    assert losses == [pytest.approx(1.5**2 * (0 + 1 + 2 + 3) / 4)]


def test_an_attention_kernel_is_one_file_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{attention_functions.__name__}.linear"
    monkeypatch.setitem(sys.modules, module, load_block(PAGE, "linear", module))
    kernel = eval(block_with(PAGE, 'AttentionKernel("linear"'), vars(attention_kernels))
    add_kernel(kernel, monkeypatch)
    query, key, value = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)
    output = dispatch.attention(query, key[:, :2], value[:, :2], causal=True, kernel="linear")
    keys, values = (tensor[:, :2].repeat_interleave(2, 1) for tensor in (key, value))
    scores = ((nn.functional.elu(query) + 1) @ (nn.functional.elu(keys) + 1).mT).tril()
    assert torch.allclose(output, scores / scores.sum(-1, keepdim=True) @ values)
    kernels_for = attention_choice.kernels_for
    assert "linear" in kernels_for(AttentionNeeds()) and "linear" not in kernels_for(AttentionNeeds(softcap=True))
    with pytest.raises(KernelError, match="it hides nothing but a causal triangle"):
        dispatch.attention(query, key, value, causal=True, window=2, kernel="linear")


def add_kernel(kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a row to the table, where the modules that have read it look."""
    kernels = (*attention_kernels.KERNELS, kernel)
    for module in (attention_kernels, attention_choice):
        monkeypatch.setattr(module, "KERNELS", kernels)
    monkeypatch.setitem(dispatch.FUNCTIONS, kernel.name, dispatch.load_function(kernel))


def test_a_job_can_name_every_kernel_of_the_table() -> None:
    assert get_args(schema.AttentionKernelName) == ("auto", *(kernel.name for kernel in attention_kernels.KERNELS))
    assert list(dispatch.FUNCTIONS) == [kernel.name for kernel in attention_kernels.KERNELS]


def add_axis(patch: pytest.MonkeyPatch) -> type[Job]:
    """Add the axis of the page: member, record, key, and a row in every table; return the job with its key."""
    members = {axis.name: axis.value for axis in Axis}
    patch.setattr(axes, "Axis", StrEnum("Axis", {**members, "REPEAT": "repeat"}))
    example = load_block(PAGE, "repeat_degree")
    records = list(axes.AXES)
    records.insert(records.index(axes.spec_of(Axis.CONTEXT)) + 1, example.RECORD)
    patch.setattr(axes, "AXES", tuple(records))
    tables = axis_tables()
    assert set(example.ROWS) == set(tables)
    for name, row in example.ROWS.items():
        patch.setitem(tables[name], example.Axis.REPEAT, row)
    patch.setattr(rules, "RULES", (*rules.RULES, *example.RULES))
    key = (get_type_hints(example)["repeat_degree"], example.repeat_degree)
    parallel = create_model("ParallelSection", __base__=schema.ParallelSection, repeat_degree=key)
    return create_model("Job", __base__=Job, parallel=(parallel, parallel()))


def losses_of_repeated_rows(job: dict[str, Any]) -> list[float]:
    with (
        pytest.MonkeyPatch.context() as patch,
        each_rank_studies(),  # facts that know of the axis are no other test's
        Session(add_axis(patch).model_validate(job)) as session,
    ):
        return [session.step(batches).loss for batches in session.batches()]


def test_an_axis_is_one_record_and_a_row_in_each_table(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, training={"steps": 2}).model_dump()
    [alone] = world_pool.run(1, losses_of_repeated_rows, job)
    job["parallel"] |= {"repeat_degree": 2, "sharded_data_parallel_degree": 2}
    for losses in world_pool.run(2, losses_of_repeated_rows, job):
        assert losses == pytest.approx(alone, rel=1e-9)


def test_an_axis_has_rules_of_its_own(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(corpora).model_dump()
    job["parallel"] |= {"repeat_degree": 2, "sharded_data_parallel_degree": 1}
    with pytest.raises(LegalityError, match=r"repeat_degree=2.*are sharded over ranks of equal rows too"):
        precheck(add_axis(monkeypatch).model_validate(job), World(2, "cpu", 2))


def test_an_axis_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    add_axis(monkeypatch)
    field = [("repeat", int, load_block(PAGE, "repeat_degree").repeat)]
    configuration = make_dataclass("Configuration", field, bases=(TrainingConfiguration,), frozen=True)
    model, stack = presets()["llama3-8b"], stack_of("default")
    predictions = [
        predict(configuration(model, cluster("p5.48xlarge:1"), stack, 4096, 1, repeat=degree)) for degree in (1, 2)
    ]
    assert [prediction.ranks for prediction in predictions] == [1, 2]


def clamps_blocks(job: Job) -> bool:
    """Return whether a model that the page's transform has met clamps behind its first block."""
    example = load_block(PAGE, "ClampedBlocks")
    row = [type(known).__name__ for known in apply.TRANSFORMS].index("CompiledBlocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "TRANSFORMS", (*apply.TRANSFORMS[:row], example.ClampedBlocks(), *apply.TRANSFORMS[row:]))
        block = parallelized(job).module.get_submodule("transformer.h.0")
    return example.clamp in block._forward_hooks.values()


def test_a_transform_is_one_file_and_one_row(world_pool: WorldPool, corpora: Path) -> None:
    half, double = (make_job(corpora, precision={"compute": compute}) for compute in ("fp16", "fp64"))
    assert world_pool.run(1, clamps_blocks, half) == [True]
    assert world_pool.run(1, clamps_blocks, double) == [False]
    hidden, other = load_block(PAGE, "ClampedBlocks").clamp(None, (), (torch.tensor([1e6, -1e6, 1.0]), "cache"))
    assert hidden.tolist() == [64504.0, -64504.0, 1.0] and other == "cache"


def losses_of_optimizer(job: Any) -> list[float]:
    page = load_block(PAGE, "SignDescent").__name__
    own = {"name": f"{page}:SignDescent", "schedule": f"{page}:inverse_square_root", "learning_rate": 0.01}
    with Session(job, optimizer=own) as session:
        return [session.step(batches).loss for batches in session.batches()]


def test_an_optimizer_and_a_schedule_of_ones_own_train_alike_on_two_ranks(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, training={"steps": 3})
    [alone] = world_pool.run(1, losses_of_optimizer, job)
    assert len(set(alone)) == 3
    for losses in world_pool.run(2, losses_of_optimizer, job):
        assert losses == pytest.approx(alone, rel=1e-9)


def test_a_target_is_one_file_and_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_block(PAGE, "PbsTarget").PbsTarget()
    monkeypatch.setitem(launcher.BY_NAME, "pbs", target)  # type: ignore[arg-type]
    clients = FakeClients(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{clients.directory}:/bin:/usr/bin")
    clients.add("qsub", "echo 7.server")
    clients.add("qstat", "echo 'Job id Name User Time Use S Queue'; echo '7.server llama me 0 R gpu'")
    clients.add("qdel")
    clients.add("shardwise", 'echo "$PET_NODE_RANK of $PET_NNODES x $PET_NPROC_PER_NODE at $PET_MASTER_ADDR"')
    job, out = load_job({**JOB, "launch": {"cluster": "h100:16", "queue": "gpu"}}, environ={}), tmp_path / "out"
    assert launcher.launch(job, "pbs", out, submit=True, default_name="llama").identifier == "7.server"
    assert jobs.job_status(out) == "R" and jobs.job_logs(out) == "" and jobs.stop_job(out) == "stopped 7.server"
    script = (out / "job.pbs").read_text()
    assert "#PBS -l select=2:mpiprocs=1:ngpus=8\n" in script and "#PBS -q gpu\n" in script
    assert clients.calls() == [f"qsub {out}/job.pbs", "qstat -x 7.server", "qdel 7.server"]
    started = {**os.environ, "PBS_NODENUM": "1"}
    said = subprocess.run(
        ["bash", str(out / "node.sh"), "host1"], env=started, capture_output=True, text=True, check=True
    )
    assert said.stdout == "1 of 2 x 8 at host1\n"
    with pytest.raises(ConfigError, match=r"launch\.image='x' does nothing on pbs"):
        launcher.launch(job.model_copy(update={"launch": job.launch.model_validate({"image": "x"})}), "pbs", out)
