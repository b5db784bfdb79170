"""Answers whether documents that share a sequence can be kept apart: whether none sees another through the model.

What keeps them apart is a mask of attention. A model whose inputs context ranks can split looks at other positions
through the AttentionInterface alone, which is given that mask. So does one whose blocks run on some rows of sequences,
where no module is given all of them and nothing is mixed outside. In any other a state, a convolution or a product may
go from one document to the next. Some of these take the mask in code of their own, which their family's record says. A
test changes a document of every type of the installed transformers, and sees whether the next one moves.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from shardwise.job.capability import SUPPORTED, Capability, refused
from shardwise.model.facts import SplitForward
from shardwise.model.registry import family_of


def isolation_capability(
    model: nn.Module, split_inputs: Capability, split_forward: SplitForward | None, mixes: bool
) -> Capability:
    """Answer whether a mask of attention keeps documents apart; a user's module is given it, and may do as it likes.

    Args:
        split_inputs: whether context ranks can split its inputs.
        split_forward: how its blocks run on some rows of sequences, where that was found.
        mixes: whether its forward has an operator that mixes positions, such as a convolution.
    """
    if not isinstance(model, PreTrainedModel):
        return SUPPORTED
    family = str(model.config.model_type)
    record = family_of(family)
    if record.document_refusal:
        return refused(f"{family} {record.document_refusal}, and takes none of documents")
    if model.config.is_encoder_decoder:
        return refused(f"the decoder of {family} looks at all of its encoder's sequence")
    attention = record.attention
    if attention is not None and not attention.is_replaced(model.config):
        return refused(f"{family} keeps transformers' own attention here, which takes no mask of documents")
    if split_inputs.ok or record.keeps_documents_apart:
        return SUPPORTED
    gathered = () if split_forward is None else split_forward.gathered
    if gathered:
        return refused(f"{gathered[0].name} of this {family} looks at other documents past a mask of attention")
    return refused(_unknown(family)) if mixes or split_forward is None else SUPPORTED


def _unknown(family: str) -> str:
    return f"{family} is not known to look at other positions through masks of attention alone"
