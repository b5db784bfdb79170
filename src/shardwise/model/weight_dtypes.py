"""The dtype that `model.dtype` gives each weight of a Hugging Face model. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.job.schema import ModelSection
from shardwise.model.facts import ModelFacts

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def with_weight_dtypes(facts: ModelFacts, section: ModelSection) -> ModelFacts:
    """Return `facts` with the one dtype that the job gives all weights; those of files are not known here."""
    name = TORCH_NAMES.get(section.dtype or "")
    return facts if name is None else _with_dtypes(facts, lambda parameter: name)


def with_file_dtypes(facts: ModelFacts, dtype_in_files: Callable[[str], str | None]) -> ModelFacts:
    """Return `facts` with the dtype that each weight has in the model's files, by torch's name; None: it is in none."""
    return _with_dtypes(facts, dtype_in_files)


def _with_dtypes(facts: ModelFacts, dtype_of: Callable[[str], str | None]) -> ModelFacts:
    own = facts.parameter_kinds.kept_dtypes
    dtypes = {name: dtype_of(name) for name in facts.base_shapes if name not in own}
    return replace(facts, weight_dtypes={name: dtype for name, dtype in dtypes.items() if dtype is not None})
