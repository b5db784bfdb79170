"""The oracle's own optimizers of the names that torch lacks: one process, whole tensors, plain loops.

Written from the papers and from the packages whose names they have: bitsandbytes and torchao (8 bits), and Facebook's
schedulefree. Adafactor is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.testing.oracle_muon import Muon


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, weight, gradient, state in _with_gradients(self):
            beta1, beta2 = group["betas"]
            moment = state.setdefault("exp_avg", torch.zeros_like(weight))
            direction = torch.sign(beta1 * moment + (1 - beta1) * gradient)
            weight -= group["lr"] * (direction + group["weight_decay"] * weight)
            state["exp_avg"] = beta2 * moment + (1 - beta2) * gradient


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """arXiv 2405.15682, algorithm 1, with x, y and z all kept; parameters are y, and x while they are `averaged`."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"r": r, "weight_lr_power": weight_lr_power})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, weight, gradient, state in _with_gradients(self):
            beta1, beta2 = group["betas"]
            if not state:
                state |= {"z": weight.clone(), "x": weight.clone(), "exp_avg_sq": torch.zeros_like(weight)}
                state |= {"step": 0, "largest": 0.0, "total": 0.0}
            state["step"] += 1
            state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient**2
            unbiased = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            move = gradient / (unbiased.sqrt() + group["eps"]) + group["weight_decay"] * weight
            state["z"] = state["z"] - group["lr"] * move
            state["largest"] = max(state["largest"], group["lr"])
            importance = state["step"] ** group["r"] * state["largest"] ** group["weight_lr_power"]
            state["total"] += importance
            share = importance / state["total"] if state["total"] else 0.0
            state["x"] = (1 - share) * state["x"] + share * state["z"]
            weight.copy_((1 - beta1) * state["z"] + beta1 * state["x"])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let parameters be x inside."""
        kept = [(weight, weight.detach().clone(), state["x"]) for weight, state in self.state.items()]
        for weight, _, average in kept:
            weight.data.copy_(average)
        yield
        for weight, training, _ in kept:
            weight.data.copy_(training)


class AdamWWithKept(torch.optim.Optimizer):
    """AdamW whose moments are rounded when they are kept: to bf16, or to codes of 8 bits with a scale a block."""

    betas = (0.9, 0.999)

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        block_size: int = 256,
    ) -> None:
        betas = self.betas if betas is None else betas
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"block_size": block_size})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, weight, gradient, state in _with_gradients(self):
            beta1, beta2 = group["betas"]
            state["step"] = state.get("step", 0) + 1
            zeros = torch.zeros_like(weight)
            first = state.get("exp_avg", zeros) * beta1 + gradient * (1 - beta1)
            second = state.get("exp_avg_sq", zeros) * beta2 + gradient.square() * (1 - beta2)
            state["exp_avg"] = self.kept(first, True, group["block_size"])
            state["exp_avg_sq"] = self.kept(second, False, group["block_size"])
            corrections = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
            divisor = second.sqrt() / math.sqrt(corrections[1]) + group["eps"]
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(first * (group["lr"] / corrections[0]) / divisor)

    def kept(self, moment: Tensor, signed: bool, block_size: int) -> Tensor:
        """Return a moment as the next step finds it."""
        return moment.bfloat16().to(moment.dtype)


class AdamWBf16(AdamWWithKept):
    """Moments in bf16, and betas that move them."""

    betas = (0.9, 0.95)


class AdamW8bit(AdamWWithKept):
    """Moments as codes of a dynamic map; arXiv 2110.02861, section 2."""

    def kept(self, moment: Tensor, signed: bool, block_size: int) -> Tensor:
        """Return what the nearest values of the map stand for, block by block of each row."""
        values = torch.tensor(dynamic_values(signed))
        return _by_blocks(moment, block_size, lambda block, largest: _nearest(block / largest, values) * largest)


class AdamWFp8(AdamWWithKept):
    """Moments in float8 with four bits of exponent, the largest of a block at 448."""

    def kept(self, moment: Tensor, signed: bool, block_size: int) -> Tensor:
        """Return what float8 makes of them, block by block of each row."""

        def rounded(block: Tensor, largest: Tensor) -> Tensor:
            scale = (largest.float() / 448).to(block.dtype)
            return (block / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).to(block.dtype) * scale

        return _by_blocks(moment, block_size, rounded)


PLAIN: dict[str, type[torch.optim.Optimizer]] = {
    "Muon": Muon,
    "AdamW8bit": AdamW8bit,
    "AdamWFp8": AdamWFp8,
    "AdamWBf16": AdamWBf16,
    "Adafactor": torch.optim.Adafactor,
    "Lion": Lion,
    "ScheduleFreeAdamW": ScheduleFreeAdamW,
}


def dynamic_values(signed: bool) -> list[float]:
    """bitsandbytes' create_dynamic_map with seven bits of exponent: means of even intervals in each decade."""
    values = [0.0, 1.0]
    for decade in range(-6, 1):
        intervals = 2 ** (decade + 6) * (1 if signed else 2)
        edges = [0.1 + 0.9 * number / intervals for number in range(intervals + 1)]
        for low, high in pairwise(edges):
            mean = (low + high) / 2 * 10.0**decade
            values += [mean, -mean] if signed else [mean]
    return sorted(values)


def _by_blocks(moment: Tensor, size: int, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Round block by block along the last dim; as it is where tensors are small or have no rows worth a scale."""
    if moment.dim() < 2 or moment.numel() < 4096 or moment.shape[-1] < 64:
        return moment
    blocks = []
    for block in moment.split(size, dim=-1):
        largest = block.abs().max(-1, keepdim=True).values.float().clamp(min=1e-12).to(moment.dtype)
        blocks.append(rounded(block, largest))
    return torch.cat(blocks, -1)


def _nearest(parts: Tensor, values: Tensor) -> Tensor:
    """Return the nearest of ascending values; of two that are as near, the greater."""
    borders = (values[:-1] + values[1:]) / 2
    above = torch.searchsorted(borders.to(parts.dtype), parts.contiguous(), right=True)
    return values.to(parts.dtype)[above]


def _with_gradients(optimizer: torch.optim.Optimizer) -> Any:
    """Yield (group, weight, gradient, state) of every parameter with a gradient."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                assert isinstance(weight, nn.Parameter)
                yield group, weight, weight.grad, optimizer.state[weight]
