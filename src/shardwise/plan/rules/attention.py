"""Rules about attention kernels: the one asked for can compute what every layer needs."""

from __future__ import annotations

from shardwise.job.attention_kernels import KERNELS, kernel_named
from shardwise.model.attention_choice import kernel_supports, kernels_for
from shardwise.model.facts import AttentionFacts
from shardwise.plan.draft import Draft
from shardwise.plan.rules.context import context_method
from shardwise.plan.rules.model import model_from_factory
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import one_of


def _refused_layer(d: Draft) -> AttentionFacts | None:
    return next((layer for layer, choice in d.attention_choices if choice is None), None)


def _kernel_reason(d: Draft) -> str:
    layer = _refused_layer(d)
    assert layer is not None
    if d.model.attention == "auto":
        return f"no kernel can do what {layer.name} needs"
    capability = kernel_supports(kernel_named(d.model.attention), d.attention_needs(layer))
    return f"{layer.name}: {capability.reason}"


def _possible_kernels(d: Draft) -> list[str]:
    of_layers = [set(kernels_for(d.attention_needs(layer))) for layer in d.facts.attention]
    return ["auto", *(kernel.name for kernel in KERNELS if all(kernel.name in names for names in of_layers))]


def _widens(d: Draft) -> bool:
    """Return whether attention that is called eager sums its scores in fp32: some families' own, and a ring's."""
    return d.facts.fp32_scores or context_method(d) == "ring"


# fmt: off
RULES: tuple[Rule, ...] = (
    idle("factory-attention", "model.attention", "a module of model.factory has no config in which to set it",
          model_from_factory, "use auto and set it in the factory"),
    Rule("attention-family", ("model.attention",), "kernels are chosen for the families whose attention they compute",
         lambda d: d.model.attention not in ("auto", "eager", "sdpa") and not d.facts.attention_kernels.ok,
         fix="use auto, sdpa or eager",
         because=lambda d: d.facts.attention_kernels.reason),
    Rule("attention-kernel", ("model.attention",), "the kernel has to be there, and to do what every layer needs",
         lambda d: _refused_layer(d) is not None,
         fix="use auto",
         because=lambda d: _kernel_reason(d),
         use=lambda d: f"use {one_of(_possible_kernels(d))}"),
    Rule("attention-overflow", ("model.attention", "precision.compute"), "scores of fp16 are summed in fp32",
         lambda d: d.compute == "fp16" and d.model.attention == "eager" and not _widens(d),
         fix="use model.attention auto or sdpa, or precision.compute bf16",
         because=lambda d: f"{d.facts.family}'s eager attention keeps scores in fp16, where they overflow above 65504"),
)
# fmt: on
