"""Language modelling: causal, masked and encoder-decoder models of transformers.

The loss is taken here, never by the model's own code: as (sum, count) over labels that are already aligned with the
outputs, chunked where the head is deferred.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import DataError
from shardwise.job.tasks import IGNORED, TASKS
from shardwise.kernels.attention.masks import document_mask
from shardwise.kernels.loss import (
    NO_TERMS,
    LossTerms,
    cross_entropy_sum,
    label_losses,
    linear_cross_entropy,
    linear_label_losses,
)
from shardwise.model.probe import decodes_labels
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective


class LanguageModelling(Objective):
    """Cross-entropy of the labels; in training with what the job adds to it (label smoothing, z-loss)."""

    needs_whole_batches = False

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.chunk = model.plan.job.memory.loss_chunk_tokens
        training = model.plan.job.training
        self.labels = TASKS[model.plan.job.model.task].labels
        config: Any = model.module.config
        # A model of the user's own is called with what transformers would be: with labels alone, or with both.
        is_users = model.plan.job.model.factory is not None and decodes_labels(model.module)
        self.decoder_start: int | None = None
        if self.labels == "decoder" or is_users:
            self.decoder_start = getattr(config, "decoder_start_token_id", None)
        self.terms = LossTerms(training.label_smoothing, training.z_loss)

    def inputs(self, microbatch: Batch) -> dict[str, Any]:
        """Return the batch's inputs, with an attention mask where documents are isolated.

        Where our kernels run attention they know the documents; the mask then only says that nothing is padding, or the
        model would take positions that begin anew for ends of documents and make a mask of its own.
        """
        dtype, inputs = self.model.compute_dtype, dict[str, Any](microbatch.arguments())
        inputs |= {name: value.to(dtype) for name, value in inputs.items() if value.is_floating_point()}
        if microbatch.document_ids is not None and self.model.plan.attention:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        elif microbatch.document_ids is not None:
            inputs["attention_mask"] = document_mask(microbatch.document_ids, self.labels == "next", dtype)
        if self.decoder_start is not None and "decoder_input_ids" not in inputs:
            labels = microbatch.labels if microbatch.whole_labels is None else microbatch.whole_labels
            assert labels is not None
            inputs["decoder_input_ids"] = self._decoder_inputs(labels, self.decoder_start)
        return inputs

    def _decoder_inputs(self, labels: Tensor, start: int) -> Tensor:
        """Return [B, T] ids that the decoder reads: labels one later, behind `start`; mBART's kind has its own rule."""
        shift = getattr(self.model.module, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            # mBART looks for the last label of each row that is no padding, and a row that fills a batch has none.
            is_empty = (labels == IGNORED).all(dim=1)
            any_label = int(getattr(self.model.module.config, "pad_token_id", None) == 0)
            first = torch.where(is_empty, any_label, labels[:, 0])
            shifted: Tensor = shift(torch.cat([first[:, None], labels[:, 1:]], dim=1))
            return shifted
        ids = labels.roll(1, dims=1).clamp(min=0)  # IGNORED, in rows that are not counted
        ids[:, 0] = start
        return ids

    def loss(self, microbatch: Batch, output: Any) -> tuple[Tensor, Tensor]:
        """Return (summed cross-entropy in nats, counted labels); both weighted under a mean over samples."""
        terms = self.terms if torch.is_grad_enabled() else NO_TERMS
        return self.cross_entropy(microbatch, output, microbatch.weights, terms), microbatch.count()

    def cross_entropy(
        self, microbatch: Batch, output: Any, weights: Tensor | None, terms: LossTerms = NO_TERMS
    ) -> Tensor:
        """Return the summed cross-entropy in nats, of each label times its weight [B, S], where there are weights."""
        head, labels = self.model.head, microbatch.labels
        assert labels is not None
        rows = output.logits.shape[:-1]
        if labels.numel() != rows.numel():
            raise DataError(
                f"labels of the shape {list(labels.shape)} for logits of {list(rows)} places: a cross-entropy has one "
                "label for each; give such labels, or a loss of your own (model.loss, or loss_function of a step)"
            )
        if head is None:
            return cross_entropy_sum(output.logits, labels, terms, weights)
        return linear_cross_entropy(
            output.logits,
            head.weight,
            head.bias,
            labels,
            chunk=self.chunk,
            seed=head.seed,
            vocabulary=head.vocabulary,
            terms=terms,
            weights=weights,
        )

    def label_losses(self, microbatch: Batch, output: Any) -> Tensor:
        """Return the cross-entropy [B, S] of each label in nats, without gradients; 0 where it is not counted."""
        head, labels = self.model.head, microbatch.labels
        assert labels is not None
        if head is None:
            return label_losses(output.logits, labels)
        return linear_label_losses(
            output.logits, head.weight, head.bias, labels, chunk=self.chunk, vocabulary=head.vocabulary
        )
