"""ParallelModel: a user's model as this rank runs it, and `run(program)`, the one door to forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.collectives.tensor import sum_together
from shardwise.families.facts import ModelFacts
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.kernels.loss import Vocabulary
from shardwise.layout import Layout
from shardwise.parallel.sharded import begin_microbatch
from shardwise.parallel.tensor_map import TensorMap
from shardwise.plan import Plan
from shardwise.precision import torch_dtype


class Microbatch(Protocol):
    """What `run` itself reads of a microbatch; programs read the rest."""

    rows: Tensor  # [B] int64 global sample counters


class Program(Protocol):
    """What is done with a microbatch before and after the model.

    `needs_whole_batches`: its loss cannot leave padding rows out, so there must be none.
    """

    needs_whole_batches: bool

    def inputs(self, microbatch: Any) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        ...

    def loss(self, microbatch: Any, output: Any, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(summed loss, count of what was summed) of the model's output; `seed` is the gradient backward will bring."""
        ...


class DeferredHead:
    """The output projection, taken out of the model's forward so that the loss can run it in chunks.

    While deferred, the head's forward returns its input; `weight` and `bias` are read when the loss runs, when FSDP2
    holds them gathered in the compute dtype. `vocabulary` says which rows of them this rank holds, if not all.
    """

    def __init__(self, head: nn.Module, vocabulary: Vocabulary | None = None) -> None:
        self.head, self.vocabulary, self.deferred = head, vocabulary, True
        self._forward = head.forward
        head.forward = self._tap  # type: ignore[method-assign]

    def _tap(self, hidden: Tensor) -> Tensor:
        if self.deferred:
            return hidden
        logits: Tensor = self._forward(hidden)
        return logits

    @property
    def weight(self) -> Tensor:
        return self.head.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.head.bias  # type: ignore[return-value]


@dataclass
class ParallelModel:
    """One rank's part of a model.

    Attributes:
        module: the user's model, sharded in place.
        head: set when logits are never whole.
        tensor_map: what lives here.
        sharded: FSDP2's modules, empty when nothing is sharded.
        partial: names of parameters whose gradients are parts, and the group over which they are summed.
        device: where forward and backward run.
    """

    module: nn.Module
    plan: Plan
    layout: Layout
    facts: ModelFacts
    tensor_map: TensorMap
    device: torch.device
    head: DeferredHead | None = None
    sharded: list[FSDPModule] = field(default_factory=list)
    partial: tuple[tuple[Sequence[str], dist.ProcessGroup], ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return torch_dtype(self.plan.dtypes.compute)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its rows: one of the ranks that read them."""
        return self.layout.index("context", "tensor", "pipeline") == 0

    @property
    def contributes(self) -> bool:
        """Whether the loss that this rank computed is part of the sum: of equal ones, one alone is."""
        return self.layout.index("tensor") == 0

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of losses and norms: fp32, or fp64 for an fp64 job."""
        return torch_dtype(self.plan.dtypes.loss)

    def run(self, program: Program, microbatches: Sequence[Any], step: int, seed: Tensor | None = None) -> Tensor:
        """Forward, and with a `seed` backward, of all microbatches; returns [2]: summed loss and count on this rank.

        Args:
            microbatches: at least one; all ranks bring equally many.
            step: number of the step; dropout depends on it.
            seed: 0-dim gradient of each microbatch's summed loss; None for evaluation.
        """
        totals = []
        for index, microbatch in enumerate(microbatches):
            begin_microbatch(self.sharded, self.plan, last=index == len(microbatches) - 1)
            with self._scope(microbatch, step), torch.set_grad_enabled(seed is not None):
                output = self.module(**program.inputs(microbatch))
                loss, count = program.loss(microbatch, output, seed)
            del output
            if seed is not None:
                loss.backward(seed.to(loss.dtype))
            totals.append(torch.stack([loss.detach(), count.to(loss.dtype)]))
        if seed is not None:
            self._sum_partial_gradients()
        return torch.stack(totals).sum(0)

    def _sum_partial_gradients(self) -> None:
        """Of parameters that several tensor ranks hold, each for a part of the activations (norms of single heads)."""
        for names, group in self.partial:
            sum_together(self.tensor_map.gradients(names), group, self.device)

    @contextmanager
    def whole_logits(self) -> Iterator[nn.Module]:
        """The module in evaluation mode with its own head, for generation."""
        training = self.module.training
        self.module.eval()
        if self.head:
            self.head.deferred = False
        try:
            yield self.module
        finally:
            self.module.train(training)
            if self.head:
                self.head.deferred = True

    def release_gathered(self) -> None:
        """Free parameters that stay gathered after a forward that no backward follows."""
        for module in self.sharded:
            module.reshard()

    def _scope(self, microbatch: Microbatch, step: int) -> Any:
        seed = self.plan.job.training.seed
        functional = self.facts.has_functional_dropout
        part = self.layout.index("tensor")
        return dropout_scope(DropoutScope(seed, step, microbatch.rows, functional=functional, part=part))
