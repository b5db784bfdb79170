"""Kinds of parameters and embeddings that cannot be sharded, or that a layout has to refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.model.containers import module_attributes, walk

DECLARED_CLASS = (
    "declared_class"  # attribute of a parameter on the meta device: the class that it had, if one of its own
)
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
        listed: attributes of modules that keep parameters beside those that are registered.
    """

    complex: tuple[str, ...] = ()
    kept_dtypes: Mapping[str, str] = field(default_factory=dict)
    sparse: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()
    subclassed: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()


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
        listed=() if isinstance(model, PreTrainedModel) else tuple(_attributes_with_parameters(model)),
    )


def _attributes_with_parameters(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for attribute, value in module_attributes(module).items():
            if isinstance(module, nn.RNNBase) and attribute == RENEWED:
                continue
            if any(isinstance(inner, nn.Parameter) for inner in walk(value)):
                yield f"{name}.{attribute}".lstrip(".")


def is_shardable(parameter: Tensor) -> bool:
    """Return True if FSDP2 shards a parameter: it has rows, and elements that may have a gradient.

    The others have few elements; every rank holds them whole.
    """
    return parameter.dim() > 0 and parameter.numel() > 0 and parameter.is_floating_point()
