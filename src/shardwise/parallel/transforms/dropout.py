"""Dropout whose masks are equal on every layout (kernels/dropout.py)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.kernels.dropout import name_functional_dropout, replace_dropout
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, StageBuilder, Transform
from shardwise.plan.plan import Plan


class LayoutIndependentDropout(Transform):
    """Modules and functional calls of dropout by masks that depend on seed, step, name and global index alone."""

    name = "dropout"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        plan, facts = inputs.plan, inputs.facts
        is_functional = facts.has_functional_dropout or (bool(plan.attention) and facts.has_attention_dropout)
        for stage in build.stages:
            replace_dropout(stage.model)
            if is_functional or facts.may_draw:
                _name_calls(stage, facts)


def _name_calls(stage: StageBuilder, facts: ModelFacts) -> None:
    names = [name for name in facts.counting if stage.holds(name) and not facts.stages.traced]
    if facts.may_draw and not facts.stages.traced:
        names += [name for name in _outside_blocks(stage.model, facts) if name not in names]
    name_functional_dropout([stage.model.get_submodule(name) for name in names], names)


def _outside_blocks(model: nn.Module, facts: ModelFacts) -> Iterator[str]:
    """Yield the modules of no block that have a forward: where a stage does not run one, what follows draws alike."""
    blocks = tuple(f"{block.name}." for block in facts.blocks)
    for name, module in model.named_modules():
        if name and not f"{name}.".startswith(blocks) and type(module).forward is not nn.Module.forward:
            yield name
