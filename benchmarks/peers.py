"""The peers of `training_cpu`, each written as its own documentation shows, with the settings that ran fastest here.

A builder gets (workload, directory of the saved model, rank, world) inside a worker whose Gloo group already exists,
and returns a function that runs one step and returns the rank's own loss. Every step is the same work: forward and
backward over the rank's batch, clip by the global gradient norm, AdamW. Which settings were tried is in
docs/benchmarks/training_cpu.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Contender, Step
from benchmarks.workload import Workload, load_model, parameter_groups, token_ids

FSDP2 = Contender(
    "FSDP2",
    "benchmarks.peers:fsdp2",
    "torch",
    "fully_shard on every block and the root, fused AdamW",
)
FSDP2_AT_2 = Contender(
    "FSDP2 at 2",
    "benchmarks.peers:fsdp2_at_2",
    "torch",
    "the same on a mesh of (ranks / 2, 2): sharded over every two ranks, gradients summed over all pairs",
)
DEEPSPEED = Contender(
    "DeepSpeed ZeRO-3",
    "benchmarks.peers:deepspeed_zero3",
    "deepspeed",
    "stage 3, CPU accelerator over Gloo, contiguous gradients, buckets of one block, its own CPU Adam kernel",
)
DEEPSPEED_MICS = Contender(
    "DeepSpeed MiCS at 2",
    "benchmarks.peers:deepspeed_mics",
    "deepspeed.runtime.zero.mics",
    "the same, sharded over every two ranks; DeepSpeed has it up to 0.18.9",
)
ACCELERATE = Contender(
    "Accelerate FSDP2",
    "benchmarks.peers:accelerate_fsdp2",
    "accelerate",
    "fsdp_version=2, transformer based wrap, fused AdamW",
)


def fsdp2(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Bare PyTorch: `fully_shard` on each block and on the root, which keeps its own parameters gathered."""
    return _fsdp2(workload, directory, rank, (world,))


def fsdp2_at_2(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Hybrid sharding, as MiCS does it."""
    return _fsdp2(workload, directory, rank, (world // 2, 2))


def _fsdp2(workload: Workload, directory: Path, rank: int, shape: tuple[int, ...]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replica", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = load_model(directory)
    for block in model.get_submodule("transformer.h").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=workload.reshard)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(parameter_groups(model, workload), lr=workload.learning_rate, fused=True)
    ids = token_ids(workload, rank)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def accelerate_fsdp2(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Accelerate with its FSDP2 plugin.

    Accelerate switches its FSDP support on for accelerators only: with `cpu=True` it would ignore the plugin and train
    with DDP. The two attributes of its state set below are what it sets itself on a GPU; all else is documented use.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        reshard_after_forward=workload.reshard,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if not accelerator.is_fsdp2 or accelerator.num_processes != world:
        raise RuntimeError(f"accelerate did not switch FSDP2 on: {accelerator.state!r}")
    model = load_model(directory)
    optimizer = torch.optim.AdamW(parameter_groups(model, workload), lr=workload.learning_rate, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = token_ids(workload, rank)

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def deepspeed_zero3(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """DeepSpeed on its CPU accelerator; its Adam kernel is compiled on first use (minutes, a C++ compiler, ninja)."""
    return _deepspeed(workload, directory, rank, {})


def deepspeed_mics(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Its MiCS, which gathers a block in one coalesced call. Gloo has none, so parameters are gathered in turn."""
    from deepspeed.comm.torch import TorchBackend

    TorchBackend.all_gather_coalesced = _gather_in_turn
    return _deepspeed(workload, directory, rank, {"mics_shard_size": 2})


def _gather_in_turn(
    backend: Any, outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    pairs = zip(outputs, inputs, strict=True)
    works = [dist.all_gather_into_tensor(output, own, group=group, async_op=True) for output, own in pairs]
    return SimpleNamespace(wait=lambda: [work.wait() for work in works])


def _deepspeed(workload: Workload, directory: Path, rank: int, mics: dict[str, int]) -> Step:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model, width = load_model(directory), workload.width
    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": workload.clip_norm,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            # sizes in elements; transformers' "auto" has the last two so, and the default 5e8 would be 2 GB a rank
            "reduce_bucket_size": 12 * width**2,
            "stage3_prefetch_bucket_size": int(0.9 * width**2),
            "stage3_param_persistence_threshold": 10 * width,
            # its default, 1e9, keeps every parameter of a model of this size gathered from forward to backward
            "stage3_max_reuse_distance": 0 if workload.reshard else 10**9,
            **mics,
        },
    }
    if mics:
        deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, workload), config=config, dist_init_required=False
    )
    ids = token_ids(workload, rank)

    def step() -> Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step
