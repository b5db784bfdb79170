"""Adapters on every layout compute what peft computes in one process, from the same initial values."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from shardwise.job.schema import AdapterSection, Job
from shardwise.model.facts import ModelFacts
from shardwise.testing import oracle
from shardwise.testing.capture import gather
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up, study
from tests.parity.jobs import tensor_job, verify_one
from tests.parity.test_experts import experts_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {}),
    "shard 2 x replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "sequence 2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
    "tensor 4": (4, {"tensor_parallel_degree": 4}),  # more ranks than key-value heads
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "zbv": (2, {"pipeline_parallel_degree": 2, "pipeline": "zbv"}),
    "context 2": (2, {"context_parallel_degree": 2}),
    "zero-1": (2, {"shard_optimizer_state": True}),
    "tensor 2 x pipeline 2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "tensor 2 x context 2": (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
}
QUICK = [("gpt2", "tensor 2", "lora", 0.0), ("llama", "sequence 2", "lora", 0.3)]
ALL = [
    (family, layout, kind, dropout)
    for family in ("llama", "gpt2", "gpt_neox", "gemma", "qwen3")
    for layout in LAYOUTS
    for kind, dropout in (("lora", 0.0), ("lora", 0.3), ("dora", 0.0), ("dora", 0.3))
]


def peft_config(settings: AdapterSection) -> LoraConfig:
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.kind == "dora",
        target_modules=settings.target_modules,
        modules_to_save=settings.modules_to_save or None,
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
    )


class PeftModel(nn.Module):
    """peft's model, whose names of parameters and modules are those of its files."""

    def __init__(self, model: nn.Module, settings: AdapterSection, weights: Container[str] = ()) -> None:
        super().__init__()
        self.inner = inject_adapter_in_model(peft_config(settings), model, adapter_name="default")
        self.config = model.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)

    def get_submodule(self, target: str) -> nn.Module:
        return self.inner.get_submodule(target)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return ((name.removesuffix(".default"), module) for name, module in self.inner.named_modules(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.inner.named_parameters(*args, **kwargs):
            if "original_module" not in name:
                yield plain_name(name), parameter


def plain_name(name: str) -> str:
    for part in (".base_layer", ".default", ".modules_to_save"):
        name = name.replace(part, "")
    return name


def against_peft(job: Job, facts: ModelFacts) -> VerifyReport | None:
    with mock.patch.object(oracle, "adapt", PeftModel):
        return verify_one(job, 3, facts)


def adapter_job(directory: Path, family: str, layout: str, kind: str, dropout: float, **keys: Any) -> Job:
    adapter = {"kind": kind, "rank": 3, "alpha": 5.0, "dropout": dropout, "rank_pattern": {"0.*": 2}, **keys}
    layers = 4 if layout == "zbv" else 2
    # lora_B is zero at first, and A's gradient with it: what Adam divides by is rounding for some of its elements.
    optimizer = {"learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}}
    training = {"gradient_accumulation": 4 if layout == "zbv" else 2}
    return tensor_job(
        directory, family, tied=False, layers=layers, adapter=adapter, parallel=LAYOUTS[layout][1],
        optimizer=optimizer, training=training,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"expert_parallel_degree": 2}, {"tensor_parallel_degree": 2}])
def test_adapters_beside_frozen_experts(world_pool: WorldPool, corpora: Path, parallel: dict[str, Any]) -> None:
    config = {"experts_implementation": "eager", "num_local_experts": 4}
    adapter = {"kind": "lora", "rank": 3, "alpha": 5.0}
    optimizer = {"learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}}
    job = tensor_job(
        corpora, "mixtral", tied=False, config=config, adapter=adapter, parallel=parallel, optimizer=optimizer
    )
    report = world_pool.run(2, verify_one, job, 2, study(job))[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


def with_wide_norms(job: Job, facts: ModelFacts) -> VerifyReport | None:
    def norm(self: Any, hidden: Tensor) -> Tensor:
        scaled: Tensor = self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return scaled

    with mock.patch.object(Qwen3RMSNorm, "forward", norm):
        return against_peft(job, facts)


@pytest.mark.slow
def test_norms_of_heads_on_more_ranks_than_heads(world_pool: WorldPool, corpora: Path) -> None:
    """Two ranks round the gradient of a key head in parts, for its norm computes in fp32; nothing else differs."""
    job = adapter_job(corpora, "qwen3", "tensor 4", "lora", 0.0)
    rounded = world_pool.run(4, against_peft, job, study(job))[0]
    exact = world_pool.run(4, with_wide_norms, job, study(job))[0]
    assert rounded.agrees and 1e-9 < rounded.max_relative_error < 1e-6
    assert exact.agrees and exact.max_relative_error < 1e-12


STACKS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    **{name: LAYOUTS[name] for name in ("shard 2 x replica 2", "tensor 2", "pipeline 2", "context 2")},
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "expert 2 x tensor 2": (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


def expert_job(directory: Path, family: str, layout: str) -> Job:
    """A job with adapters of experts, and of attention's linear layers."""
    adapter = {
        "kind": "lora", "rank": 3, "alpha": 5.0, "target_modules": ["q_proj", "o_proj"], "target_parameters": STACKS,
        "rank_pattern": {"experts.down_proj": 2},
    }  # fmt: skip
    sections = {
        "config": {"experts_implementation": "eager"}, "adapter": adapter, "parallel": EXPERT_LAYOUTS[layout][1],
        "precision": {"compute": "fp64"},
        "optimizer": {"name": "AdamW", "learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}},
    }  # fmt: skip
    return experts_job(directory, family, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_of_experts(world_pool: WorldPool, corpora: Path, family: str, layout: str) -> None:
    """Each expert computes with its weight and the product of its own adapter, as the oracle has it by itself."""
    job = expert_job(corpora, family, layout)
    report = world_pool.run(EXPERT_LAYOUTS[layout][0], verify_one, job, 3, study(job))[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


def with_fault(job: Job, facts: ModelFacts) -> tuple[VerifyReport | None, VerifyReport | None]:
    """Verify against the oracle's own adapters, without a fault and with one."""
    whole = verify_one(job, 2, facts)
    with FAULTS["adapter_scaled_twice"]():
        return whole, verify_one(job, 2, facts)


def test_verify_names_adapters_that_are_scaled_twice(world_pool: WorldPool, corpora: Path) -> None:
    job = adapter_job(corpora, "gpt2", "shard 2", "dora", 0.3)
    whole, wrong = world_pool.run(2, with_fault, job, study(job))[0]
    assert whole.agrees and whole.max_relative_error < 1e-9
    assert not wrong.agrees and wrong.fault == "adapter_scaled_twice", wrong.diagnosis


def test_modules_are_saved_by_ends_of_names_as_in_peft(world_pool: WorldPool, corpora: Path) -> None:
    """`norm` is the last norm and the two of each block; the oracle's own adapters have the same."""
    job = adapter_job(corpora, "llama", "sequence 2", "lora", 0.0, modules_to_save=["norm"])
    facts = study(job)
    norms = {name for name in facts.parameter_shapes if "norm" in name}
    assert len(norms) == 5 and norms.isdisjoint(facts.frozen)
    for report in (world_pool.run(2, against_peft, job, facts)[0], world_pool.run(2, verify_one, job, 3, facts)[0]):
        assert report is not None
        assert report.agrees, (report.first, report.diagnosis)


def initial_adapters(job: Job) -> dict[str, Tensor]:
    """Return the whole adapters as they start, on rank 0."""
    run = set_up(job, torch.device("cpu"))
    return {name: value for name, value in gather(run).items() if ".lora_" in name}


def test_adapters_start_bit_equal_on_every_layout(world_pool: WorldPool, corpora: Path) -> None:
    starts = [
        world_pool.run(LAYOUTS[layout][0], initial_adapters, adapter_job(corpora, "llama", layout, "dora", 0.0))[0]
        for layout in ("shard 2", "tensor 2", "pipeline 2")
    ]
    assert starts[0]["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (3, 13)
    for start in starts:
        assert start.keys() == starts[0].keys() and all(torch.equal(start[name], starts[0][name]) for name in start)
    assert not any(value.any() for name, value in starts[0].items() if "lora_B" in name)


def cases() -> list[Any]:
    quick = [pytest.param(*case, id="-".join(map(str, case))) for case in QUICK]
    slow = [
        pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in ALL if case not in QUICK
    ]
    return quick + slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "layout", "kind", "dropout"), cases())
def test_adapters(world_pool: WorldPool, corpora: Path, family: str, layout: str, kind: str, dropout: float) -> None:
    job = adapter_job(corpora, family, layout, kind, dropout)
    report = world_pool.run(LAYOUTS[layout][0], against_peft, job, study(job))[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)
