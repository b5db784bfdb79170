"""The oracle's Muon: whole matrices in one process, with AdamW beside it. Which matrices there are is written again.

In 16 bits the iterations are torch's own function; torch rounds to bf16 whatever it is given, so that in wider jobs
they are written out from arXiv 2409.20325 and Keller Jordan's post.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwise._torch_compat.optimizers import zeropower_via_newtonschulz

IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")  # a numbered module of a list
ROUTERS = ("gate", "router", "shared_expert_gate")


class Projections(NamedTuple):
    """Layout of the projections of a weight: by what rule, along which dim, and of how many query and key heads."""

    kind: str
    dim: int = 0
    queries: int = 0  # that a key head serves
    groups: int = 0  # key heads


class Muon(torch.optim.Optimizer):
    """Every parameter is a group of its own, whose `projections` name how the matrices in it lie."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.dtype = dtype
        options: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
        }
        options |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        options["nesterov"] = nesterov
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(group, weight)

    def _update(self, group: Mapping[str, Any], weight: nn.Parameter) -> None:
        mu, gradient, state = group["momentum"], weight.grad, self.state[weight]
        assert gradient is not None
        # torch's operators: bf16 iterations make much of the last bit where singular values are small.
        state["momentum_buffer"] = torch.lerp(state.get("momentum_buffer", torch.zeros_like(weight)), gradient, 1 - mu)
        momentum = state["momentum_buffer"]
        direction = torch.lerp(gradient, momentum, mu) if group["nesterov"] else momentum
        moves = _apart(direction, group["projections"], lambda matrix: self._move(group, matrix))
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * moves)

    def _move(self, group: Mapping[str, Any], matrix: Tensor) -> Tensor:
        coefficients, steps, eps = group["ns_coefficients"], group["ns_steps"], group["eps"]
        rows, columns = matrix.shape
        is_adamw_like = group["adjust_lr_fn"] == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, columns)) if is_adamw_like else math.sqrt(max(1, rows / columns))
        if self.dtype == torch.bfloat16:
            rounded: Tensor = zeropower_via_newtonschulz(matrix.clone(), tuple(coefficients), steps, eps)
            return factor * rounded.to(matrix.dtype)
        a, b, c = coefficients
        x = matrix.to(self.dtype)
        x = x / max(float(x.norm()), eps)
        for _ in range(steps):
            square = x @ x.T if rows <= columns else x.T @ x
            polynomial = b * square + c * square @ square
            x = a * x + (polynomial @ x if rows <= columns else x @ polynomial)
        return factor * x.to(matrix.dtype)


class Several(torch.optim.Optimizer):
    """Optimizers of which each steps some of the parameters; groups and state are of all of them."""

    def __init__(self, members: Sequence[tuple[torch.optim.Optimizer, Sequence[int]]]) -> None:
        self.members = members
        groups = {place: group for made, own in members for place, group in zip(own, made.param_groups, strict=True)}
        super().__init__([{"params": groups[place]["params"]} for place in sorted(groups)], {})
        self.param_groups = [groups[place] for place in sorted(groups)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for made, places in self.members:
            made.param_groups = [self.param_groups[place] for place in places]
            made.state = self.state
            made.step()


def is_hidden(model: nn.Module, name: str) -> bool:
    """Return whether a parameter is one of Muon's: linear layers of blocks, adapters of these, stacks of experts."""
    module, _, leaf = name.rpartition(".")
    parameter, holder = model.get_parameter(name), model.get_submodule(module)
    if parameter.dim() < 2 or min(parameter.shape[-2:]) < 2 or not IN_A_BLOCK.search(name):
        return False
    if parameter.dim() == 3:
        return True
    is_linear = isinstance(holder, nn.Linear | Conv1D) and leaf == "weight"
    return ".lora_" in name or (is_linear and module.rpartition(".")[2] not in ROUTERS)


def projections(model: nn.Module, name: str) -> Projections:
    """Return how a parameter's projections lie."""
    config: Any = getattr(model, "config", None)
    *_, owner, leaf = ["", *name.split(".")]
    parameter = model.get_parameter(name)
    if parameter.dim() == 3:
        return Projections("halves" if leaf == "gate_up_proj" else "", 1)
    dim = int(isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D))
    if owner == "c_attn" and getattr(config, "multi_query", False):  # GPT-BigCode: one key and one value head
        return Projections("side by side", dim, config.num_attention_heads, 1)
    if owner == "c_attn":
        return Projections("thirds", dim)
    if owner == "gate_up_proj":
        return Projections("halves", dim)
    if owner == "query_key_value":
        heads = config.num_attention_heads
        served = getattr(config, "num_kv_heads", None) if getattr(config, "new_decoder_architecture", False) else None
        groups = served or (1 if getattr(config, "multi_query", False) else heads)
        return Projections("groups", dim, heads // groups, groups)
    if owner == "qkv_proj":
        key_heads = config.num_key_value_heads
        return Projections("side by side", dim, config.num_attention_heads // key_heads, key_heads)
    return Projections("", dim)


def _apart(whole: Tensor, layout: Projections, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the moves of all matrices in a tensor, each made by itself."""
    kind, dim, queries, groups = layout
    if whole.dim() == 3:
        return torch.stack([_apart(expert, Projections(kind, dim - 1), move) for expert in whole])
    if kind == "groups":
        grouped = whole.view(groups, queries + 2, -1, whole.shape[1])
        own = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
        moved = [move(part.reshape(-1, whole.shape[1])).view(part.shape) for part in own]
        return torch.cat(moved, 1).reshape(whole.shape)
    if kind == "side by side":
        unit = whole.shape[dim] // (queries + 2)
        return torch.cat([move(part) for part in whole.split([queries * unit, unit, unit], dim)], dim)
    count = {"thirds": 3, "halves": 2}.get(kind, 1)
    return torch.cat([move(part) for part in whole.chunk(count, dim)], dim)
