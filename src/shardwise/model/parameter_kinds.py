"""Kinds of parameters and embeddings that cannot be sharded, or that a layout has to refuse."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class ParameterKinds:
    """Names of parameters, and of embeddings, that are of a kind.

    Attributes:
        complex: parameters of complex numbers.
        sparse: embeddings whose gradients are sparse.
        bounded: embeddings whose forward scales rows down to `max_norm`, in place.
    """

    complex: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()


def find_parameter_kinds(model: nn.Module) -> ParameterKinds:
    """Return the kinds that are in `model`."""
    embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)]
    return ParameterKinds(
        complex=tuple(name for name, parameter in model.named_parameters() if parameter.is_complex()),
        sparse=tuple(name for name, embedding in embeddings if embedding.sparse),
        bounded=tuple(name for name, embedding in embeddings if embedding.max_norm is not None),
    )


def is_shardable(parameter: Tensor) -> bool:
    """Return True if FSDP2 shards a parameter: it has rows, and elements that may have a gradient.

    The others have few elements; every rank holds them whole.
    """
    return parameter.dim() > 0 and parameter.numel() > 0 and parameter.is_floating_point()
