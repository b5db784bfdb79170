"""Finds the modules of a model that tensor parallelism splits, and how: by its family's record or transformers' plan.

A model of images and text has the plan of its language model.

A column module makes a part of its output features on each rank, a row module reads a part of its input features and
its partial outputs are summed (Megatron-LM, arXiv 1909.08053, section 3). What lies between them - heads, the
inner activations of an MLP - exists in parts only, so every pair begins and ends inside one module, the *region*.
Stacked experts are a region by themselves: what the router gives them enters it, and the router stays outside, whole.

A linear layer of the blocks that is in no region is split by its outputs, and these are gathered at once (transformers'
`colwise_gather_output`). Nothing between such layers is cut, so that it takes no more than the layers themselves;
activations stay whole.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.job.capability import SUPPORTED, Capability, refused, unless
from shardwise.model.expert_features import adds_up_over_features
from shardwise.model.experts import BATCHED, LOOPED, is_routed
from shardwise.model.family import Family, SplitRules
from shardwise.model.latent_attention import latent_attention
from shardwise.model.modules import input_embeddings
from shardwise.model.registry import family_of
from shardwise.model.routers import find_routers
from shardwise.model.split_rules import COLUMN, ROW
from shardwise.model.tensor_split import EXPERTS, TensorSplit

# Styles of `base_model_tp_plan` that are understood here.
PUBLISHED = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_gather_output": TensorSplit("gathered"),
    "rowwise_split_input": TensorSplit("gathered"),  # its input is whole, so that outputs can be cut as well
    "replicated_with_grad_allreduce": TensorSplit("partial"),
    "mla_kv_a_proj": TensorSplit("partial"),  # and what stands beside it, by `latent_attention`
    "moe_tp_experts": TensorSplit("experts"),
}
WHOLE = "replicate"  # transformers' style of what is not split
# How transformers' plans speak of the parameters of experts, where these are stacked as `EXPERTS` says.
STACKED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
UNGROUPED = (LOOPED, BATCHED)  # transformers' implementations that take rows of any size
# Modules beside experts that score them for each position by itself.
ROUTERS = ("gate", "shared_expert_gate")
FEWEST_OUTPUTS = 16  # of a linear layer that is worth sending its outputs
# Names of projections of keys or values alone, with or without a plan of transformers'.
KEY_VALUE = ("k_proj", "v_proj", "key", "value")


def tensor_plan(model: nn.Module) -> tuple[dict[str, TensorSplit], Capability]:
    """Return how each module is split, by name, and whether the model can be split; of one that cannot no module is."""
    if not isinstance(model, PreTrainedModel):
        return {}, refused("a module of model.factory says nothing about which of its layers belong together")
    name = planned_part(model)
    part: Any = model.get_submodule(name)
    splits, capability = _own_plan(part)
    return {f"{name}.{module}" if name else module: split for module, split in splits.items()}, capability


def planned_part(model: PreTrainedModel) -> str:
    """Return the part whose plan is the model's: the language model of one that has none itself; else the whole, ""."""
    config: Any = model.config
    text = config.get_text_config()
    if text is config or not _has_no_plan(model):
        return ""
    parts = (name for name, part in model.named_modules() if isinstance(part, PreTrainedModel) and part.config is text)
    return next(parts, "")


def _has_no_plan(model: PreTrainedModel) -> bool:
    return family_of(str(model.config.model_type)).tensor_splits is None and not _published(model)


def _own_plan(model: PreTrainedModel) -> tuple[dict[str, TensorSplit], Capability]:
    family, published = family_of(str(model.config.model_type)), _published(model)
    obstacle = next(_plan_obstacles(model, family), "")
    if obstacle:
        return {}, refused(obstacle)
    rules = family.tensor_splits or {name: PUBLISHED[style] for name, style in published.items()}
    splits = _without_other_experts(model, _with_latent_attention(model, _matched(model, rules)))
    if family.refine_splits is not None:
        splits = family.refine_splits(model.config, splits)
    obstacle = next(_split_obstacles(model, splits), "")
    return ({}, refused(obstacle)) if obstacle else (splits, SUPPORTED)


def _with_latent_attention(model: nn.Module, splits: dict[str, TensorSplit]) -> dict[str, TensorSplit]:
    """Return `splits` with those of latent attention by its structure, which plans leave whole or cut in part."""
    for name, own in latent_attention(model).items():
        splits = {part: split for part, split in splits.items() if not part.startswith(f"{name}.")}
        splits |= {part: _with_dim(model.get_submodule(part), split) for part, split in own.items()}
    return splits


def _without_other_experts(model: nn.Module, splits: dict[str, TensorSplit]) -> dict[str, TensorSplit]:
    """Return `splits` without experts in other stacks than `EXPERTS`, which then stay whole (Llama 4's)."""
    return {name: split for name, split in splits.items() if split.kind != "experts" or _stacked(model, name)}


