"""Toy jobs and modules that the tests of this room share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.job.schema import Job
from shardwise.testing.toy_configs import SIZES, toy_config

# Sizes that several types name alike, for configs that a test writes itself.
WIDE = {
    name: SIZES[name]
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        "max_position_embeddings",
    )
}
GROUPED = {**WIDE, "num_key_value_heads": 2, "head_dim": 8}
GPT = {name: SIZES[name] for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")}
MODEL_TYPES = (
    *("gpt2", "gpt_neox", "gptj", "gpt_neo", "bert", "roberta", "bloom", "opt"),
    *("llama", "mistral", "qwen3", "gemma", "gemma2", "falcon"),
)
CONFIGS = {model_type: toy_config(model_type) for model_type in MODEL_TYPES} | {
    "falcon": toy_config("falcon", num_kv_heads=4, ffn_hidden_size=128)
}
MASKED = ("bert", "roberta")


def job(
    model_type: str, *, data: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **model: Any
) -> Job:
    """A job whose model is the toy of `model_type`; `config` adds to its values, `model` to the model section."""
    values = {**CONFIGS[model_type], **(config or {})}
    task = "masked_lm" if model_type in MASKED else "causal_lm"
    return Job.model_validate({"model": {"config": values, "task": task, **model}})


def factory_job(name: str, **model: Any) -> Job:
    """A job whose model comes from the function `name` of this module."""
    return Job.model_validate({"model": {"factory": f"{__name__}:{name}", **model}})


class Block(nn.Module):
    """A residual block, with dropout by a module or by a function."""

    def __init__(self, width: int, dropout: float = 0.0, functional: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.functional = functional
        self.dropout: nn.Module | float = dropout if functional else nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        if isinstance(self.dropout, float):
            return x + nn.functional.dropout(y, self.dropout, self.training)
        return x + self.dropout(y)


class Tower(nn.Module):
    """Takes `x` [B, S, H] instead of tokens; its buffer has values, two names are one parameter."""

    def __init__(self, width: int = 8, layers: int = 3, own_scales: bool = False, **block: Any) -> None:
        super().__init__()
        self.scales = nn.Buffer(torch.arange(float(layers)))
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.readout = nn.Linear(width, width, bias=False)
        self.mirror = self.readout.weight
        self.own_scales = own_scales

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, self.scales[index] if self.own_scales else self.scales)
        return self.readout(x) @ self.mirror


class Tokens(nn.Module):
    """Takes `input_ids` and reads its embedding by a matrix product without a tied module."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.places = nn.Embedding(20, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        return self.blocks(x) @ self.words.weight.T


def tower(**arguments: Any) -> nn.Module:
    return Tower(**arguments)


def tokens() -> nn.Module:
    return Tokens()


def without_norms() -> nn.Module:
    """The same, with blocks whose two biases have different lengths."""
    model = Tokens()
    model.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 13), nn.Linear(13, 16)) for _ in range(2)))
    return model


def twice_registered() -> nn.Module:
    """One parameter object, registered twice from a local variable."""
    module = nn.Module()
    weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    module.left, module.right = weight, weight
    return module


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


def buffer_without_values() -> nn.Module:
    module = nn.Linear(4, 4)
    module.copy = nn.Buffer(torch.empty(4))
    return module


def raises() -> nn.Module:
    raise RuntimeError("no such luck")


def no_module() -> int:
    return 3


def no_parameters() -> nn.Module:
    return nn.ReLU()


not_callable = 3
