"""The tensors of files that make a parameter, by transformers' own rules for the kind of model.

Most parameters are one tensor, under a name that was changed since (GPT-NeoX's head is `embed_out` on the Hub, BERT's
norms have a `gamma`) or with and without the base model's prefix (GPT-2). Some are made of others: stacked experts of
one tensor an expert, fused projections of several. Names and operations are transformers'; what is read, and when, is
decided in reading.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from shardwise.errors import ModelError


@dataclass(frozen=True)
class Recipe:
    """One application of a converter: `sources` are (pattern of the converter, name in the files), in order."""

    model: PreTrainedModel
    target: str
    converter: WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)

    def make(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parameters by name that come out of the sources; `target` is the first of them."""
        converter = copy.deepcopy(self.converter)  # it collects its inputs in itself
        try:
            for pattern, name in self.sources:
                source: Any = read(name)  # it takes tensors and futures, and is annotated for the latter
                converter.add_tensor(self.target, name, pattern, source)
            made = converter.convert(self.target, model=self.model, config=self.model.config)
        except ModelError:
            raise
        except Exception as error:  # tensors that do not belong together make torch's operations raise anything
            names = [name for _, name in self.sources]
            ends = f"{len(names)} tensors, {names[0]!r} to {names[-1]!r}"
            raise ModelError(f"transformers cannot make {self.target!r} of {ends}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def match_names(
    file_names: Iterable[str], model_names: Collection[str], prefix: str, model: nn.Module | None
) -> tuple[dict[str, str], list[Recipe]]:
    """The file's name of each parameter that is one tensor there, and the recipes of those that are made of others."""
    transforms = _transforms(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(model_names, True)
    direct: dict[str, str] = {}
    recipes: dict[str, Recipe] = {}
    for name in sorted(file_names, key=dot_natural_key):  # transformers' order, by which experts are stacked
        target, pattern = rename_source_key(name, renamings, converters, prefix or None, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known and pattern is not None and isinstance(model, PreTrainedModel):
            recipe = recipes.setdefault(target, Recipe(model, target, converter_of[pattern]))
            recipe.sources.append((pattern, name))
        elif target in known:
            direct.setdefault(target, name)
    return direct, list(recipes.values())


def _transforms(model: nn.Module | None) -> list[WeightTransform]:
    """Fresh ones: a renaming may remember what it has seen."""
    if not isinstance(model, PreTrainedModel):
        return []
    transforms = get_model_conversion_mapping(model)
    for architecture in model.config.architectures or ():
        if architecture != type(model).__name__:  # FSDP2 renames the class, by which the rules are found
            transforms += get_checkpoint_conversion_mapping(architecture) or []
    return transforms
