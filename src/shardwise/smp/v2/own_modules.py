"""Refuses what FSDP would do to a script's module without a word, or with an error that names no parameter.

FSDP flattens the parameters of a unit, and gives its modules views of the flat one. Hooks on parameters are then not
called, and only real floating-point parameters can be flattened. A parameter that two units share becomes two. What
reads a parameter while its unit does not run sees this rank's part of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from shardwise._torch_compat.fsdp1 import clean_tensor_name
from shardwise.errors import LegalityError
from shardwise.model.construct import meta_parameter
from shardwise.model.containers import walk
from shardwise.model.gradient_hooks import definition_of, find_accumulate_grad_hooks, find_gradient_hooks
from shardwise.model.own_gradients import freezing_recorded
from shardwise.model.parameter_kinds import find_parameter_kinds
from shardwise.model.probe import probe_forward
from shardwise.model.user_state import mentions, user_state_kept
from shardwise.smp.v2.late_writes import watch_values

POSITIONS = 256  # of an example of tokens; a script's own first batch is what its module is shown
IGNORED = ("ignored_states", "ignored_modules", "ignored_parameters")


def refuse_kinds(module: nn.Module, given: dict[str, Any]) -> None:
    """Refuse parameters and embeddings that FSDP would not train as plain torch does, unless it is to ignore them.

    Args:
        module: that FSDP gets.
        given: FSDP's arguments; iterators among them become lists.

    Raises:
        LegalityError: names the first parameter, the module's class with its line, the rule and a way out.
    """
    ignored = _ignored(given)
    for name, rule, fix in _refusals(module):
        if not _parameters_of(module, name) <= ignored:
            raise LegalityError(f"FSDP: {clean_tensor_name(name)} of {definition_of(module)} {rule}; {fix}")
    if not _has_units(module):
        for name in find_parameter_kinds(module).listed:
            raise LegalityError(
                f"FSDP: {name} of {definition_of(module)} keeps parameters, of which FSDP leaves it this rank's part; "
                "keep them in an nn.ParameterList, or read them from their module in forward"
            )


def _ignored(given: dict[str, Any]) -> set[int]:
    """Return the identities of the parameters that FSDP leaves alone."""
    given |= {key: list(given[key]) for key in IGNORED if given.get(key) is not None}
    states = [state for key in IGNORED for state in given.get(key) or ()]
    modules = [state for state in states if isinstance(state, nn.Module)]
    inside = [parameter for module in modules for parameter in module.parameters()]
    return {id(parameter) for parameter in (*states, *inside)}


def _parameters_of(module: nn.Module, name: str) -> set[int]:
    """Return the identity of the parameter of a name, or those of the parameters of a module of that name."""
    return {
        id(parameter) for known, parameter in module.named_parameters() if known == name or known.startswith(f"{name}.")
    }


def _refusals(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name of a parameter or embedding, rule, way out) of what FSDP does not take."""
    kinds = find_parameter_kinds(module)
    scale = "scale or mask gradients between backward and the optimizer's step"
    for name in (*find_gradient_hooks(module), *find_accumulate_grad_hooks(module)):
        yield name, "has a hook on its gradient, which FSDP's views of a flat parameter do not call", scale
    for name, dtype in kinds.kept_dtypes.items():
        yield name, f"is {dtype}, and FSDP flattens real floating-point parameters alone", "name it in ignored_states"
    for name in [name for name, parameter in module.named_parameters() if parameter.dim() == 0]:
        yield name, "has 0 dims, which FSDP does not take", "give it the shape [1]"
    for name in kinds.sparse:
        yield name, "has sparse gradients, and FSDP reduces dense ones alone", "build it with sparse=False"
    if dist.get_world_size() > 1:
        for name in kinds.bounded:
            fix = "scale its rows after the optimizer's step"
            yield name, "has max_norm, which writes into views that ranks fill anew with each other's rows", fix


def _has_units(module: nn.Module) -> bool:
    """Return whether the script has wrapped modules inside by itself."""
    return any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())


