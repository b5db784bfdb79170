"""`tsm.transform`: a model of transformers becomes this rank's part of it, over tensor, context and expert ranks.

It stays the model it was, with its names; FSDP then shards what is here. At degrees of 1 only dtype and device change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError, ModelError
from shardwise.job.axes import Axis, state_axes
from shardwise.job.capability import refused
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.float8 import left_out
from shardwise.plan.plan import resolve
from shardwise.smp.options import make_job
from shardwise.smp.refusals import smp_words
from shardwise.smp.v2.expert_ranks import SEED
from shardwise.smp.v2.float8 import register_float8_layers
from shardwise.smp.v2.moe.moe_config import MoEConfig
from shardwise.smp.v2.moe.router_losses import add_router_losses
from shardwise.smp.v2.session import state
from shardwise.smp.v2.split_model import restore_uncut_weights, split_model, take_weights_by_all_names
from shardwise.smp.v2.split_sequences import METHODS, split_sequences
from shardwise.smp.v2.tensor_parallel.transformer import MultiheadAttention, TransformerLayer, mark
from shardwise.training.setup import current_world

PROBED = 256  # positions of the forward that is looked at; the script's own sequences may be longer


def transform(
    model: Any,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Split `model` over tensor, context and expert ranks, in place, as `tsm.init` was told. Collective.

    Args:
        model: a causal language model of transformers, with values or on the meta device.
        device, dtype: where its parameters and buffers go, and as what. A model of which a parameter is on the meta
            device stays where it is: its values are drawn later, where FSDP asks for them.
        config: a `MoEConfig`, for a model of experts: its losses of routers, and what it may not ask for.
        load_state_dict_from_rank0: rank 0 has the values, the others are on meta; afterwards the first tensor group has
            its slices, and FSDP's `sync_module_states=True` spreads them.
        cp_comm_type: how attention reaches the rest of the sequence: `p2p` (a ring), `all_gather` or `a2a`.

    Raises:
        ConfigError: an argument or degree cannot be had.
        ModelError: the model is not of transformers.
    """
    layout = state.layout
    _check(model, config, cp_comm_type)
    model.config.use_cache = False  # recomputation would add to it a second time
    model.tie_weights()  # moving a model to the meta device parts what was tied
    weights = take_weights_by_all_names(model)
    experts = state.experts
    if load_state_dict_from_rank0:
        weights = _of_rank0(model, weights)
    length = {"data.sequence_length": min(PROBED, getattr(model.config, "max_position_embeddings", PROBED))}
    plan, facts = None, _discover(model, length)
    if layout.size(Axis.TENSOR, Axis.CONTEXT) > 1:
        values: dict[str, Any] = {
            **length,
            "parallel.expert_parallel_degree": state.ep_size,
            "parallel.tensor_parallel_degree": layout.size(Axis.TENSOR),
            "parallel.context_parallel_degree": layout.size(Axis.CONTEXT),
            "parallel.sharded_data_parallel_degree": layout.size(*state_axes()),
            "parallel.device": state.device.type,
        }
        if layout.size(Axis.CONTEXT) > 1:
            values["parallel.context_parallel_method"] = METHODS[cp_comm_type]
        with smp_words("v2", {"parallel.context_parallel_method": f"cp_comm_type={cp_comm_type!r}"}):
            plan = replace(resolve(make_job(values), current_world(state.device), facts), attention="")
    if layout.size(Axis.TENSOR) > 1 or experts is not None:
        split_model(model, facts, layout, experts, weights)
    restore_uncut_weights(model, weights)
    if plan is not None and layout.size(Axis.CONTEXT) > 1:
        split_sequences(model, plan, layout)
    if config is not None and config.smp_moe:
        vars(model)[SEED] = config.random_seed
        add_router_losses(model, facts, config, layout, state.device)
    left = left_out(facts, "", layout.size(Axis.TENSOR))
    register_float8_layers(model.get_submodule(name) for name, why in left.items() if not why)
    mark(model, [block.name for block in facts.blocks], TransformerLayer)
    mark(model, dict.fromkeys(layer.name for layer in facts.attention), MultiheadAttention)
    state.transformed = True
    return model.to(device=None if any(p.is_meta for p in model.parameters()) else device, dtype=dtype)


def _discover(model: nn.Module, length: dict[str, Any]) -> ModelFacts:
    """Return the facts of `model`, whose inputs a script splits over context ranks."""
    facts = discover(model, make_job(length))
    if facts.split_forward is None:
        return facts
    why = f"the script splits the inputs of {facts.family}, which has to see sequences whole"
    return facts.with_capabilities({Axis.CONTEXT: refused(why)})


def _check(model: nn.Module, config: Any, cp_comm_type: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"tsm.transform splits models of transformers; {type(model).__name__} is none")
    if cp_comm_type not in METHODS:
        raise ConfigError(f"tsm.transform: cp_comm_type={cp_comm_type!r} must be one of {', '.join(METHODS)}")
    if config is not None and not isinstance(config, MoEConfig):
        raise ConfigError(f"tsm.transform: config={config!r} must be a MoEConfig or None")
    if config is not None and config.smp_moe:
        config.check()
    elif config is not None and state.experts is not None:
        raise ConfigError(
            f"tsm.transform: MoEConfig.smp_moe=False leaves experts alone, and expert_parallel_degree={state.ep_size} "
            "shares them; use one of them"
        )
    if getattr(model.config, "attention_dropout", 0.0) and state.cp_size > 1:
        raise ConfigError("attention_dropout over context ranks would drop other elements; set it to 0 in the config")
    if getattr(model.config, "router_jitter_noise", 0.0) and state.tp_size > 1:
        raise ConfigError(
            "router_jitter_noise over tensor ranks would draw other noise on each; set it to 0 in the config"
        )


@torch.no_grad()
def _of_rank0(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rank 0's values on the ranks that have parts of them; the others keep what they have."""
    layout, experts = state.layout, state.experts
    group = layout.group(Axis.TENSOR) if experts is None else experts.parts()
    if 0 not in dist.get_process_group_ranks(group):
        return weights
    sent: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    shared = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = {name: shared[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}  # ties: the first name
    for name, value in weights.items():
        if names[name] == name:
            sent[name] = value.to(state.device) if layout.rank == 0 else torch.empty_like(value, device=state.device)
            dist.broadcast(sent[name], 0, group=group)
        values[name] = sent[names[name]]
    for owner in model.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            copied = buffer.to(state.device) if layout.rank == 0 else torch.empty_like(buffer, device=state.device)
            dist.broadcast(copied, 0, group=group)
            setattr(owner, leaf, copied)
    return values
