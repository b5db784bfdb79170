"""Kinds of parameters and embeddings that cannot be sharded, or that a layout has to refuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from transformers import PreTrainedModel

from shardwise._torch_compat.modules import hook_tables, persistent_buffers
from shardwise._torch_compat.writes import storage_key
from shardwise.model.containers import module_attributes, walk
from shardwise.model.stored_dtypes import STORED_DTYPES

DECLARED_CLASS = (
    "declared_class"  # attribute of a parameter on the meta device: the class that it had, if one of its own
)
SHARES_A_PARAMETER = "shares_a_parameter"  # attribute of a tensor that was in the memory of a parameter
RENEWED = "_flat_weights"  # of torch's recurrent layers, which put a parameter that is set anew in it themselves
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class ParameterKinds:
    """Names of parameters, and of embeddings, that are of a kind.

    Attributes:
        complex: parameters of complex numbers.
        kept_dtypes: parameter -> name of its dtype, where it is no real floating one, which a job may convert.
        sparse: embeddings whose gradients are sparse.
        bounded: embeddings whose forward scales rows down to `max_norm`, in place.
        subclassed: parameters of a class of their own.
        listed: attributes of modules that keep parameters beside those that are registered, in lists or functions.
        derived: attributes of modules that keep tensors made from parameters.
        overlapping: pairs of two parameters, or of a parameter and a buffer, in one memory.
        unstored: (parameter or persistent buffer, name of its dtype), where that is none that a checkpoint holds.
    """

    complex: tuple[str, ...] = ()
    kept_dtypes: Mapping[str, str] = field(default_factory=dict)
    sparse: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()
    subclassed: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    overlapping: tuple[tuple[str, str], ...] = ()
    unstored: tuple[tuple[str, str], ...] = ()


def find_parameter_kinds(model: nn.Module) -> ParameterKinds:
    """Return the kinds that are in `model`."""
    embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)]
    return ParameterKinds(
        complex=tuple(name for name, parameter in model.named_parameters() if parameter.is_complex()),
        kept_dtypes={
            name: str(parameter.dtype).removeprefix("torch.")
            for name, parameter in model.named_parameters()
            if not parameter.is_floating_point()
        },
        sparse=tuple(name for name, embedding in embeddings if embedding.sparse),
        bounded=tuple(name for name, embedding in embeddings if embedding.max_norm is not None),
        subclassed=tuple(name for name, parameter in model.named_parameters() if hasattr(parameter, DECLARED_CLASS)),
        unstored=tuple(_unstored(model)),
        **({} if isinstance(model, PreTrainedModel) else _kept_beside(model)),
    )


def _unstored(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if not is_lazy(tensor) and tensor.dtype not in STORED_DTYPES:
            yield name, str(tensor.dtype).removeprefix("torch.")


def _kept_beside(model: nn.Module) -> dict[str, Any]:
    """Return the fields of ParameterKinds that say what a user's module keeps beside its parameters."""
    registered = {id(module) for module in model.modules()}
    listed, derived = list[str](), list[str]()
    for name, module in model.named_modules():
        for attribute, value in _attributes(module):
            where = f"{name}.{attribute}".lstrip(".")
            inside = list(walk(value, into_functions=True))
            if any(_keeps_parameters(inner, registered) for inner in inside):
                listed.append(where)
            elif any(isinstance(inner, Tensor) and _has_no_values(inner) for inner in inside):
                derived.append(where)
    return {"listed": tuple(listed), "derived": tuple(derived), "overlapping": tuple(_overlapping(model))}


def _has_no_values(tensor: Tensor) -> bool:
    """Tell whether a tensor was made from parameters without values, or would follow those that it lay with."""
    return tensor.is_meta or hasattr(tensor, SHARES_A_PARAMETER)


def mark_shared_tensors(model: nn.Module) -> None:
    """Mark the tensors that modules keep in the memory of parameters, which are about to leave it."""
    parameters = {storage_key(parameter) for parameter in model.parameters() if not is_lazy(parameter)}
    for module in model.modules():
        for _, value in _attributes(module):
            for inner in walk(value, into_functions=True):
                is_plain = isinstance(inner, Tensor) and not isinstance(inner, nn.Parameter)
                if is_plain and storage_key(inner) in parameters:
                    setattr(inner, SHARES_A_PARAMETER, True)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a module's own code has set on it, hooks among them."""
    for attribute, value in module_attributes(module).items():
        if not (isinstance(module, nn.RNNBase) and attribute == RENEWED):
            yield attribute, value
    for hook in (hook for table in hook_tables(module) for hook in table.values()):
        yield getattr(hook, "__name__", "a hook"), hook


def _keeps_parameters(value: Any, registered: Collection[int]) -> bool:
    """Tell whether `value` is a parameter, an optimizer, or a module with parameters that is not among `registered`."""
    if isinstance(value, nn.Module):
        return id(value) not in registered and any(True for _ in value.parameters())
    return isinstance(value, nn.Parameter | Optimizer)


def _overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tensors that have elements of one memory in common; on the meta device too."""
    spans: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_kept = not is_lazy(tensor) and tensor.numel()
        if is_kept and (tensor.is_meta or isinstance(tensor, nn.Parameter)):
            start = int(tensor.storage_offset())
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = start + sum((int(size) - 1) * int(step) for size, step in steps) + 1
            others = spans[storage_key(tensor)]
            yield from ((other, name) for other, first, last in others if start < last and first < end)
            others.append((name, start, end))


def is_shardable(parameter: Tensor) -> bool:
    """Return True if FSDP2 shards a parameter: it has rows, and elements that may have a gradient.

    The others have few elements; every rank holds them whole.
    """
    return parameter.dim() > 0 and parameter.numel() > 0 and parameter.is_floating_point()