class UnwrappedModule:
    """A script's module as it was before FSDP wrapped it: its ties, and a copy that shows what its forward reads."""

    def __init__(self, module: nn.Module, given: dict[str, Any]) -> None:
        """Remember `module`; `given` are FSDP's arguments."""
        self._definition = definition_of(module)
        ignored = _ignored(given)
        self._sharded = {name for name, parameter in module.named_parameters() if id(parameter) not in ignored}
        self._mentions_data = mentions(module, "data")
        self._names: dict[int, list[str]] = {}
        self._copy: nn.Module | None = None
        if _has_units(module):
            return
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        if not isinstance(module, PreTrainedModel):
            self._copy = _copy_without_values(module)

    def check(self, wrapped: Any) -> None:
        """Refuse parameters that units share, and let the first forward be looked at.

        Args:
            wrapped: the module, inside of FSDP.

        Raises:
            LegalityError: two units share a parameter.
        """
        units = _units(wrapped)
        for names in self._names.values():
            owners = dict.fromkeys(_unit_of(name, units) for name in names)
            if len(owners) > 1:
                raise LegalityError(
                    f"FSDP: {names[0]} of {self._definition} is {names[-1]} too, and the units {_listed(owners)} would "
                    "each train a copy of it; wrap both modules in one unit"
                )
        for name, unit in units.items():
            self._check_output(name, unit)
        if self._copy is not None and units:
            self._watch_forward(wrapped, list(units))
        if self._mentions_data and dist.get_world_size() > 1:
            for name, unit in ({"": wrapped} | units).items():
                prefix = f"{name}." if name else ""
                owned = [key.removeprefix(prefix) for key in self._sharded if _unit_of(key, units) == name]
                watch_values(unit, prefix, owned, self._definition)

    def _watch_forward(self, wrapped: nn.Module, units: list[str]) -> None:
        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            self._check_forward(units, args, kwargs)

        handle = wrapped.register_forward_pre_hook(check, with_kwargs=True)

    def _check_output(self, name: str, unit: nn.Module) -> None:
        """Refuse a unit that returns no tensor, by which FSDP would know when to gather it for backward."""

        def check(module: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            if torch.is_grad_enabled() and not any(isinstance(value, Tensor) for value in walk(output)):
                raise LegalityError(
                    f"FSDP: {name} of {self._definition} returns no tensor, and FSDP gathers a unit for backward when "
                    "the gradient of what it returns arrives; return the hidden states"
                )

        handle = unit.register_forward_hook(check)

    def _check_forward(self, units: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a forward that reads what is not there. Of arguments that are no tensors nothing is known.

        Raises:
            LegalityError: it reads parameters of a unit that does not run, or attributes of gathered parameters, or it
                writes, replaces or freezes parameters, or puts hooks on their gradients.
        """
        module, self._copy = self._copy, None
        assert module is not None
        inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if not all(isinstance(value, Tensor) for value in inputs.values()):
            return
        with user_state_kept(module):
            self._check_probe(module, units, inputs)

    def _check_probe(self, module: nn.Module, units: list[str], inputs: Mapping[str, Tensor]) -> None:
        freezing: list[str] = []
        with freezing_recorded(freezing):
            probe = probe_forward(module, [units], POSITIONS, inputs)
        name = next((name for name in probe.outside_reads if _unit_of(name, units)), None)
        if name is not None:
            raise LegalityError(
                f"FSDP: {self._definition} reads {name} while {_unit_of(name, units)} does not run, whose parameters "
                "are sharded then; leave that module out of the wrapping policy, or use optimizer's weight_decay for a "
                "penalty"
            )
        written = next((name for name in probe.written_parameters if name in self._sharded), None)
        if written is not None and dist.get_world_size() > 1:
            raise LegalityError(
                f"FSDP: the forward of {self._definition} writes the parameter {written}, and what it writes into a "
                "gathered view is lost; keep it in a buffer, or change the parameter after the optimizer's step"
            )
        if probe.replaced_parameters:
            raise LegalityError(
                f"FSDP: the forward of {self._definition} puts a new one in place of the parameter "
                f"{probe.replaced_parameters[0]}, and the optimizer has the one that FSDP wrapped; use a buffer"
            )
        if probe.effects.hooked:
            raise LegalityError(
                f"FSDP: the forward of {self._definition} puts a hook on the gradient of {probe.effects.hooked[0]}, "
                "which FSDP's views of a flat parameter do not call; scale or mask gradients between backward and the "
                "optimizer's step"
            )
        if freezing:
            raise LegalityError(
                f"FSDP: the forward of {self._definition} freezes or unfreezes parameters, which are views of a flat "
                "one while it runs; use torch.func.functional_call with detached values"
            )
        marked = [name for name, parameter in module.named_parameters() if vars(parameter)]
        for name in marked:
            vars(module.get_parameter(name)).clear()
        if marked and not probe.failure and probe_forward(module, [units], POSITIONS, inputs).failure:
            raise LegalityError(
                f"FSDP: the forward of {self._definition} reads an attribute that is set on a parameter, as on "
                f"{marked[0]}, and FSDP's views of a flat parameter have none; set it on the module"
            )


def _copy_without_values(module: nn.Module) -> nn.Module | None:
    """Return a copy with parameters on the meta device; None of a module that cannot be copied."""
    known: dict[int, Any] = {id(parameter): meta_parameter(parameter) for parameter in module.parameters()}
    known |= {id(buffer): buffer for buffer in module.buffers()}
    with suppress(Exception):  # any code may run in a copy
        return copy.deepcopy(module, known)
    return None


def _units(wrapped: nn.Module) -> dict[str, nn.Module]:
    """Return FSDP's units below the root, by their names in the script's module."""
    inner_modules = (
        (clean_tensor_name(name), inner) for name, inner in wrapped.named_modules() if inner is not wrapped
    )
    return {name: inner for name, inner in inner_modules if isinstance(inner, FullyShardedDataParallel)}


def _unit_of(name: str, units: Iterable[str]) -> str:
    """Return the innermost unit that holds a parameter; empty for the root."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")


def _listed(owners: Mapping[str, Any]) -> str:
    return " and ".join(owner or "of the whole module" for owner in owners)
