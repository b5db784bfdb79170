"""The trace holds what the real run holds, on every axis; ranks that do not meet are found, each at its line."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

from benchmarks.memory_cpu import measure
from shardwise.commands.cli import main
from shardwise.errors import ConfigError, ModelError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.regions import SequenceRegionBoundary
from shardwise.plan.plan import World
from shardwise.planner.constants.inventory import presets
from shardwise.planner.constants.presets import preset_config
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.toy_inputs import toy_of_files
from shardwise.testing.trace import rank as trace_rank_module
from shardwise.testing.trace.job import JobTrace, trace_job
from shardwise.testing.trace.program import Call
from shardwise.testing.trace.rank import RankTrace
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.fork_server import call, run_python

NEOX = {
    "model_type": "gpt_neox", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 1024, "vocab_size": 2048, "max_position_embeddings": 128,
}  # fmt: skip

AXES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicas": {"parallel": {"sharded_data_parallel_degree": 4}},
    "zero1": {"parallel": {"shard_optimizer_state": True}},
    "tensor": {"parallel": {"tensor_parallel_degree": 4}},
    "sequence parallel": {"parallel": {"tensor_parallel_degree": 4, "sequence_parallel": True}},
    "ulysses": {"parallel": {"context_parallel_degree": 4}},
    "ring": {"parallel": {"context_parallel_degree": 4, "context_parallel_method": "ring"}},
    "gathered keys": {"parallel": {"context_parallel_degree": 4, "context_parallel_method": "all_gather"}},
    "1F1B": {"parallel": {"pipeline_parallel_degree": 4}},
    "virtual stages": {"parallel": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}},
    "in a V": {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}},
    "zero bubble": {"parallel": {"pipeline_parallel_degree": 4, "pipeline": "zero_bubble"}},
    "zero bubble of checkpoints": {
        "parallel": {"pipeline_parallel_degree": 4, "pipeline": "zero_bubble"},
        "memory": {"activation_checkpointing": "full"},
    },
    "zero bubble of shared sequences": {
        "parallel": {
            "pipeline_parallel_degree": 2,
            "pipeline": "zero_bubble",
            "tensor_parallel_degree": 2,
            "sequence_parallel": True,
        },
    },
    "every second checkpoint of virtual stages": {
        "model": {"config": NEOX | {"num_hidden_layers": 12}},
        "parallel": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2},
        "memory": {"activation_checkpointing": "full", "checkpoint_every": 2},
    },
    "GPipe": {"parallel": {"pipeline_parallel_degree": 4, "pipeline": "simple"}},
    "a soft cap on logits": {"model": {"config": toy_config("gemma2", vocab_size=32768, max_position_embeddings=128)}},
    "averages": {"training": {"ema_decay": 0.99}},
    "full": {"memory": {"activation_checkpointing": "full"}},
    "selective": {"memory": {"activation_checkpointing": "selective"}},
    "selective ring": {
        "memory": {"activation_checkpointing": "selective"},
        "parallel": {"context_parallel_degree": 4, "context_parallel_method": "ring"},
    },
    "selective eager": {"memory": {"activation_checkpointing": "selective"}, "model": {"attention": "eager"}},
    "offloaded": {"memory": {"activation_checkpointing": "full", "offload_activations": True}},
    "bf16": {"precision": {"compute": "bf16"}},
    "eager": {"model": {"attention": "eager"}},
    "preferences": {"data": {"format": "preference", "path": "pairs.jsonl"}},
    "preferences in stages": {
        "data": {"format": "preference", "path": "pairs.jsonl"},
        "parallel": {"pipeline_parallel_degree": 4},
    },
    "preferences ahead of training": {
        "data": {"format": "preference", "path": "pairs.jsonl"},
        "training": {"dpo": {"precompute_reference": True}},
    },
    "preferences under adapters": {
        "data": {"format": "preference", "path": "pairs.jsonl"},
        "adapter": {"kind": "lora"},
    },
    "documents": {"data": {"isolate_documents": True}},
    "one shard rank": {
        "parallel": {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 1},
        "precision": {"compute": "bf16"},
    },
    "one shard rank that keeps its weights": {
        "parallel": {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 1, "reshard_after_forward": False},
        "precision": {"compute": "bf16"},
    },
}
QUICK = ("sharded", "1F1B")


def samples(task: str, model_type: str) -> dict[str, dict[str, Any]]:
    """Return sections of a toy that sees images or hears sound, with a data set of tensors."""
    config, arguments = toy_of_files(task, model_type)
    labels = {"labels": ["cat", "dog", "cow"]} if TASKS[task].classifies else {}
    data: dict[str, Any] = {"factory": "shardwise.testing.toy_samples:ToySamples", "factory_arguments": arguments}
    data["sequence_length"] = 32
    return {"model": {"config": config, "task": task, **labels}, "data": data}


# Jobs whose microbatches have shapes that their data say.
OWN_SHAPES: dict[str, dict[str, Any]] = {
    "images": samples("image_classification", "vit"),
    "images for convolutions": samples("image_classification", "resnet"),
    "speech": samples("speech_seq2seq", "whisper"),
    "speech in stages": {**samples("speech_seq2seq", "whisper"), "parallel": {"pipeline_parallel_degree": 2}},
    "classes of tokens": {
        "model": {"config": toy_config("bert"), "task": "token_classification", "labels": ["cat", "dog", "cow"]},
        "data": {
            "factory": "benchmarks.coverage:ClassifiedTokens",
            "factory_arguments": {"for_tokens": True, "last": None},
            "sequence_length": 16,
        },
    },
    "a module of one's own": {
        "model": {"factory": "tests.parity.jobs:Regression", "loss": "tests.parity.jobs:squared_error"},
        "data": {"factory": "tests.parity.jobs:Points"},
    },
}


def settings(sequences: int, **sections: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {
        "model": {"config": NEOX},
        "data": {"sequence_length": 128},
        "training": {"microbatch_size": 2, "sequences_per_step": sequences},
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    if "factory" in job["model"]:
        del job["model"]["config"]
    return job


def traced_here(job: dict[str, Any], ranks: int, rank: int | None = None, device: str = "cpu") -> JobTrace:
    made = Job.model_validate(job)
    facts = study(made)
    return trace_job(made, World(ranks, device, min(8, ranks)), facts, rank, processes=1)


def traced_job(job: dict[str, Any], ranks: int, rank: int | None = None, device: str = "cpu") -> JobTrace:
    """Trace a job; on accelerators in a fork, since torch does not forget the one that is simulated."""
    if device == "cpu":
        return traced_here(job, ranks, rank)
    trace: JobTrace = call(traced_here, job, ranks, rank, device)
    return trace


def traced(job: dict[str, Any], ranks: int, rank: int = 0, device: str = "cpu") -> RankTrace:
    return traced_job(job, ranks, rank, device).ranks[0]


def check(axis: str) -> None:
    run = traced(settings(64, **AXES[axis]), 16)
    assert run.peak > 0 and run.operators > 500
    assert sum(run.owners.values()) == run.peak
    assert abs(run.error) < 0.08, (axis, run.error)
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("axis", QUICK)
def test_the_closed_form_meets_the_trace(axis: str) -> None:
    check(axis)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [axis for axis in AXES if axis not in QUICK])
def test_the_closed_form_meets_the_trace_everywhere(axis: str) -> None:
    check(axis)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [{}, pytest.param({"parallel": {"tensor_parallel_degree": 2}}, marks=pytest.mark.slow)],
    ids=["sharded", "tensor"],
)
def test_the_trace_is_what_two_real_ranks_hold(world_pool: WorldPool, sections: dict[str, Any]) -> None:
    job = settings(4 // (1 + len(sections)), **sections)
    measured = max(peak for peak, _ in world_pool.run(2, measure, job))
    assert traced(job, 2).peak == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_a_job_of_many_ranks_is_traced_without_allocating() -> None:
    """Four blocks of Llama 3 8B, 31 GB with their states, on 768 ranks."""
    run, grown = call(traced_and_grown)
    assert run.peak > 2**28 and abs(run.error) < 0.08
    assert grown < 2**30


def traced_and_grown() -> tuple[RankTrace, int]:
    before = psutil.Process().memory_info().rss
    job = settings(
        96,
        model={"config": preset_config(presets()["llama3-8b"]) | {"num_hidden_layers": 4}},
        data={"sequence_length": 2048},
        training={"microbatch_size": 1},
        parallel={"tensor_parallel_degree": 8},
        memory={"activation_checkpointing": "full"},
    )
    run = traced_here(job, 768, 767, "cuda").ranks[0]
    return run, psutil.Process().memory_info().rss - before


def test_what_cannot_be_traced_is_refused_by_name() -> None:
    stages = {"parallel": {"pipeline_parallel_degree": 2}}
    with pytest.raises(ConfigError, match="where a model has a tower"):
        traced(settings(16, **samples("image_text_to_text", "llava"), **stages), 8)
    with pytest.raises(ConfigError, match="--rank=8 is not among the 8 ranks"):
        traced(settings(16), 8, rank=8)


def test_shapes_are_those_of_the_data() -> None:
    """Eight images a microbatch in the place of two are four times the activations."""
    few, many = (
        traced(settings(64, **samples("image_classification", "vit"), training={"microbatch_size": size}), 1)
        for size in (2, 8)
    )
    assert many.owners["activations"] == pytest.approx(4 * few.owners["activations"], rel=0.05)
    assert many.owners["optimizer state"] == few.owners["optimizer state"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_values_that_transformers_reads_of_a_real_batch_are_known(model_type: str) -> None:
    """Their lines are named: on a GPU the host waits there."""
    run = traced(settings(64, **samples("image_text_to_text", model_type)), 1, device="cuda")
    waits = [fault for fault in run.faults if "the host waits" in fault]
    assert waits and all(re.search(r"(models|transformers|utils|qwen2_vl|llava)/\w+\.py:\d+", wait) for wait in waits)


def expert_settings(model_type: str) -> dict[str, Any]:
    experts = {"expert_parallel_degree": 2}
    return settings(16, model={"config": toy_config(model_type)}, parallel=experts, data={"sequence_length": 16})


@pytest.mark.slow
def test_grouped_products_in_fp32_are_traced() -> None:
    """Of which torch's own function of shapes knows bf16 alone."""
    run = traced(expert_settings("mixtral"), 4)
    assert abs(run.error) < 0.08


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe"])
def test_code_that_asks_for_values_is_refused_with_its_line(model_type: str) -> None:
    with pytest.raises(ConfigError, match=rf"asks for the values of tensors \(.*modeling_{model_type}\.py:\d+\)"):
        traced(expert_settings(model_type), 4)


