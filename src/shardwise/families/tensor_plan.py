"""Which modules of a model tensor parallelism splits, and how: transformers' own plan where a model has one.

A column module makes a part of its output features on each rank, a row module reads a part of its input features and
its partial outputs are summed (Megatron-LM, arXiv 1909.08053, section 3). What lies between them - heads, the
inner activations of an MLP - exists in parts only, so every pair begins and ends inside one module, the *region*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.families.facts import TensorSplit

PUBLISHED = {"colwise": "column", "rowwise": "row"}  # kinds of `base_model_tp_plan` that are understood here
# Of models for which transformers has no plan: module -> kind, and how many fused projections lie side by side.
OWN: dict[str, dict[str, tuple[str, int]]] = {
    "gpt2": {
        "h.*.attn.c_attn": ("column", 3),
        "h.*.attn.c_proj": ("row", 1),
        "h.*.mlp.c_fc": ("column", 1),
        "h.*.mlp.c_proj": ("row", 1),
    },
}


def tensor_plan(model: nn.Module) -> tuple[dict[str, TensorSplit], str]:
    """Module name -> how it is split, or nothing and the reason why this model cannot be."""
    if not isinstance(model, PreTrainedModel):
        return {}, "a module of model.factory says nothing about which of its layers belong together"
    family = str(model.config.model_type)
    published: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    rules = OWN.get(family) or {name: (PUBLISHED.get(kind, kind), 1) for name, kind in published.items()}
    if not rules:
        return {}, f"there is no plan for {family} yet"
    strange = sorted({kind for kind, _ in rules.values()} - {"column", "row"})
    if strange:
        return {}, f"transformers' plan for {family} asks for {', '.join(strange)}, which is not built yet"
    splits = _matched(model, rules)
    if not splits:
        return {}, f"transformers' plan for {family} names no module of this model"
    return splits, ""


def _matched(model: PreTrainedModel, rules: Mapping[str, tuple[str, int]]) -> dict[str, TensorSplit]:
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    patterns = [
        (re.compile(re.escape(base + name).replace(r"\*", r"\d+")), kind, fused)
        for name, (kind, fused) in rules.items()
    ]
    splits = {}
    for name, module in model.named_modules():
        for pattern, kind, fused in patterns:
            if pattern.fullmatch(name):
                splits[name] = _split(module, kind, fused)
    return splits


def _split(module: Any, kind: str, fused: int) -> TensorSplit:
    """`dim` is that of the weight; a Conv1D holds it transposed."""
    outputs = 1 if isinstance(module, Conv1D) else 0
    return TensorSplit(kind, outputs if kind == "column" else 1 - outputs, fused)