def completed(model: nn.Module, splits: dict[str, TensorSplit], called: Sequence[str]) -> dict[str, TensorSplit]:
    """Return `splits`, and by outputs the linear layers `called` that neither these nor their regions cover."""
    regions = _regions(splits)
    left = {name: split for name, split in gathered_splits(model, called).items() if not name.startswith(regions)}
    return left | splits


def attention_split(
    splits: Mapping[str, TensorSplit], attention: Sequence[str]
) -> Literal["nowhere", "in some layers", "everywhere"]:
    """Tell where heads are split, of the modules of `attention`, by name.

    Where it is not known which modules are attention, heads are split as soon as anything is.
    """
    regions = {region_of(name, split) for name, split in splits.items() if split.kind == "column"}
    modules = {name for name in attention if name} or regions
    if regions.isdisjoint(modules):
        return "nowhere"
    return "everywhere" if modules <= regions else "in some layers"


def gathered_splits(model: nn.Module, called: Sequence[str]) -> dict[str, TensorSplit]:
    """Return the splits by outputs of the linear layers `called` that are no routers, and of stacked experts."""
    routers = {router for router, _ in find_routers(model).values()}
    splits: dict[str, TensorSplit] = {}
    for name in called:
        module: Any = model.get_submodule(name)
        outputs = module.nf if isinstance(module, Conv1D) else module.out_features
        if outputs >= FEWEST_OUTPUTS and name not in routers and not _reads_parameters_of(model, name):
            splits[name] = _with_dim(module, TensorSplit("gathered"))
    experts = (name for name, module in model.named_modules() if is_routed(module) and _stacked(model, name))
    return splits | {name: _with_dim(model.get_submodule(name), TensorSplit("experts")) for name in experts}


def _reads_parameters_of(model: nn.Module, name: str) -> bool:
    """Return whether code beside a layer names its parameters, on a path that a CPU need not take: fused kernels do."""
    owner, _, leaf = name.rpartition(".")
    definition: Any = type(model.get_submodule(owner))
    source = _source(definition)
    return any(f"self.{leaf}.{parameter}" in source for parameter in ("weight", "bias"))


@functools.cache
def _source(definition: type) -> str:
    """Return the source of a class and of those that it derives from; empty where there is none."""
    sources = []
    for base in definition.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            with suppress(OSError, TypeError):
                sources.append(inspect.getsource(base))
    return "".join(sources)


def _plan_obstacles(model: PreTrainedModel, family: Family) -> Iterator[str]:
    name = model.config.model_type
    if _has_no_plan(model):
        yield f"there is no plan for {name}"
    if family.tensor_refusal is not None and (refusal := family.tensor_refusal(model.config)):
        yield refusal


def _split_obstacles(model: PreTrainedModel, splits: Mapping[str, TensorSplit]) -> Iterator[str]:
    name = model.config.model_type
    if not splits:
        yield f"transformers' plan for {name} names no module of this model"
    beside = _beside(model, splits)
    if beside:
        yield f"{beside[0]!r} of {name} sees parts of activations, and its plan does not name it"
    twice = _gathered_inside(splits)
    if twice:
        yield f"{twice[0]!r} of {name} is gathered between layers whose parts stay apart"


def vocabulary_parameters(model: Any, head: str | None) -> tuple[str, ...]:
    """Return the parameters of input embeddings and head whose rows ranks can share; none where one is not plain."""
    if head is None or not isinstance(model, PreTrainedModel):
        return ()
    table, projection = input_embeddings(model), model.get_submodule(head)
    if type(table) is not nn.Embedding or type(projection) is not nn.Linear or table.max_norm is not None:
        return ()
    if table.weight.shape != projection.weight.shape:
        return ()
    wanted = {id(parameter) for parameter in (*table.parameters(), *projection.parameters())}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in wanted)


def sequence_capability(
    shapes: Mapping[str, tuple[int, ...]], blocks: Sequence[str], splits: Mapping[str, TensorSplit], is_chain: bool
) -> Capability:
    """Answer whether the ranks can each keep a part of the sequence between regions.

    What stands there has to work on every position by itself, as norms, dropout and residuals do. Of the parameters of
    blocks that no split names these have one dim; a convolution or a recurrence over positions has more.
    """
    if not splits:
        return refused("there is no plan of what is split")
    if any(split.kind == "gathered" for split in splits.values()):
        return refused("the outputs of its split layers are gathered, and what stands between is whole")
    if not is_chain:
        return refused("its blocks are not one chain in which each works on the output of the one before")
    parents = [name.rpartition(".")[0] for name, split in splits.items() if split.kind == "experts"]
    routers = [f"{parent}.{leaf}" for parent in parents for leaf in ROUTERS]
    planned, inside = (tuple(f"{name}." for name in names) for names in ([*splits, *routers], blocks))
    whole = [name for name in shapes if name.startswith(inside) and not name.startswith(planned)]
    wide = [name for name in whole if len(shapes[name]) > 1]
    return unless(f"{wide[0]!r} of a block is not split, and may work across positions" if wide else "")


def region_of(name: str, split: TensorSplit) -> str:
    """Return the module at which a column module's region begins: its parent, or itself where the parent is whole."""
    return name if split.alone else name.rpartition(".")[0]


