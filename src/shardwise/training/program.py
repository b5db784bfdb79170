"""Programs: what a step does with a microbatch before and after the model.

A language model's loss is taken here, never by the model's own code: as (sum, count) over labels that are already
aligned with the outputs, chunked where the head is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import ModelError
from shardwise.job.objects import load_object
from shardwise.kernels.attention.masks import document_mask
from shardwise.kernels.loss import PLAIN, Terms, cross_entropy_sum, linear_cross_entropy
from shardwise.parallel.model import ParallelModel, Program

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]


class LanguageModelProgram:
    """Causal, masked and encoder-decoder language models of transformers."""

    needs_whole_batches = False

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.chunk = model.plan.job.memory.loss_chunk_tokens
        training = model.plan.job.training
        span = model.plan.job.model.task == "seq2seq_lm"
        self.starts_with: int | None = model.module.config.decoder_start_token_id if span else None  # type: ignore
        self.terms = Terms(training.label_smoothing, training.z_loss)

    def inputs(self, microbatch: Batch) -> dict[str, Any]:
        """The batch's inputs, with an attention mask where documents are isolated.

        Where attention is led to our kernels they know the documents; the mask then only says that nothing is padding,
        or the model would take positions that begin anew for borders and make a mask of its own.
        """
        inputs: dict[str, Any] = dict(microbatch.inputs)
        if microbatch.document_ids is not None and self.model.plan.attention:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        elif microbatch.document_ids is not None:
            causal = self.model.plan.job.model.task == "causal_lm"
            dtype = self.model.compute_dtype
            inputs["attention_mask"] = document_mask(microbatch.document_ids, causal, dtype)
        if self.starts_with is not None:
            assert microbatch.labels is not None
            inputs["decoder_input_ids"] = self._before(microbatch.labels, self.starts_with)
        return inputs

    def _before(self, labels: Tensor, start: int) -> Tensor:
        """[B, T] ids that the decoder reads: labels one later, behind `start`; mBART's kind has its own rule."""
        shift = getattr(self.model.module, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            own: Tensor = shift(labels)
            return own
        before = labels.roll(1, dims=1).clamp(min=0)  # IGNORED, in rows that are not counted
        before[:, 0] = start
        return before

    def loss(self, microbatch: Batch, output: Any, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy in nats, counted labels); with a seed also what the job adds to what is trained."""
        assert microbatch.labels is not None
        head, terms = self.model.head, PLAIN if seed is None else self.terms
        if head is None:
            return cross_entropy_sum(output.logits, microbatch.labels, terms), microbatch.count()
        loss = linear_cross_entropy(
            output.logits,
            head.weight,
            head.bias,
            microbatch.labels,
            chunk=self.chunk,
            seed=1.0 if seed is None else seed,
            vocabulary=head.vocabulary,
            terms=terms,
        )
        return loss, microbatch.count()


class ModuleProgram:
    """Any module: with `model.loss`, or with a forward that returns its mean loss (itself, `.loss` or first item)."""

    def __init__(self, loss: LossFunction | None, compute: torch.dtype) -> None:
        self.function, self.compute = loss, compute
        self.needs_whole_batches = loss is None  # a mean over real and padding rows cannot be taken apart again

    def inputs(self, microbatch: Batch) -> dict[str, Any]:
        """The batch's inputs, and its labels for a module that computes its own loss; floats in the compute dtype."""
        inputs = dict(microbatch.inputs)
        if self.function is None and microbatch.labels is not None:
            inputs["labels"] = microbatch.labels
        return {name: value.to(self.compute) if value.is_floating_point() else value for name, value in inputs.items()}

    def loss(self, microbatch: Batch, output: Any, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The user's (sum, count), or mean times count."""
        if self.function is not None:
            return self.function(output, microbatch)
        count = microbatch.count()
        return _own_loss(output) * count, count


def make_program(model: ParallelModel) -> Program:
    """The program of a job's own model."""
    settings = model.plan.job.model
    if settings.loss is not None:
        return ModuleProgram(load_object(settings.loss), model.compute_dtype)
    return LanguageModelProgram(model) if model.facts.is_hugging_face else ModuleProgram(None, model.compute_dtype)


def _own_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)):
        loss = output[0]
    loss = output if loss is None else loss
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ModelError(
            "the module's forward returns neither a 0-dim loss nor an object with .loss; give "
            "model.loss=package.module:function(output, batch) -> (sum, count)"
        )
    return loss
