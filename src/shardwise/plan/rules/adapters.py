"""Rules about adapters: the layers that they name, their ranks, and what they leave no room for."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.model.adapters import (
    ALL_LINEAR,
    adapted_parameter,
    is_named,
    is_saved,
    is_target,
    matches_end,
)
from shardwise.model.parameter_patterns import modules_of
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle, spelling

KEYS = ("rank", "alpha", "dropout", "rslora", "target_modules", "target_parameters", "modules_to_save", "rank_pattern",
        "alpha_pattern")  # fmt: skip
LINEARS = "the blocks of {} have no plain linear layers"


def _has_adapters(d: Draft) -> bool:
    return d.adapter.kind != "none"


def _unmatched(d: Draft) -> list[str]:
    """Return the targets that mean no linear layer of a block."""
    targets = d.adapter.target_modules
    names = [targets] if isinstance(targets, str) else targets
    return [name for name in names if not any(is_target(layer, _one(d, name)) for layer in d.facts.linears)]


def _one(d: Draft, name: str) -> str | list[str]:
    return name if isinstance(d.adapter.target_modules, str) else [name]


def _target_reason(d: Draft) -> str:
    if not d.facts.linears:
        return LINEARS.format(d.facts.family)
    if d.adapter.target_modules == []:
        return "no layer is named"
    name = _unmatched(d)[0]
    if any(is_target(layer, _one(d, name)) for layer in d.facts.read_linears):
        return f"the forward reads the weight of {name!r} without calling it, so that an adapter would do nothing"
    return f"{name!r} is no linear layer of the blocks"


def _target_fix(d: Draft) -> str:
    """Return the nearest of the layers' last names, or of their whole names where a whole one was given."""
    if not d.facts.linears:
        return "leave adapter out"
    unmatched = _unmatched(d)
    if not unmatched or not isinstance(d.adapter.target_modules, list):
        return f"use {ALL_LINEAR}"
    whole = "." in unmatched[0]
    return spelling(unmatched[0], sorted({layer if whole else layer.rpartition(".")[2] for layer in d.facts.linears}))


def _unknown_stacks(d: Draft) -> list[str]:
    """Return the target parameters that mean no stack of experts."""
    stacks = d.facts.expert_matrices
    return [name for name in d.adapter.target_parameters if not any(is_named(stack, name) for stack in stacks)]


def _nearest_stack(d: Draft) -> str:
    if not d.facts.expert_matrices:
        return "leave adapter.target_parameters out"
    ends = {".".join(stack.split(".")[-2:]) for stack in d.facts.expert_matrices}
    return spelling(_unknown_stacks(d)[0], sorted(ends))


def _adapted(d: Draft) -> list[str]:
    """Return what patterns of ranks match: the names of layers and stacks that have an adapter."""
    adapters = d.facts.adapters.items()
    return [adapted_parameter(layer, adapter) if adapter.experts else layer for layer, adapter in adapters]


def _too_high(d: Draft) -> Iterator[tuple[str, int, int]]:
    """Yield (layer, rank, its smaller number of features) of adapters that are no thinner than their layer."""
    for layer, adapter in d.facts.adapters.items():
        features = min(adapter.inputs, adapter.outputs)
        if adapter.rank > features:
            yield layer, adapter.rank, features


def _rank_reason(d: Draft) -> str:
    layer, rank, features = next(_too_high(d))
    return f"{layer} has {features} features at its smaller side, and its adapter rank {rank}"


def _unused_patterns(d: Draft) -> list[str]:
    patterns = [*d.adapter.rank_pattern, *d.adapter.alpha_pattern]
    return [pattern for pattern in patterns if not any(matches_end(pattern, layer) for layer in _adapted(d))]


def _unknown_modules(d: Draft) -> list[str]:
    names = [*d.facts.base_shapes, *(alias for group in d.facts.ties for alias in group)]
    return [module for module in d.adapter.modules_to_save if not any(is_saved(name, [module]) for name in names)]


def _half_tied(d: Draft) -> tuple[str, str] | None:
    """Return (a parameter of a module to save, its name in a module that is not saved), if there is one."""
    for group in d.facts.ties:
        saved = [name for name in group if is_saved(name, d.adapter.modules_to_save)]
        others = [name for name in group if name not in saved]
        if saved and others:
            return saved[0], others[0]
    return None


def _half_tied_reason(d: Draft) -> str:
    saved, other = _half_tied(d) or ("", "")
    return f"{saved!r} is tied to {other!r}, which would be trained with it"