def _regions(splits: Mapping[str, TensorSplit]) -> tuple[str, ...]:
    """Return with what the names of modules inside of regions begin."""
    return tuple({f"{region_of(name, split)}." for name, split in splits.items() if split.kind == "column"})


def _beside(model: nn.Module, splits: Mapping[str, TensorSplit]) -> list[str]:
    """Return the parameters inside of a region that no split names: their gradients would be wrong without a word."""
    regions = _regions(splits)
    planned = tuple(f"{name}." for name in splits)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if name.startswith(regions) and not name.startswith(planned)]


def _gathered_inside(splits: Mapping[str, TensorSplit]) -> list[str]:
    """Return the gathered layers inside of a region: the gradient of what enters both would be summed twice."""
    regions = _regions(splits)
    return [name for name, split in splits.items() if split.kind == "gathered" and name.startswith(regions)]


def _stacked(model: nn.Module, name: str) -> bool:
    """Tell whether experts hold the two stacks that `EXPERTS` splits, in those shapes, and take what routers give."""
    module = model.get_submodule(name)
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
    if shapes.keys() != EXPERTS.keys() or any(len(shape) != 3 for shape in shapes.values()):
        return False
    (experts, fused, hidden), down = shapes["gate_up_proj"], shapes["down_proj"]
    return down == (experts, hidden, fused // 2) and is_routed(module) and adds_up_over_features(module)


def _published(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' plan without the input embeddings, which `vocabulary_parameters` splits in its place.

    Transformers 5.17 names them in the configuration of every tied model, others too where the module has another name.
    The parameters of stacked experts are left out too, since a split of the experts says how those are cut.
    """
    plan: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    table = input_embeddings(model)
    experts = [rule for rule, style in plan.items() if PUBLISHED.get(style) == TensorSplit("experts")]
    of_stacks = {(f"{rule}.{leaf}", style) for rule in experts for leaf, style in STACKED.items()}
    return _understood({
        rule: style
        for rule, style in plan.items()
        if (rule, style) not in of_stacks
        and style != WHOLE
        and (style != "embedding_rowwise" or any(part is not table for _, part in _named_by(model, rule)))
    })  # fmt: skip


def _understood(plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan without modules in which it asks for a style that is unknown here: their layers belong together.

    So experts of other stacks (`packed_rowwise`) stay whole, and attention with sinks of its own (`local_params`).
    """
    unknown = [rule for rule, style in plan.items() if style not in PUBLISHED]
    owners = {rule.rpartition(".")[0] for rule in unknown}
    inside = tuple(f"{rule}." for rule in unknown)
    return {
        rule: style
        for rule, style in plan.items()
        if rule not in owners and rule.rpartition(".")[0] not in owners and not f"{rule}.".startswith(inside)
    }


def _named_by(model: PreTrainedModel, rule: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a rule such as `layers.*.mlp.up_proj` of the base model names."""
    pattern = re.compile(re.escape(_base_of(model) + rule).replace(r"\*", r"\d+"))
    return [(name, part) for name, part in model.named_modules() if pattern.fullmatch(name)]


def _base_of(model: PreTrainedModel) -> str:
    """Return with what names of the base model's modules begin; Llama 4 has it as `model`, whatever it says."""
    return next((f"{name}." for name in (model.base_model_prefix, "model") if hasattr(model, name)), "")


def _matched(model: PreTrainedModel, rules: SplitRules) -> dict[str, TensorSplit]:
    splits: dict[str, TensorSplit] = {}
    for rule, split in rules.items():
        split = replace(split, key_value=split.kind == "column" and rule.rpartition(".")[2] in KEY_VALUE)
        splits |= {name: _with_dim(part, split) for name, part in _named_by(model, rule)}
    lone = set(_lone_rows(model, rules, splits))
    return {name: split for name, split in splits.items() if name not in lone}


def _lone_rows(model: PreTrainedModel, rules: SplitRules, splits: Mapping[str, TensorSplit]) -> Iterator[str]:
    """Yield the row modules that stand without the column modules which the plan has beside them elsewhere.

    In a hybrid the mixers of some layers may have an output projection of that name alone (GLM-5's linear attention).
    """
    of_columns = {rule.rpartition(".")[0] for rule, split in rules.items() if split.kind == "column"}
    expected = {name for rule in of_columns for name, _ in _named_by(model, rule)}
    owners = {name.rpartition(".")[0] for name, split in splits.items() if split.kind == "column"}
    for name, split in splits.items():
        if split.kind == "row" and name.rpartition(".")[0] in expected - owners:
            yield name


def _with_dim(module: Any, split: TensorSplit) -> TensorSplit:
    """Return `split` with the `dim` of the module's weight; a Conv1D and a table of features hold it transposed."""
    if split.kind == "experts":
        chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
        return replace(split, grouped=chosen not in UNGROUPED)
    outputs = 1 if isinstance(module, (Conv1D, nn.Embedding)) else 0
    return replace(split, dim=1 - outputs if split.kind == "row" else outputs)
