"""Adapters in checkpoints, in peft's format and merged: any layout to any layout, and peft computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from shardwise.checkpoint.adapters import file_name, file_tensor, own_tensor
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.merging import merged
from shardwise.errors import CheckpointError, ConfigError, ModelError, OutputError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.model.facts import LayerAdapter
from shardwise.testing.oracle_quantization import quantize_base
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.session import TrainingResult
from shardwise.training.setup import study
from shardwise.training.trainer import train_rank
from tests.checkpoint.models import make_model
from tests.parity.jobs import make_job, write_tokens
from tests.parity.test_packed_base import packed_job, write_base

QUIET = {"tensorboard": False, "sample": False}
IDS = torch.arange(12).view(1, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a base, and the corpus beside it."""
    directory = tmp_path_factory.mktemp("base")
    write_tokens(directory)
    for family in ("llama", "gpt2"):
        make_model(family).save_pretrained(directory / family)
    return directory


def a_job(base: Path, output: Path, family: str = "llama", steps: int = 4, **sections: Any) -> Job:
    """A few steps of adapters with a checkpoint after every second one."""
    sections = {
        "model": {"config": None, "path": str(base / family)},
        "adapter": {"kind": "lora", "rank": 2, "alpha": 4.0},
        "training": {"steps": steps, "sequences_per_step": 8},
        "optimizer": {"learning_rate": 0.05, "schedule": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 2, "keep_last": 9},
        **sections,
    }
    job = make_job(base, family, observe=QUIET, **sections)
    return job.model_copy(update={"output": str(output)})


def train(job: Job) -> TrainingResult:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    return train_rank(job, torch.device("cpu"))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        values: Tensor = model.double().eval()(IDS).logits
    return values


def test_peft_opens_a_run_and_the_merged_model_computes_the_same(
    world_pool: WorldPool, base: Path, tmp_path: Path
) -> None:
    adapter = {"kind": "dora", "rank": 2, "alpha": 4.0, "rank_pattern": {"c_fc": 3}, "modules_to_save": ["ln_f"]}
    world_pool.run(2, train, a_job(base, tmp_path / "run", "gpt2", adapter=adapter))
    assert not (tmp_path / "run" / "model").exists()  # the base is in a directory of its own
    pretrained = AutoModelForCausalLM.from_pretrained(base / "gpt2", dtype=torch.float64)
    ours = PeftModel.from_pretrained(pretrained, str(tmp_path / "run" / "adapter"))
    expected = logits(ours)
    plain = logits(AutoModelForCausalLM.from_pretrained(base / "gpt2", dtype=torch.float64))
    assert (expected - plain).abs().max() > 1e-3
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    opened, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(logits(opened), expected, rtol=0, atol=1e-4)  # the base's file is in fp32
    export_checkpoint(str(tmp_path / "run"), tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base / "gpt2", dtype=torch.float64), str(tmp_path / "adapter")
    )
    assert torch.equal(logits(again), expected)


def test_a_merged_weight_is_rounded_once(world_pool: WorldPool, base: Path, tmp_path: Path) -> None:
    """Asked for in fp32, it has nothing of the bf16 of the base's files."""
    make_model("llama").bfloat16().save_pretrained(tmp_path / "narrow")
    model = {"config": None, "path": str(tmp_path / "narrow")}
    world_pool.run(1, train, a_job(base, tmp_path / "run", steps=2, model=model))
    pretrained = AutoModelForCausalLM.from_pretrained(model["path"], dtype=torch.float64)
    expected = logits(PeftModel.from_pretrained(pretrained, str(tmp_path / "run" / "adapter")))
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", "fp32", merge=True)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_adapters_of_a_packed_base_are_merged_into_what_they_were_fitted_to(
    world_pool: WorldPool, base: Path, tmp_path: Path
) -> None:
    write_tokens(base)
    model = {"config": None, "path": write_base(base, "llama")}
    adapter = {"kind": "lora", "rank": 2, "alpha": 4.0, "base": "nf4"}
    parallel = {"device": "cpu", "tensor_parallel_degree": 2}
    world_pool.run(2, train, a_job(base, tmp_path / "run", model=model, adapter=adapter, parallel=parallel))
    quantized = AutoModelForCausalLM.from_pretrained(model["path"])
    quantized.load_state_dict(quantize_base(packed_job(base, "llama", "tensor 2", "nf4"), quantized.state_dict()))
    expected = logits(PeftModel.from_pretrained(quantized, str(tmp_path / "run" / "adapter")))
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, rtol=0, atol=1e-4
    )
    resume = {"every": 0, "resume": str(min((tmp_path / "run" / "checkpoints").glob("step-*")))}
    whole = a_job(base, tmp_path / "on", model=model, adapter=adapter, checkpoint=resume)
    world_pool.run(2, train, whole)  # from step 2, on other ranks
    again, first = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("on", "run"))
    assert all(torch.allclose(again[name], first[name], rtol=0, atol=1e-9) for name in first)