def _save_both(d: Draft) -> str:
    _, other = _half_tied(d) or ("", "")
    return f"use {[*d.adapter.modules_to_save, other.rpartition('.')[0].rpartition('.')[2]]}, or leave both out"


def _shared_weight(d: Draft) -> tuple[str, str] | None:
    """Return (a weight that an adapter changes, its name in another layer), if there is one."""
    adapted = {adapted_parameter(layer, adapter) for layer, adapter in d.facts.adapters.items()}
    pairs = ((name, other) for group in d.facts.ties for name in group for other in group if other != name)
    return next(((name, other) for name, other in pairs if name in adapted), None)


def _shared_reason(d: Draft) -> str:
    weight, other = _shared_weight(d) or ("", "")
    return f"{weight} is {other} too, and merged it would change that layer"


def _nearest_module(d: Draft) -> str:
    whole = "." in _unknown_modules(d)[0]
    modules = modules_of(d.facts)
    return spelling(_unknown_modules(d)[0], modules if whole else sorted({name.rpartition(".")[2] for name in modules}))


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"adapter-{key.replace('_', '-')}", f"adapter.{key}", "there is no adapter", lambda d: not _has_adapters(d),
           "set adapter.kind lora or dora, or leave it out") for key in KEYS),
    Rule("adapter-freeze", ("adapter.kind", "model.freeze"), "adapters freeze the whole model already",
         lambda d: _has_adapters(d) and d.model.freeze,
         fix="leave model.freeze out"),
    Rule("adapter-ties", ("adapter.modules_to_save",), "modules that share a parameter are saved together",
         lambda d: _has_adapters(d) and _half_tied(d),
         fix="name both modules, or leave both out",
         because=_half_tied_reason,
         use=_save_both),
    Rule("adapter-modules", ("adapter.modules_to_save",), "has to name modules of the model, by the ends of names",
         lambda d: _has_adapters(d) and _unknown_modules(d),
         fix="use a module's name",
         because=lambda d: f"{_unknown_modules(d)[0]!r} is no module with parameters",
         use=_nearest_module),
    Rule("adapter-targets", ("adapter.target_modules",), "each has to name a linear layer of the blocks",
         lambda d: _has_adapters(d) and (_unmatched(d) or not d.facts.adapters),
         fix="use names of linear layers, or all-linear",
         because=_target_reason,
         use=_target_fix),
    Rule("adapter-shared-weight", ("adapter.target_modules",), "a layer that has its weight to itself has an adapter",
         _shared_weight,
         fix="name the other layers",
         because=_shared_reason),
    Rule("adapter-pattern", ("adapter.rank_pattern", "adapter.alpha_pattern"),
         "each pattern has to match a layer that has an adapter",
         lambda d: _has_adapters(d) and _unused_patterns(d),
         fix="use a layer's name",
         because=lambda d: f"{_unused_patterns(d)[0]!r} matches no layer that has an adapter",
         use=lambda d: spelling(_unused_patterns(d)[0], sorted({n.rpartition(".")[2] for n in _adapted(d)}))),
    Rule("adapter-stacks", ("adapter.target_parameters",), "each has to name a stack [experts, outputs, inputs]",
         lambda d: _has_adapters(d) and _unknown_stacks(d),
         fix="use the end of a stack's name",
         because=lambda d: f"{_unknown_stacks(d)[0]!r} is no stack of experts [experts, outputs, inputs] of this model",
         use=_nearest_stack),
    Rule("adapter-stack-dora", ("adapter.target_parameters", "adapter.kind"),
         "rows of stacked experts have no trained length",
         lambda d: d.adapter.kind == "dora" and d.adapter.target_parameters,
         fix="set adapter.kind lora"),
    Rule("adapter-stack-dropout", ("adapter.target_parameters", "adapter.dropout"),
         "an expert computes with its changed weight, so that nothing is dropped ahead of the adapter alone",
         lambda d: _has_adapters(d) and d.adapter.target_parameters and d.adapter.dropout > 0,
         fix="set adapter.dropout 0"),
    Rule("adapter-rank-height", ("adapter.rank", "adapter.rank_pattern"), "an adapter is thinner than its layer",
         lambda d: next(_too_high(d), None),
         fix="use a smaller rank",
         because=_rank_reason,
         use=lambda d: f"use a rank of at most {next(_too_high(d))[2]}"),
    Rule("adapter-traced", ("adapter.kind", "parallel.pipeline_parallel_degree"),
         "stages of a traced forward call no layer whose adapter could take part",
         lambda d: _has_adapters(d) and d.parallel.pipeline_parallel_degree > 1 and d.facts.stages.traced,
         fix="use pipeline_parallel_degree 1"),
)
# fmt: on
