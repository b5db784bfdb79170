"""Models of `training_gpu`: Llama- and GPT-NeoX-shaped, about 0.5, 1 and 3 billion parameters, and toys for a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int


# 1B and 3B are the sizes of Llama-3.2-1B and -3B with a vocabulary of 32000 and an untied head, and of Pythia-1b (with
# heads of 128) and -2.8b; 0.5B is made to fit between. 13B-10L has 10 of the 40 layers of a GPT-NeoX of 13B: there
# FlashAttention's gain is looked at.
SHAPES: dict[tuple[str, str], Shape] = {
    ("llama", "0.5B"): Shape(1280, 20, 20, 20, 3840, 32000),
    ("llama", "1B"): Shape(2048, 16, 32, 8, 8192, 32000),
    ("llama", "3B"): Shape(3072, 28, 24, 8, 8192, 32000),
    ("neox", "0.5B"): Shape(1280, 20, 20, 20, 5120, 50304),
    ("neox", "1B"): Shape(2048, 16, 16, 16, 8192, 50304),
    ("neox", "3B"): Shape(2560, 32, 32, 32, 10240, 50304),
    ("neox", "13B-10L"): Shape(5120, 10, 40, 40, 20480, 50304),
    ("llama", "toy"): Shape(64, 2, 4, 2, 128, 256),
    ("neox", "toy"): Shape(64, 2, 4, 4, 256, 256),
}
FAMILIES = ("llama", "neox")
SIZES = ("0.5B", "1B", "3B", "13B-10L")
WITHOUT_STATE = 5120  # width from which weights are updated by SGD: Adam's state would not fit beside them into 40 GB


def optimizer_of(config: Any) -> str:
    """Class in torch.optim with which every contender trains a model."""
    return "SGD" if config.hidden_size >= WITHOUT_STATE else "AdamW"


def model_config(family: str, size: str, sequence: int) -> Any:
    """The transformers config, without dropout and without a key-value cache."""
    from transformers import GPTNeoXConfig, LlamaConfig

    shape = SHAPES[family, size]
    common: dict[str, Any] = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": sequence,
        "use_cache": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family == "llama":
        return LlamaConfig(num_key_value_heads=shape.key_value_heads, **common)
    return GPTNeoXConfig(attention_dropout=0.0, hidden_dropout=0.0, **common)


def build(config: Any, device: torch.device, seed: int = 0) -> nn.Module:
    """The model in fp32, drawn on `device`; the same numbers for every contender."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def flops_per_token(model: nn.Module, config: Any, sequence: int) -> float:
    """Model FLOPs 6·P + 6·L·s·h of one token, forward and backward; P leaves out the input embedding.

    Attention is 12·L·s·h (PaLM, arXiv 2204.02311, appendix B), of which a causal mask leaves half.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    parameters = sum(parameter.numel() for parameter in model.parameters()) - embedding.weight.numel()
    return 6.0 * parameters + 6.0 * config.num_hidden_layers * sequence * config.hidden_size
