"""Who takes part in `training_gpu`: shardwise and bare PyTorch, each eager and compiled.

All train in bf16 with fp32 master weights and clip by the global norm. A builder gets (config, device, compile mode)
and returns `step(ids) -> loss`. `torch` keeps the model in bf16 and updates fp32 copies of its parameters, which is the
arithmetic of shardwise and the least work that bare PyTorch does it with; `autocast` is what most scripts do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_models import build

IdStep = Callable[[Tensor], Tensor]
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.1, 1.0


def bare(config: Any, device: torch.device, compiled: str | None) -> IdStep:
    """bf16 model, fp32 masters, SDPA; `compiled` is None, "model" or "blocks"."""
    model = build(config, device)
    parameters = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:  # parameters only: rotary frequencies stay fp32
        parameter.data = parameter.data.bfloat16()
    optimizer = _adamw(masters)
    forward = _compile(model, compiled)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        for master, parameter in zip(masters, parameters):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_([*parameters], masters)
        return loss.detach()

    return step


def autocast(config: Any, device: torch.device, compiled: str | None) -> IdStep:
    """fp32 model under `torch.autocast`."""
    model = build(config, device)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)
    forward = _compile(model, compiled)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def sharded(config: Any, device: torch.device, compiled: str | None) -> IdStep:
    """Shardwise on one rank, with the weights that the others draw. Its compilation is per block."""
    from benchmarks.contenders.shardwise_contender import gpu_stepper

    return gpu_stepper(config, device, compiled is not None, (LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM))


Builder = Callable[[Any, torch.device, str | None], IdStep]
BUILDERS: dict[str, tuple[Builder, bool]] = {  # name: (builder, compiled?)
    "shardwise": (sharded, False),
    "shardwise-compile": (sharded, True),
    "torch": (bare, False),
    "torch-compile": (bare, True),
    "autocast": (autocast, False),
    "autocast-compile": (autocast, True),
}


def _adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def _compile(model: nn.Module, how: str | None) -> Callable[..., Any]:
    """The model's forward: as it is, compiled whole, or with every block compiled by itself."""
    if how == "model":
        compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
        return compiled
    if how == "blocks":
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        for block in max(lists, key=len):
            block.compile(dynamic=False)
    return model
