"""Refuses writes by `.data` into what FSDP has gathered: they are lost where autograd sees nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shardwise.errors import LegalityError
from shardwise.model.value_sums import is_other, value_sum


def watch_values(unit: nn.Module, prefix: str, names: Iterable[str], definition: str) -> None:
    """Compare the parameters of one of FSDP's units before and after each of its forwards.

    Args:
        unit: of FSDP, around a module.
        prefix: of the unit's names in the script's module.
        names: of the unit's own parameters in its module; inside of a forward they are views of a flat parameter.
        definition: the script's module, as messages call it.
    """
    inner = unit.module
    assert isinstance(inner, nn.Module)
    owned = list(names)
    before: dict[str, Tensor | None] = {}

    def note(module: nn.Module, args: Any) -> None:
        before.update(_sums(inner, owned))

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        for name, total in _sums(inner, owned).items():
            if is_other(total, before.get(name)):
                raise LegalityError(
                    f"FSDP: the forward of {definition} writes the parameter {prefix}{name} by `.data`, and what it "
                    "writes into a gathered view is lost; keep it in a buffer, or change the parameter after the "
                    "optimizer's step"
                )

    inner.register_forward_pre_hook(note)
    inner.register_forward_hook(compare)


def _sums(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor | None]:
    places = {name: name.rpartition(".") for name in names}
    return {name: value_sum(getattr(module.get_submodule(owner), leaf)) for name, (owner, _, leaf) in places.items()}
