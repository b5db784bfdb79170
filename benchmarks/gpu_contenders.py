"""Who takes part in `training_gpu`: shardwise, bare PyTorch, litgpt, torchtitan; shardwise with single switches.

All train in bf16 with fp32 master weights and clip by the global norm. A builder gets (config, device, compile mode)
and returns `step(ids) -> loss`. `torch` keeps the model in bf16 and updates fp32 copies of its parameters, which is the
arithmetic of shardwise and the least work that bare PyTorch does it with; `autocast` is what most scripts do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import gpu_peers
from benchmarks.gpu_models import build, optimizer_of

IdStep = Callable[[Tensor], Tensor]
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.1, 1.0


def bare(config: Any, device: torch.device, compiled: str | None) -> IdStep:
    """bf16 model, fp32 masters, SDPA; `compiled` is None, "model" or "blocks"."""
    model = build(config, device)
    forward = _compile(model, compiled)
    return _with_masters(config, model, lambda ids: forward(input_ids=ids, labels=ids).loss)


def other(config: Any, device: torch.device, compiled: str | None, project: str) -> IdStep:
    """The model of litgpt or torchtitan, in the loop of bare PyTorch."""
    module, losses = getattr(gpu_peers, project)(config, build(config, device), compiled)
    return _with_masters(config, module, losses)


def _with_masters(config: Any, model: nn.Module, losses: Callable[[Tensor], Tensor]) -> IdStep:
    """Steps with bf16 parameters in `model` and fp32 copies of them that the optimizer updates."""
    parameters = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:  # parameters only: rotary frequencies stay fp32
        parameter.data = parameter.data.bfloat16()
    optimizer = _optimizer(config, masters)

    def step(ids: Tensor) -> Tensor:
        loss = losses(ids)
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
    optimizer = _optimizer(config, parameters)
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


CHECKPOINTED = {"activation_checkpointing": "full"}
# Name of a contender without `shardwise-` and `-compile` -> sections of its Job.
SWITCHES: dict[str, dict[str, Any]] = {
    "fp8": {"precision": {"fp8": "torchao"}},
    "fp8-rowwise": {"precision": {"fp8": "torchao", "fp8_scaling": "rowwise"}},
    "fp8-te": {"precision": {"fp8": "transformer_engine"}},
    "liger": {"model": {"liger": True}},
    "checkpointed": {"memory": CHECKPOINTED},
    "checkpointed-eager": {"memory": CHECKPOINTED, "model": {"attention": "eager"}},
    "offloaded": {"memory": {**CHECKPOINTED, "offload_activations": True}},
}


def sharded(config: Any, device: torch.device, compiled: str | None, switch: str = "") -> IdStep:
    """Shardwise on one rank, with the weights that the others draw. Its compilation is per block."""
    from benchmarks.contenders.shardwise_contender import gpu_stepper

    more = {name: dict(values) for name, values in SWITCHES.get(switch, {}).items()}
    if device.type == "cpu" and "precision" in more:  # a toy: its layers are small, and a CPU has no float8
        more["precision"] |= {"fp8": "emulate", "fp8_layers": "all"}
    if compiled is not None:
        more["model"] = {**more.get("model", {}), "compile": True}
    return gpu_stepper(config, device, (LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM), optimizer_of(config), more)


PROJECTS = ("litgpt", "torchtitan")  # functions of gpu_peers
Builder = Callable[[Any, torch.device, str | None], IdStep]
BUILDERS: dict[str, tuple[Builder, bool]] = {  # name: (builder, compiled?)
    "shardwise": (sharded, False),
    "shardwise-compile": (sharded, True),
    **{f"shardwise-{name}": (partial(sharded, switch=name), False) for name in SWITCHES},
    **{f"shardwise-{name}-compile": (partial(sharded, switch=name), True) for name in ("fp8", "fp8-rowwise")},
    "torch": (bare, False),
    "torch-compile": (bare, True),
    "autocast": (autocast, False),
    "autocast-compile": (autocast, True),
    **{name: (partial(other, project=name), False) for name in PROJECTS},
    **{f"{name}-compile": (partial(other, project=name), True) for name in PROJECTS},
}


def _optimizer(config: Any, parameters: list[Any]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind: Any = getattr(torch.optim, optimizer_of(config))
    return kind(groups, lr=LEARNING_RATE, fused=True)  # type: ignore[no-any-return]


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
