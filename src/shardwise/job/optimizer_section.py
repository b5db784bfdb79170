"""The `optimizer` section of a Job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.job.section import Section
from shardwise.job.values import Fraction, NonNegative, NonNegativeNumber, OwnObject, Pattern, Positive

ScheduleName = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "warmup_stable_decay", "inverse_sqrt", "piecewise"
]


class ParameterGroup(Section):
    """Parameters with a learning rate, weight decay or optimizer of their own."""

    parameters: Annotated[list[Pattern], Field(min_length=1)] = Field(
        description="Regular expressions, each matched against the whole name of a parameter or of a module that holds "
        "it, such as `model.embed_tokens` or `.*lora_B.*`."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        strict=True,
        description="Peak, reached by the same schedule; unset: `optimizer.learning_rate`.",
    )
    weight_decay: float | None = Field(
        default=None, ge=0, strict=True, description="Of tensors of two or more dims; unset: `optimizer.weight_decay`."
    )
    optimizer: str | None = Field(default=None, description="Class, as `optimizer.name`; unset: the job's.")
    options: dict[str, Any] | None = Field(
        default=None,
        description="Further keyword arguments of the class; unset: `optimizer.options` where it is the job's own.",
    )


class AdamWSection(Section):
    """AdamW of what Muon leaves: embeddings, heads, norms, biases, routers."""

    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak, reached by the same schedule; unset: `optimizer.learning_rate`."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Of tensors of two or more dims; unset: `optimizer.weight_decay`."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of AdamW, e.g. `betas: [0.9, 0.95]`."
    )


class OptimizerSection(Section):
    """The optimizer and its learning-rate schedule."""

    name: str = Field(
        default="AdamW",
        description="Optimizer of this package such as `AdamW8bit`, class in `torch.optim`, or `package.module:name` "
        "of your own.",
    )
    learning_rate: float = Field(default=3e-3, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Applied to tensors of two or more dims; 0 for the others, and for a class without it (Rprop).",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the class, e.g. `betas: [0.9, 0.95]`."
    )
    groups: list[ParameterGroup] = Field(
        default=[],
        description="Parameters with a learning rate, weight decay or optimizer of their own; no parameter is in two "
        "groups, and those in none have the keys above.",
    )
    adamw: AdamWSection = Field(
        default_factory=AdamWSection, description="What Muon does not orthogonalize is updated by AdamW."
    )
    schedule: ScheduleName | OwnObject = Field(
        default="cosine",
        description="Shape after warm-up, by transformers' names; or `package.module:function` of your own, called "
        "with (step, steps) for each step from 0, which returns the learning rate as a factor of `learning_rate`, its "
        "warm-up included.",
    )
    warmup_steps: Literal["auto"] | NonNegative = Field(
        default="auto", description="Steps of linear warm-up; `auto`: a sixth of the steps, at most 2000."
    )
    warmup_ratio: Fraction | None = Field(
        default=None,
        description="Share of the steps that are warm-up, rounded up, in the place of `warmup_steps`; of a run in "
        "epochs too.",
    )
    final_learning_rate_ratio: Fraction = Field(default=0.1, description="Last learning rate as a share of the peak.")
    decay_steps: Positive | None = Field(
        default=None,
        description="Last steps of `warmup_stable_decay`, in which the rate falls from the peak; unset: a tenth. A run "
        "that goes on from any checkpoint of the stable part may have other `training.steps`.",
    )
    decay_type: Literal["linear", "cosine", "1-sqrt"] = Field(
        default="linear", description="How the rate of `warmup_stable_decay` falls (`1-sqrt`: arXiv 2405.18392)."
    )
    cycles: Positive = Field(default=2, description="Times that `cosine_with_restarts` falls from the peak.")
    milestones: dict[NonNegative, NonNegativeNumber] = Field(
        default={},
        description="Of `piecewise`: step -> factor of the peak from that step on, as `{1000: 0.3, 2000: 0.1}`.",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Clip by the global gradient norm; null switches it off."
    )
