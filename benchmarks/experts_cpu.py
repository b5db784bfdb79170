"""Step time of shared experts on four CPU ranks: shardwise beside transformers' own expert parallelism, one Qwen3-MoE.

    python -m benchmarks.experts_cpu --rounds 7 --steps 2 --json result.json

Four blocks of width 512 with 16 experts, of which a token takes 4. Shardwise runs twice: its ranks share the experts,
or each gathers all of them (degree 1). transformers shares them by its `all_to_all`, the rest under FSDP2. Every rank
has fewer tokens than the T* from which gathering would move less. DeepSpeed's AutoEP takes part where deepspeed 0.19 or
later is installed (`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`); a line says so where it does not.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks import parallelism_cpu
from benchmarks.harness import Contender, Step
from benchmarks.parallelism_cpu import RANKS, Axis
from benchmarks.workload import Workload, parameter_groups, token_ids

EXPERTS, CHOSEN, EXPERT_WIDTH = 16, 4, 512
ENGINE = "shardwise"  # the backend of shardwise's ranks; transformers has Gloo
NATIVE = Contender(
    "transformers EP", "benchmarks.experts_cpu:native", "transformers",
    "DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation='all_to_all')",
)  # fmt: skip
WHOLE = Contender(
    "shardwise, degree 1", "benchmarks.contenders.shardwise_contender:shard_axis", "shardwise",
    "experts sharded with everything else, and gathered", ENGINE,
)  # fmt: skip

AUTOEP = Contender(
    "DeepSpeed AutoEP", "benchmarks.experts_cpu:autoep", "deepspeed",
    "autoep_size 4, preset qwen3_moe, ZeRO stage 2, CPU accelerator over Gloo",
)  # fmt: skip


def save_model(workload: Workload, directory: Path) -> None:
    """Draw the weights of a Qwen3-MoE once and save them, with the config, where every contender loads them from."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = Qwen3MoeConfig(
        vocab_size=workload.vocabulary,
        max_position_embeddings=workload.sequence,
        hidden_size=workload.width,
        intermediate_size=4 * workload.width,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        head_dim=workload.width // workload.heads,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=EXPERT_WIDTH,
        use_cache=False,
    )
    torch.manual_seed(workload.seed)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def native(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """transformers' expert parallelism with FSDP2, as its documents show."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shared = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="all_to_all")
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa", distributed_config=shared
    )
    model.train()
    optimizer = _optimizer(model, workload)
    ids = token_ids(workload, 0).split(workload.batch // world)[rank]

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean: Tensor = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world

    return step


def autoep(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """DeepSpeed's expert parallelism, which replaces the mixtures of the model by its own."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed(dist_backend="gloo")
    _let_registry_take_names()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    config = {
        "train_micro_batch_size_per_gpu": workload.batch // world,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}},
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"enabled": True, "autoep_size": world, "preset_model": "qwen3_moe"},
    }
    groups = [{**group, "name": str(number)} for number, group in enumerate(parameter_groups(model, workload))]
    engine, *_ = deepspeed.initialize(
        model=model.train(), model_parameters=groups, config=config, dist_init_required=False
    )
    ids = token_ids(workload, 0).split(workload.batch // world)[rank]

    def step() -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _let_registry_take_names() -> None:
    """Let the registry of recorded outputs take classes' names: deepspeed 0.19 gives them, transformers 5.24 models."""
    from transformers.utils import output_capturing

    def name_of(key: Any) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    registry: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    registry.get = lambda self, key, default=None: dict.get(self, name_of(key), default) or default or {}
    registry.__setitem__ = lambda self, key, outputs: dict.__setitem__(self, name_of(key), outputs)


def _optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Fused AdamW; its kernel takes the tensors of one mesh, or plain ones, so each kind is a group of its own."""
    groups: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(parameter_groups(model, workload)):
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((number, mesh), {**group, "params": []})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=workload.learning_rate, fused=True)


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
AXIS = Axis(
    "experts",
    {"expert_parallel_degree": RANKS},
    (WHOLE, NATIVE, AUTOEP) if HAS_DEEPSPEED else (WHOLE, NATIVE),
    backend=ENGINE,
    reshard=True,
    save_model=save_model,
)


def main(arguments: Sequence[str] | None = None, axis: Axis = AXIS) -> int:
    """Run the benchmark; 1 when losses disagree or a contender did not run."""
    if not HAS_DEEPSPEED:
        print("DeepSpeed's AutoEP is left out: deepspeed is not installed")
    return parallelism_cpu.main(arguments, {axis.name: axis})


if __name__ == "__main__":
    sys.exit(main())