STACKS = ["experts.gate_up_proj", "experts.down_proj"]
MIXTRAL = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
def test_adapters_of_experts_are_those_of_peft(world_pool: WorldPool, base: Path, tmp_path: Path) -> None:
    """peft opens ours, and training goes on from its own; merged, both compute what peft does."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(MixtralConfig(**MIXTRAL)).save_pretrained(base / "mixtral")
    sections = {"model": {"config": None, "path": str(base / "mixtral")}, "precision": {"compute": "fp32"}}
    adapter = {"kind": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "target_parameters": STACKS}
    parallel = {"device": "cpu", "expert_parallel_degree": 2}
    world_pool.run(2, train, a_job(base, tmp_path / "run", adapter=adapter, parallel=parallel, **sections))
    expected = logits(PeftModel.from_pretrained(mixtral(base / "mixtral"), str(tmp_path / "run" / "adapter")))
    assert (expected - logits(mixtral(base / "mixtral"))).abs().max() > 1e-3
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    assert torch.allclose(logits(mixtral(tmp_path / "merged")), expected, rtol=0, atol=1e-4)
    still = {"learning_rate": 1e-30, "schedule": "constant", "warmup_steps": 0}
    further = {"path": str(tmp_path / "run" / "adapter")}
    world_pool.run(2, train, a_job(base, tmp_path / "on", steps=2, adapter=further, optimizer=still, **sections))
    again = PeftModel.from_pretrained(mixtral(base / "mixtral"), str(tmp_path / "on" / "adapter"))
    assert torch.equal(logits(again), expected)


def test_forms_of_stacks_in_the_file() -> None:
    """Column r * experts + e of B is of expert e (peft's get_delta_weight), and the first stack is the innermost."""
    adapters = {
        f"m.experts.stack_adapters.{leaf}": LayerAdapter(2, 1.0, 0.0, 5, 6, experts=3) for leaf in ("up", "down")
    }
    down, up = (f"m.experts.stack_adapters.up.lora_{side}.weight" for side in "AB")
    assert file_name(down, adapters) == "base_model.model.m.experts.base_layer.lora_A.weight"
    assert file_name(down.replace(".up.", ".down."), adapters) == "base_model.model.m.experts.lora_A.weight"
    a, b = torch.rand(3, 2, 5), torch.rand(3, 6, 2)
    stored = file_tensor(down, a, adapters), file_tensor(up, b, adapters)
    assert torch.equal(stored[0][2 * 2 : 2 * 3], a[2]) and torch.equal(stored[1][:, [2, 3 + 2]], b[2])
    for name, tensor, own in zip((down, up), stored, (a, b), strict=True):
        assert torch.equal(own_tensor(name, tensor, adapters), own)


def mixtral(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.slow
def test_a_run_goes_on_from_adapters_alone_on_another_layout(world_pool: WorldPool, base: Path, tmp_path: Path) -> None:
    whole = world_pool.run(1, train, a_job(base, tmp_path / "whole"))[0]
    directory = min((tmp_path / "whole" / "checkpoints").glob("step-*"))
    manifest = json.loads((directory / "manifest.json").read_text())
    assert all(".lora_" in name for name in manifest["tensors"] if name.startswith(("model/", "optimizer/")))
    assert manifest["adapter"]["base"] == str(base / "llama") and len(manifest["adapter"]["base_hash"]) == 32
    resume = {"every": 0, "resume": str(directory)}
    parallel = {"device": "cpu", "pipeline_parallel_degree": 2}
    resumed = world_pool.run(2, train, a_job(base, tmp_path / "on", checkpoint=resume, parallel=parallel))[0]
    assert resumed.validation_loss == pytest.approx(whole.validation_loss, abs=1e-9)
    changed = tmp_path / "other"
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    model.save_pretrained(changed)
    other = a_job(base, tmp_path / "wrong", checkpoint=resume, model={"config": None, "path": str(changed)})
    with pytest.raises(WorldError, match="to the model that they were trained on"):
        world_pool.run(1, train, other)
    with pytest.raises(OutputError, match="no adapters"):
        export_checkpoint(str(plain_run(world_pool, base, tmp_path)), tmp_path / "out", merge=True)


def plain_run(world_pool: WorldPool, base: Path, tmp_path: Path) -> Path:
    job = a_job(base, tmp_path / "plain", steps=2, adapter={})
    world_pool.run(1, train, job)
    return Path(job.output)


def make_adapter(base: Path, target: Path, **keys: Any) -> Tensor:
    """An adapter that peft wrote, with B and saved modules as if trained; returns the logits of the model with it."""
    model = AutoModelForCausalLM.from_pretrained(base / "llama", dtype=torch.float64)
    config = LoraConfig(**{"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], **keys})
    adapted = get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(target)
    return logits(adapted)


def start(job: Job) -> None:
    train_rank(job, torch.device("cpu"))


def test_training_goes_on_from_an_adapter_of_peft(world_pool: WorldPool, base: Path, tmp_path: Path) -> None:
    expected = make_adapter(base, tmp_path / "peft", use_rslora=True, modules_to_save=["norm"])  # each of the five
    still = {"learning_rate": 1e-30, "schedule": "constant", "warmup_steps": 0}
    job = a_job(
        base, tmp_path / "run", steps=2, adapter={"path": str(tmp_path / "peft")}, optimizer=still,
        parallel={"device": "cpu", "tensor_parallel_degree": 1},
    )  # fmt: skip
    world_pool.run(2, train, job)
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert torch.allclose(logits(opened), expected, rtol=0, atol=1e-5)
    assert names_in(tmp_path / "run" / "adapter") == names_in(tmp_path / "peft")


TIED = {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"], "fan_in_fan_out": True}


def make_tied_adapter(base: Path, target: Path, apart: float = 0.0) -> Tensor:
    """An adapter of peft's that saves a tied embedding and head, whose values differ by `apart`; returns its logits."""
    model = AutoModelForCausalLM.from_pretrained(base / "gpt2", dtype=torch.float64)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, **TIED))
    torch.manual_seed(3)
    saved = [module for name, module in adapted.named_modules() if name.endswith("modules_to_save.default")]
    assert len(saved) == 2
    changed = saved[0].weight + 0.1 * torch.randn_like(saved[0].weight)
    with torch.no_grad():
        for number, module in enumerate(saved):
            module.weight.copy_(changed + number * apart)
    adapted.save_pretrained(target)
    return logits(adapted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}], ids=str)
def test_training_goes_on_from_saved_modules_that_are_tied(
    world_pool: WorldPool, base: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    expected = make_tied_adapter(base, tmp_path / "peft")
    still = {"learning_rate": 1e-30, "schedule": "constant", "warmup_steps": 0}
    adapter = {"path": str(tmp_path / "peft")}
    parallel = {"device": "cpu", **layout}
    job = a_job(base, tmp_path / "run", "gpt2", 2, adapter=adapter, optimizer=still, parallel=parallel)
    world_pool.run(2, train, job)
    assert names_in(tmp_path / "run" / "adapter") == names_in(tmp_path / "peft")
    pretrained = AutoModelForCausalLM.from_pretrained(base / "gpt2", dtype=torch.float64)
    assert torch.equal(logits(PeftModel.from_pretrained(pretrained, str(tmp_path / "run" / "adapter"))), expected)
    export_checkpoint(str(tmp_path / "run"), tmp_path / "merged", merge=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert torch.allclose(logits(opened), expected, rtol=0, atol=1e-5)


def test_tied_modules_that_were_saved_with_two_values_are_refused(base: Path, tmp_path: Path) -> None:
    make_tied_adapter(base, tmp_path / "peft", apart=0.5)
    with pytest.raises(ModelError, match=r"adapter_model.safetensors.*(wte|lm_head)"):
        study(a_job(base, tmp_path, "gpt2", adapter={"path": str(tmp_path / "peft")}))


def names_in(adapter: Path) -> list[str]:
    with safe_open(str(adapter / "adapter_model.safetensors"), framework="pt") as opened:
        return sorted(opened.keys())


@pytest.mark.parametrize(
    ("keys", "changes", "error", "says"),
    [
        ({}, {"rank": 4}, ConfigError, "adapter.rank=4: the adapter in"),
        ({"bias": "all"}, {}, ModelError, "bias=.all. is not built"),
        ({"layers_to_transform": [0]}, {}, ModelError, "layers_to_transform"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], error: type[ShardwiseError], says: str
) -> None:
    make_adapter(base, tmp_path / "peft", **keys)
    with pytest.raises(error, match=says):
        study(a_job(base, tmp_path, adapter={"path": str(tmp_path / "peft"), **changes}))


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(base, tmp_path / "peft")
    with pytest.raises(ModelError, match="another base"):
        study(a_job(base, tmp_path, "gpt2", adapter={"path": str(tmp_path / "peft")}))


def test_a_layer_without_a_part_of_its_adapter_is_not_left_out_of_what_is_merged() -> None:
    adapter = LayerAdapter(rank=1, scaling=1.0, dropout=0.0, inputs=3, outputs=2, transposed=False)
    parts = {"block.weight": torch.ones(2, 3), "block.lora_A.weight": torch.ones(1, 3), "norm.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"block cannot be merged: .* there is lora_A, weight alone"):
        list(merged(parts.items(), {"block": adapter}))
    parts["block.lora_B.weight"] = torch.ones(2, 1)
    whole = dict(merged(parts.items(), {"block": adapter}))
    assert whole["block.weight"].equal(torch.full((2, 3), 2.0)) and list(whole) == ["norm.weight", "block.weight"]