def test_the_command_shows_memory_calls_and_time(tmp_path: Any) -> None:
    job, timeline = tmp_path / "job.yaml", tmp_path / "step.json"
    small = NEOX | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256}
    job.write_text(yaml.safe_dump(settings(16, model={"config": small})))
    words = ["plan", str(job), "--trace", "--cluster", "dgx-h100:1", "--timeline", str(timeline)]
    printed = run_python("-m", "shardwise", *words).stdout
    assert "2 of 8 ranks traced" in printed and "of all 8 ranks meet" in printed
    assert "A step takes" in printed and "on the host is not the limit" in printed
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} == {"M", "X", "C"}


@pytest.mark.slow
def test_the_command_prints_both_numbers(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(settings(16)))
    assert main(["plan", str(job), "--trace", "--cluster", "cpu:8", "--rank", "3", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["rank"] == 3 and rank["coordinates"]["shard"] == 3
    assert rank["traced_peak_bytes"] > 0 and abs(rank["error_percent"]) < 8
    timeline = tmp_path / "step.json"  # four kinds, in processes of their own
    stages = ["--parallel.pipeline_parallel_degree", "2", "--timeline", str(timeline)]
    assert main(["plan", str(job), "--trace", "--cluster", "dgx-h100:1", *stages]) == 0
    printed = capsys.readouterr().out
    assert "4 of 8 ranks traced" in printed and "of all 8 ranks meet" in printed
    assert "A step takes" in printed and "on the host is not the limit" in printed
    assert "waits for a value once in the traced step: training/step.py" in " ".join(printed.split())
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"host", "computation"}


@pytest.mark.slow
def test_a_recomputed_forward_that_stops_in_a_region_leaves_nothing_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing stops a recomputed block inside its MLP: what has entered that region is not held till later."""
    job = settings(
        64,
        model={"config": NEOX | {"vocab_size": 64}},
        parallel={"tensor_parallel_degree": 4, "sequence_parallel": True},
        memory={"activation_checkpointing": "full"},
    )
    made: list[SequenceRegionBoundary] = []
    first = SequenceRegionBoundary.__init__

    def noted(self: SequenceRegionBoundary, *args: Any) -> None:
        first(self, *args)
        made.append(self)

    held: list[bool] = []
    step = trace_rank_module.step_of

    def then_look(*args: Any) -> None:
        step(*args)
        held.extend(one.entered is not None and one.entered[0]() is not None for one in made)

    monkeypatch.setattr(SequenceRegionBoundary, "__init__", noted)
    monkeypatch.setattr(trace_rank_module, "step_of", then_look)
    traced(job, 16)
    assert held and not any(held)


# ---- ranks that do not meet

PAIRS = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}


def fault(monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[ParallelModel], None]) -> None:
    """Let `plant` run ahead of a method of every rank's model."""
    method = getattr(ParallelModel, name)

    def planted(self: ParallelModel, *args: Any) -> Any:
        plant(self)
        return method(self, *args)

    monkeypatch.setattr(ParallelModel, name, planted)


def on_first_stage_alone(model: ParallelModel) -> None:
    if model.layout.index(Axis.PIPELINE) == 0:
        dist.all_reduce(torch.empty(4))


def in_opposite_order(model: ParallelModel) -> None:
    axes = [Axis.TENSOR, Axis.PIPELINE]
    is_first = (model.layout.index(Axis.TENSOR) + model.layout.index(Axis.PIPELINE)) % 2
    for axis in axes[:: 1 if is_first else -1]:
        dist.all_reduce(torch.empty(4), group=model.layout.group(axis))


def without_a_receive(model: ParallelModel) -> None:
    if model.layout.index(Axis.PIPELINE) == 0:
        dist.isend(torch.empty(4), group_dst=1, group=model.layout.group(Axis.PIPELINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (on_first_stage_alone, "test_trace.py:{line}"),
        (in_opposite_order, "a circle of ranks"),
        (without_a_receive, "waits for send over pipeline"),
    ],
)
def test_a_planted_fault_is_found_at_its_line(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[ParallelModel], None], said: str
) -> None:
    fault(monkeypatch, "sum_shared_gradients", plant)
    lines, first = inspect.getsourcelines(plant)
    call = first + next(number for number, line in enumerate(lines) if "dist." in line)
    with pytest.raises(ModelError) as error:
        traced_job(settings(16, parallel=PAIRS), 8)
    assert said.format(line=call) in str(error.value) and f"test_trace.py:{call}" in str(error.value)


