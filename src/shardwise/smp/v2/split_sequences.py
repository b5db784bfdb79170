"""Context parallelism of version 2: the script deals each sequence's chunks, the model's forward sees this rank's.

Rank r of c holds chunks r and 2c-1-r of 2c. The forward here tells the model its rows' positions and which tokens
follow its chunks, and leads attention over the ranks (parallel/context.py). The loss is this rank's share of
the mean over all tokens of the sequences, times c, so that FSDP's mean over data and context ranks is the mean of the
whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.collectives.context import deal_chunks, join_chunks
from shardwise.errors import ConfigError
from shardwise.job.tasks import IGNORED
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.parallel.context import ContextParallel, SequenceShard
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan

METHODS = {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}  # SMP's words -> ours


def split_sequences(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Let `model` take this rank's chunks of sequences in the place of whole ones."""
    runner = _Runner(model, ContextParallel(model, plan, layout))
    model.forward = runner.forward  # type: ignore[method-assign]


class _Runner:
    """The forward of a model on chunks."""

    def __init__(self, model: nn.Module, context: ContextParallel) -> None:
        self.run, self.context = model.forward, context
        self.held = ExitStack()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The model's own, of chunks [B, S/c]; `labels` are those of the same tokens, shifted here.

        Raises:
            ConfigError: padding is masked, or the length is no two chunks.
        """
        if input_ids is None or input_ids.shape[1] % 2:
            raise ConfigError("over context ranks a model takes input_ids of two chunks of each sequence, equally long")
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise ConfigError("over context ranks attention_mask cannot hide padding; leave it out, or give ones")
        sequences = self._rows(input_ids)
        kwargs.setdefault("position_ids", sequences.positions.expand_as(input_ids))
        if labels is not None:
            kwargs |= self._targets(labels, sequences)
        # It stays until the next forward: recomputation in backward asks for the same rows.
        self.held.close()
        rows = torch.arange(len(input_ids), device=input_ids.device)
        self.held.enter_context(dropout_scope(DropoutScope(0, 0, rows, sequences=sequences)))
        return self.run(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=labels, **kwargs)

    def _rows(self, ids: Tensor) -> SequenceShard:
        length = ids.shape[1] * self.context.degree
        positions = deal_chunks(torch.arange(length, device=ids.device), 0, self.context.degree)[self.context.index]
        return SequenceShard(self.context, length, length, positions, None)

    def _targets(self, labels: Tensor, sequences: SequenceShard) -> dict[str, Any]:
        """Return the label behind each of this rank's tokens, wherever that lies, and what the loss is divided by."""
        parts = [torch.empty_like(labels) for _ in range(self.context.degree)]
        torch.distributed.all_gather(parts, labels.contiguous(), group=self.context.group)
        whole = nn.functional.pad(join_chunks(parts, 1), (0, 1), value=IGNORED)[:, 1:]
        share = (whole != IGNORED).sum() / self.context.degree
        return {"shift_labels": sequences.local(whole), "num_items_in_batch": share}
