"""The record of a model family: all that neither the structure of its models nor transformers' plans show.

A file of `shardwise.model.families` holds one record as `FAMILY`; `shardwise.model.registry` finds it by model type. A
family without a record is one of which nothing has to be known: `Family((model_type,))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.model.facts import PLAIN_BLOCK, BlockTraits
from shardwise.model.tensor_split import TensorSplit

SplitRules = Mapping[str, TensorSplit]  # module of the base model, `*` for a block's number -> how it is split


@dataclass(frozen=True)
class FamilyAttention:
    """Attention of a family: what it asks of kernels, and how its calls reach them.

    Attributes:
        bias: kind of bias on scores (`attention_choice.AttentionNeeds.bias`) that some model of it has.
        softcap: whether some model of it caps scores.
        window: whether some layer of a model of it sees a window of keys.
        note: a remark for the reference page.
        classes: transformers' class of attention -> a subclass that calls transformers' AttentionInterface. Empty
            where transformers' own class calls it.
        keeps_class: config -> whether a model keeps transformers' class all the same.
        eager_only: whether transformers itself has no attention for it but the eager one.
        fp32_scores: whether its eager attention multiplies queries and keys in fp32 in every compute dtype.
        key_bias_method: name of the method that makes its bias on keys; it can be asked for the keys of all ranks.
    """

    bias: str = ""
    softcap: bool = False
    window: bool = False
    note: str = ""
    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    keeps_class: Callable[[Any], bool] | None = None
    eager_only: bool = False
    fp32_scores: bool = False
    key_bias_method: str = ""

    def is_replaced(self, config: Any) -> bool:
        """Return whether a model of the family gets the classes of `classes`, where there are some."""
        return self.keeps_class is None or not self.keeps_class(config)


@dataclass(frozen=True)
class Family:
    """The record of a model family.

    Attributes:
        model_types: transformers' names of the family's models, which share everything here.
        attention: what its attention asks of this project's kernels; None: it keeps transformers' own attention.
        tensor_splits: modules that tensor parallelism splits; None: transformers' plan (`base_model_tp_plan`) says so.
        refine_splits: (config, splits of a model) -> splits that depend on the config's values.
        tensor_refusal: config -> why a model cannot be split all the same; empty where it can.
        per_head_arguments: arguments of its attention modules that the model makes for all heads, [B, heads, ...] or
            [B*heads, 1, S].
        block: what the shapes of its blocks' parameters do not show.
        settle: (model on the meta device, tokens of a sequence) -> None: does ahead what its forward would do to
            modules or weights, which ranks that hold a part of them cannot.
        unfit_dtypes: `fp64` or `bf16` (for fp16 too) -> why transformers' own code does not train in it, as a clause
            about that code.
        couples_rows: whether rows of a microbatch change each other's numbers, by what its code counts over all.
        keeps_documents_apart: whether code of its own keeps documents of a sequence apart by a mask of attention, where
            the structure does not show it.
        document_refusal: why its models take no such mask, as a clause about them.
        refusal: why its models cannot be trained here at all, as a clause about its code.
    """

    model_types: tuple[str, ...]
    attention: FamilyAttention | None = None
    tensor_splits: SplitRules | None = None
    refine_splits: Callable[[Any, dict[str, TensorSplit]], dict[str, TensorSplit]] | None = None
    tensor_refusal: Callable[[Any], str] | None = None
    per_head_arguments: tuple[str, ...] = ()
    block: BlockTraits = PLAIN_BLOCK
    settle: Callable[[nn.Module, int], None] | None = None
    unfit_dtypes: Mapping[str, str] = field(default_factory=dict)
    couples_rows: bool = False
    keeps_documents_apart: bool = False
    document_refusal: str = ""
    refusal: str = ""