HEALTHY: list[dict[str, Any]] = [
    {"parallel": PAIRS},
    {"parallel": {**PAIRS, "sequence_parallel": True}, "memory": {"activation_checkpointing": "full"}},
    {"parallel": {"pipeline_parallel_degree": 4, "pipeline": "simple"}},
    {"parallel": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}},
    {"parallel": {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "pipeline": "zero_bubble"}},
    {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "zbv"}},
    {"parallel": {**PAIRS, "pipeline": "zero_bubble", "sequence_parallel": True}},
    {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "dualpipev"}},
    {"parallel": {"context_parallel_degree": 4, "context_parallel_method": "ring"}},
    {"parallel": {"context_parallel_degree": 2, "sharded_data_parallel_degree": 2}},
    {"parallel": {"shard_optimizer_state": True}},
    {"data": {"format": "preference", "path": "pairs.jsonl"}, "parallel": {"pipeline_parallel_degree": 4}},
]


@pytest.mark.slow
@pytest.mark.parametrize("sections", HEALTHY, ids=[str(sections) for sections in HEALTHY])
def test_all_ranks_of_a_healthy_job_meet(sections: dict[str, Any]) -> None:
    trace = traced_job(settings(64, **sections), 8)
    assert trace.met and len(trace.ranks) > 1
    issued = [len([entry for entry in rank.program if isinstance(entry, Call)]) for rank in trace.ranks]
    assert trace.met >= sum(issued)
