"""Training as a script of SMP version 2 does it, beside plain transformers: what the parity tests run on every rank."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import shardwise.smp.v2 as tsm
from shardwise.collectives.context import deal_chunks
from shardwise.smp.v2.delayed_param import DelayedParamIniter
from shardwise.smp.v2.grad_norm import clip_grad_norm_
from shardwise.smp.v2.moe.moe_config import MoEConfig
from shardwise.smp.v2.tensor_parallel.transformer import TransformerLayer
from tests.smp import scripts
from tests.smp.scripts import LEARNING_RATE, LENGTH, VOCABULARY, _error, batches

CLIP = 0.5


def make_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny model of two blocks, the same on every rank."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48,
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    if family == "gpt2":
        return scripts.make_model(family, dtype)
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).to(dtype)
    sizes["num_key_value_heads"] = 1 if family == "llama_1" else 2
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes)).to(dtype)
    if family == "mixtral":  # whose experts are computed in fp32 at most
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    if family == "mixtral_experts":
        sizes |= {"experts_implementation": "batched_mm"}
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)).to(dtype)
    if family == "mixtral_balanced":  # with its loss of the router, and experts that any rank may have some features of
        sizes |= {"intermediate_size": 49, "experts_implementation": "batched_mm", "output_router_logits": True}
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, router_aux_loss_coef=0.1)).to(dtype)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=family == "llama_tied")).to(dtype)


def router_losses(model: Any, config: MoEConfig) -> Callable[[Tensor], Tensor]:
    """What a forward of the whole batch adds to its loss: Megatron's losses of each layer."""

    def added(batch: Tensor) -> Tensor:
        layers = model(input_ids=batch, output_router_logits=True).router_logits
        losses = [_megatron_losses(logits, model.config.num_experts_per_tok, config) for logits in layers]
        return torch.stack(losses).sum()

    return added


def _megatron_losses(logits: Tensor, topk: int, config: MoEConfig) -> Tensor:
    """Balancing and z-loss of one layer by the formulas of Megatron's moe_utils.py; logits [tokens, experts]."""
    tokens, experts = logits.shape
    probabilities = logits.softmax(-1)
    counts = probabilities.topk(topk).indices.flatten().bincount(minlength=experts)
    even = (probabilities.sum(0) * counts).sum() * experts / (topk * tokens * tokens)
    return config.moe_aux_loss_coeff * even + config.moe_z_loss_coeff * logits.logsumexp(-1).square().mean()


def reference(
    model: nn.Module, ways: int, clip: float | None, added: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms by step, and the weights after the steps, of plain torch on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches().cpu():
        optimizer.zero_grad()
        loss = torch.stack([model(input_ids=piece, labels=piece).loss for piece in batch.chunk(ways)]).mean()
        (loss if added is None else loss + added(batch)).backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
    return losses, norms, model.state_dict()


def wrap(model: nn.Module, checkpointed: bool = False, classes: Any = (TransformerLayer,), **settings: Any) -> Any:
    """FSDP and what scripts put around blocks."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(classes))
    settings.setdefault("use_orig_params", True)
    wrapped: Any = FSDP(model, auto_wrap_policy=policy, post_param_init_fn=settings.pop("after", None), **settings)
    if checkpointed:
        reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        apply_activation_checkpointing(
            wrapped, checkpoint_wrapper_fn=reentrant, check_fn=lambda part: isinstance(part, TransformerLayer)
        )
        wrapped = offload_wrapper(wrapped) if tsm.state.sm_activation_offloading > 0 else wrapped
    return wrapped


def steps(model: Any, clip: float | None = CLIP) -> tuple[list[float], list[float]]:
    """Losses, as the mean over all ranks, and norms."""
    context, tensor = tsm.state.cp_size, tsm.state.tp_size
    ranks = tsm.state.world_size // context // tensor
    mine = tsm.state.rank // (context * tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches():
        rows = deal_chunks(batch.chunk(ranks)[mine], 1, context)[tsm.state.cp_rank]
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=rows, attention_mask=None, labels=rows)["loss"]
        loss.backward()
        norms.append(float(clip_grad_norm_(model, clip or 1e9)))
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / tsm.state.world_size)
    return losses, norms


def whole(model: Any) -> dict[str, Tensor]:
    """The whole state dict, on the ranks that have one."""
    settings = FullStateDictConfig(offload_to_cpu=True, rank0_only=True, translate_on_save=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
        found: dict[str, Tensor] = model.state_dict()
    return found


def train(options: dict[str, Any], family: str, how: str = "", **arguments: Any) -> tuple[float, float, float]:
    """Largest errors of losses, norms and weights after the steps, against plain transformers.

    `how`: words among `checkpointed`, `rank0` (values on rank 0 alone) and `flat` (no use_orig_params).
    """
    os.environ.pop("SM_HP_MP_PARAMETERS", None)
    plain = make_model(family)
    try:
        tsm.init(options)
        model = copy.deepcopy(plain)
        settings: dict[str, Any] = {"use_orig_params": "flat" not in how}
        if "rank0" in how:
            model = model if tsm.state.rank == 0 else model.to("meta")
            settings["sync_module_states"] = True
            if tsm.state.rank:
                settings["param_init_fn"] = lambda part: part.to_empty(device="cpu", recurse=False)
            arguments["load_state_dict_from_rank0"] = True
        model = tsm.transform(model, **arguments)
        if "rank0" in how:
            settings["after"] = DelayedParamIniter(model).get_post_param_init_fn()
        model = wrap(model, "ckpt" in how or "checkpointed" in how, **settings)
        losses, norms = steps(model)
        weights = whole(model)
        ways = tsm.state.world_size // tsm.state.tp_size // tsm.state.cp_size
        added = router_losses(plain, arguments["config"]) if "config" in arguments else None
        expected, their_norms, theirs = reference(plain, ways, CLIP, added)
        worst = max((_error(weights[name], value) for name, value in theirs.items() if name in weights), default=0.0)
        assert len(weights) == (len(theirs) if tsm.state.rank == 0 else len(weights))
        return (
            _error(torch.tensor(losses), torch.tensor(expected)),
            _error(torch.tensor(norms), torch.tensor(their_norms)),
            worst,
        )
    finally:
        tsm.state.reset()
