"""Tells by a trial whether experts can be split by their inner features, as an MLP is.

A module of experts is run with a few small weights, once whole and once in two parts of its inner features. The parts
add up to the whole where an expert is a pair of stacks, (gate, up) and down, with elementwise arithmetic between them;
not where gate and up lie in turns, or where a norm looks at all inner features.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.tensor_split import EXPERTS

HIDDEN, FEATURES, TOKENS, CHOSEN = 6, 4, 5, 2
INNER = ("intermediate_dim", "intermediate_size")  # attributes of experts that say how wide a part is


def adds_up_over_features(experts: nn.Module) -> bool:
    """Return whether parts of the inner features of `experts`, stacks on the meta device, add up to the whole."""
    number = len(next(experts.parameters()))
    draw = torch.Generator().manual_seed(0)
    stacks = {
        "gate_up_proj": torch.randn(number, 2 * FEATURES, HIDDEN, generator=draw, dtype=torch.float64),
        "down_proj": torch.randn(number, HIDDEN, FEATURES, generator=draw, dtype=torch.float64),
    }
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    index = torch.arange(TOKENS * CHOSEN).view(TOKENS, CHOSEN) % number
    weights = torch.rand(TOKENS, CHOSEN, generator=draw, dtype=torch.float64)
    try:
        whole = _small(experts, stacks)(hidden, index, weights)
        parts = [_small(experts, _part(stacks, half))(hidden, index, weights) for half in (0, 1)]
    except Exception:  # any code may run in a model's forward
        return False
    return torch.allclose(parts[0] + parts[1], whole, rtol=1e-9, atol=1e-9)


def _part(stacks: dict[str, Tensor], half: int) -> dict[str, Tensor]:
    """Return one half of the inner features of each stack."""
    cut = {}
    for name, stack in stacks.items():
        split = EXPERTS[name]
        sections = stack.chunk(split.sections, split.dim)
        cut[name] = torch.cat([section.chunk(2, split.dim)[half] for section in sections], split.dim)
    return cut


def _small(experts: Any, stacks: dict[str, Tensor]) -> Any:
    """Return the forward of `experts`, as they compute without grouped products, with other stacks."""
    small = copy.copy(experts)
    hidden = experts.gate_up_proj.shape[2]
    vars(small)["_parameters"] = {name: nn.Parameter(stack, requires_grad=False) for name, stack in stacks.items()}
    for name in [name for name, value in vars(experts).items() if value == hidden and isinstance(value, int)]:
        setattr(small, name, HIDDEN)
    for name in [name for name in INNER if hasattr(experts, name)]:
        setattr(small, name, stacks["down_proj"].shape[2])
    return inspect.unwrap(type(experts).forward).__get__(small)
