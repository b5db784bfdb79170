"""The parts of a transformed model, of tensors or of experts: what is cut, a rank's part of it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.fsdp1 import clean_tensor_name
from shardwise.collectives.tensor import copy_to_region
from shardwise.job.axes import Axis
from shardwise.kernels.linear import linear
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.parallel.regions import RegionBoundary
from shardwise.parallel.tensor_map import ParameterSplit, gather_split
from shardwise.parallel.transforms.tensor import split_tensors
from shardwise.smp.v2.expert_ranks import ExpertRanks
from shardwise.smp.v2.share_experts import share_experts

CUTS = "_tensor_cuts"  # where a transformed model keeps what was cut: parameter name -> Cut
NAMES = "_names_when_cut"  # and which parameters it had then


def local_names(model: nn.Module) -> Mapping[str, ParameterSplit]:
    """Parameter name -> how it was cut, of the transformed model inside of `model`; nothing where none was."""
    for inner in model.modules():
        if CUTS in vars(inner):
            cuts: Mapping[str, ParameterSplit] = vars(inner)[CUTS]
            return cuts
    return {}


def added_names(model: nn.Module) -> list[str]:
    """Parameters that a model inside of `model` has got since it was cut, by their names in it."""
    for inner in model.modules():
        if NAMES in vars(inner):
            names = (clean_tensor_name(name) for name, _ in inner.named_parameters(remove_duplicate=False))
            return [name for name in names if name not in vars(inner)[NAMES] and not name.endswith("_flat_param")]
    return []


def split_model(
    model: nn.Module, facts: ModelFacts, layout: Layout, experts: ExpertRanks | None, weights: Mapping[str, Tensor]
) -> None:
    """Cut `model` (on the meta device) to this rank's part; of whole `weights` its slices are kept.

    Args:
        model: in which `experts`, if they are given, say among which ranks experts are shared.
        facts: of it.
        layout: where this rank stands.
        experts: None where experts are not shared.
        weights: of all names.
    """
    cuts: dict[str, ParameterSplit] = {}
    if layout.size(Axis.TENSOR) > 1:
        facts = facts.with_whole_mixers(facts.mixers)  # whose own parameters a script's FSDP would take away
        beside = replace(facts, tensor_splits=facts.splits_beside_experts(experts.degree if experts else 1))
        cuts |= split_tensors(model, beside, layout, RegionBoundary(layout.group(Axis.TENSOR)))
    if experts is not None:
        cuts |= share_experts(model, facts, experts)
    vars(model)[CUTS], vars(model)[NAMES] = cuts, frozenset(weights)
    for name, cut in cuts.items():
        module, leaf = _owner(model, name)
        if cut.copies > 1 and leaf == "weight":
            _sum_gradient(module, layout.tensor_neighbours(cut.copies))
        if not weights[name].is_meta:
            is_trained = module.get_parameter(leaf).requires_grad
            module.register_parameter(leaf, nn.Parameter(cut.local_part(weights[name]), requires_grad=is_trained))


def join_parts(
    model: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    groups: Mapping[Axis, dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Join the parts in a whole state dict, in place. Collective over the ranks of the parts.

    The `groups` of tensor parts and of experts meet on `device`, wherever the parts lie: the script may have joined its
    ranks over NCCL alone.
    """
    for name, cut in local_names(model).items():
        part = state_dict.get(prefix + name)
        if part is not None and tuple(part.shape) == cut.local_shape():
            state_dict[prefix + name] = gather_split(part.to(device), cut, groups[cut.axis]).to(part.device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _sum_gradient(module: Any, group: dist.ProcessGroup) -> None:
    """A projection that neighbours hold too, for query heads of their own: its gradient is the sum of theirs."""

    def forward(values: Tensor) -> Tensor:
        bias = None if module.bias is None else copy_to_region(module.bias, group)
        summed = SimpleNamespace(
            weight=copy_to_region(module.weight, group), bias=bias, float8=getattr(module, "float8", None)
        )
        return linear(summed, values)

    module.forward = forward


def take_weights_by_all_names(model: nn.Module) -> dict[str, Tensor]:
    """Return the values of all parameters by all their names, out of the model, whose parameters are then on meta."""
    weights: dict[str, Tensor] = {}
    blanks: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        blank = torch.empty_like(parameter.detach(), device="meta")
        blanks.setdefault(id(parameter), nn.Parameter(blank, requires_grad=parameter.requires_grad))
        weights[name] = parameter.detach()
        owner, leaf = _owner(model, name)
        owner.register_parameter(leaf, blanks[id(parameter)])
    return weights


def restore_uncut_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put the values back into parameters that were not cut; ties stay ties, and what was on meta stays there."""
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        value = weights[name]
        if name in local_names(model) or value.is_meta:
            continue
        parameters.setdefault(id(parameter), nn.Parameter(value, requires_grad=parameter.requires_grad))
        owner, leaf = _owner(model, name)
        owner.register_parameter(leaf, parameters[id(parameter)])
