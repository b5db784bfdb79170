"""The models of litgpt and torchtitan for `training_gpu`, with the weights that everyone starts from.

What is theirs is the model, the loss and what they compile; the loop around it is that of bare PyTorch, which keeps
bf16 parameters and fp32 copies. Both would train one device under autocast by themselves, which is more work. Each
function gets the config and the model of transformers, and returns the module that has the parameters and
`losses(ids [B, S]) -> mean loss`.

litgpt 0.5.9 and torchtitan 0.2.2 exclude one another's requirements: `pip install litgpt==0.5.9`, then `pip install
--no-deps torchtitan==0.2.2 && pip install torchdata tyro tensorboard datasets triton`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100  # a label that counts in neither project's loss
Losses = Callable[[Tensor], Tensor]


def litgpt(config: Any, model: nn.Module, compiled: str | None) -> tuple[nn.Module, Losses]:
    """Its GPT and its chunked loss, compiled whole, as its `pretrain` does."""
    from litgpt import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_gpt_neox, copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    theirs = _litgpt_config(config)
    weights: dict[str, Tensor] = {}
    if config.model_type == "llama":
        copy_weights_hf_llama(theirs, {}, weights, model.state_dict())
    else:
        copy_weights_gpt_neox(theirs, weights, _published_names(model.state_dict()))
    made = _filled(GPT, theirs, weights, model)
    forward = torch.compile(made) if compiled else made

    def losses(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):  # as its bf16-mixed: the loss of each chunk in fp32
            loss: Tensor = chunked_cross_entropy(forward(ids), _next(ids))
        return loss

    return made, losses


def _litgpt_config(config: Any) -> Any:
    from litgpt import Config

    common = {
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rope_base": int(config.rope_parameters["rope_theta"]),
    }
    if config.model_type == "llama":
        special = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm"}
        special |= {"norm_eps": config.rms_norm_eps, "mlp_class_name": "LLaMAMLP"}
        return Config(**common, **special, n_query_groups=config.num_key_value_heads)
    special = {"rotary_percentage": config.rope_parameters["partial_rotary_factor"], "mlp_class_name": "GptNeoxMLP"}
    return Config(**common, **special, parallel_residual=True, bias=True, norm_eps=config.layer_norm_eps)


def _published_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-NeoX's head under the name that its checkpoints have."""
    return {"embed_out.weight" if name == "lm_head.weight" else name: value for name, value in weights.items()}


def torchtitan(config: Any, model: nn.Module, compiled: str | None) -> tuple[nn.Module, Losses]:
    """Its Llama, every block and the loss compiled, as its trainer does.

    Raises:
        ValueError: another family; torchtitan has no GPT-NeoX.
    """
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    if config.model_type != "llama":
        raise ValueError(f"torchtitan has no {config.model_type}; it takes part with --families llama")
    theirs = TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        multiple_of=1,
        ffn_dim_multiplier=(config.intermediate_size + 0.5) / int(8 * config.hidden_size / 3),
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=config.max_position_embeddings,
    )
    weights = Llama3StateDictAdapter(theirs, None).from_hf(model.state_dict())
    made = _filled(Transformer, theirs, weights, model)
    summed = torch.compile(cross_entropy_loss) if compiled else cross_entropy_loss
    if compiled:
        for name, block in list(made.layers.named_children()):  # type: ignore[union-attr,operator]
            made.layers.register_module(name, torch.compile(block, fullgraph=True))  # type: ignore[union-attr,operator]

    def losses(ids: Tensor) -> Tensor:
        loss: Tensor = summed(made(ids), _next(ids))
        return loss / ids[:, 1:].numel()

    return made, losses


def _next(ids: Tensor) -> Tensor:
    """What each position is to say, nothing at the last: so no logits are cut, which would copy them."""
    return functional.pad(ids[:, 1:], (0, 1), value=IGNORED)


def _filled(kind: Any, config: Any, weights: dict[str, Tensor], model: nn.Module) -> nn.Module:
    """A model of the class `kind` with these weights as its parameters, its buffers computed where they are used."""
    device = next(model.parameters()).device
    with torch.device("meta"):
        parameters = {name for name, _ in kind(config).named_parameters()}
    with torch.device(device):
        made: nn.Module = kind(config)
    problems = made.load_state_dict({name: weights[name].clone() for name in parameters}, strict=False, assign=True)
    if problems.unexpected_keys or parameters & set(problems.missing_keys):
        raise ValueError(f"{kind.__module__}: the weights do not fit: {problems}")
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made.train()
