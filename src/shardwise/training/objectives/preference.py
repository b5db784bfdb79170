"""Direct preference optimization: pairs of completions, of which one was preferred (arXiv 2305.18290).

The loss of a pair is a function of four numbers: the log-probabilities of both completions by the model and by its
reference. Each is a sum over the labels of a completion, which stands in one sequence with the other
(data/packed_rows.py), but perhaps on several context ranks. The gradient is that of a cross-entropy in which each label
weighs the derivative of the loss to the log-probability of its completion. So the chunked loss, which takes gradients
in forward, runs twice: first without gradients for the sums, then with these weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardwise.collectives.names import CollectiveName
from shardwise.data.batch import Batch
from shardwise.data.packed_rows import most_completions
from shardwise.errors import ConfigError
from shardwise.job.axes import Axis
from shardwise.job.schema import DpoSection
from shardwise.job.tasks import IGNORED
from shardwise.parallel.model import ParallelModel
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.reference import PRECOMPUTED, FrozenReference

LOG_PROBABILITIES = CollectiveName("log-probabilities of completions", Axis.CONTEXT, "all_reduce")


class CompletionScores(NamedTuple):
    """Numbers of each completion of a microbatch, [B, C]; those of a pair stand side by side, the chosen one first.

    Attributes:
        policy, reference: log-probabilities by the model that is trained and by its reference.
        lengths: labels that are counted.
    """

    policy: Tensor
    reference: Tensor
    lengths: Tensor


class DirectPreference(LanguageModelling):
    """Loss and rewards of pairs.

    Args:
        model: that is trained; compared with its frozen copy, or with itself without adapters.
    """

    def __init__(self, model: ParallelModel) -> None:
        super().__init__(model)
        self.reference = FrozenReference(model.reference or model)
        self.settings = model.plan.job.training.dpo
        self.most_completions = most_completions(model.plan.sequence_length)
        self.is_precomputed = model.plan.reference == PRECOMPUTED
        self._of_reference = LanguageModelling(self.reference.model)
        self._sums = self._no_sums()

    def _no_sums(self) -> Tensor:
        return torch.zeros(3, dtype=self.model.accumulation_dtype, device=self.model.device)

    def prepared(self, microbatches: Sequence[Batch], step: int) -> Sequence[Batch]:
        """Return the microbatches with the reference's log-probabilities of their completions, unless they have them.

        Raises:
            ConfigError: they hold no pairs, or lack log-probabilities that were computed ahead of training.
        """
        if any(microbatch.completions is None for microbatch in microbatches):
            raise ConfigError(
                "training.objective=dpo: a microbatch holds no pairs; take those of session.batches(), or give "
                "step() a loss_function"
            )
        if all(microbatch.reference is not None for microbatch in microbatches):
            return microbatches
        if self.is_precomputed:
            raise ConfigError(
                "training.dpo.precompute_reference=true: a microbatch has no log-probabilities by the reference; take "
                "those of session.batches(), or leave the key out"
            )
        return self.with_reference(microbatches, step)

    def with_reference(self, microbatches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the microbatches with the reference's log-probabilities, on the last stage. Collective.

        Those of context ranks, each of its positions, add up.
        """
        return self.reference.annotated(self._of_reference, microbatches, step, self._reference_sums)

    def _reference_sums(self, microbatch: Batch, output: Any) -> Tensor:
        return self._by_completion(-self._of_reference.label_losses(microbatch, output), microbatch)

    def loss(self, microbatch: Batch, output: Any) -> tuple[Tensor, Tensor]:
        """Return (summed loss, pairs). With gradients the loss has those of a weighted cross-entropy."""
        scores = self._scores(microbatch, output)
        is_first = self.model.layout.index(Axis.CONTEXT) == 0  # of ranks that all know the whole loss
        value = pair_losses(scores, self.settings).sum() * is_first
        self._sums += rewards(scores, self.settings).to(self._sums.dtype) * is_first
        if not torch.is_grad_enabled():
            return value, microbatch.count()
        assert microbatch.completions is not None
        weights = -loss_gradient(scores, self.settings).gather(1, microbatch.completions)
        weighted = self.cross_entropy(microbatch, output, weights)
        return value + (weighted - weighted.detach()), microbatch.count()

    def _scores(self, microbatch: Batch, output: Any) -> CompletionScores:
        """Return the numbers of whole completions, on every context rank."""
        assert microbatch.labels is not None and microbatch.reference is not None
        policy = self._by_completion(-self.label_losses(microbatch, output), microbatch)
        lengths = self._by_completion((microbatch.labels != IGNORED).to(policy.dtype), microbatch)
        reference = microbatch.reference.to(policy.dtype)
        if self.is_precomputed and self.model.layout.index(Axis.CONTEXT):
            reference = torch.zeros_like(reference)  # of whole completions: the first rank's count
        sums = torch.stack([policy, reference, lengths])
        if self.model.context is not None:
            with LOG_PROBABILITIES:
                dist.all_reduce(sums, group=self.model.context.group)
        return CompletionScores(*sums.unbind())

    def _by_completion(self, values: Tensor, microbatch: Batch) -> Tensor:
        """Sum `values` [B, S] over the positions of each completion that are here, [B, C]."""
        assert microbatch.completions is not None
        sums = values.new_zeros(len(values), self.most_completions)
        return sums.scatter_add_(1, microbatch.completions, values)

    def measured(self) -> Tensor:
        """Return the summed rewards of chosen and rejected completions, and the pairs whose chosen one has more."""
        sums, self._sums = self._sums, self._no_sums()
        return sums

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """Return mean rewards, their margin, and the share of pairs in which it is positive."""
        chosen, rejected, right = (value / max(count, 1) for value in sums)
        return {
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "rewards_margin": chosen - rejected,
            "rewards_accuracy": right,
        }


def pair_losses(scores: CompletionScores, settings: DpoSection) -> Tensor:
    """Return the loss [B, C / 2] of each pair; 0 where there is none.

    With h = beta times the margin of the log-ratios: -(1 - e) log sigmoid(h) - e log sigmoid(-h) for label smoothing e
    (arXiv 2305.18290, equation 7; 2403.00409, equation 12), or (h / beta - 1 / (2 beta))^2 (2310.12036, equation 17).
    """
    chosen, rejected = log_ratios(scores, settings)
    margin = chosen - rejected
    if settings.loss == "ipo":
        losses = (margin - 1 / (2 * settings.beta)).square()
    else:
        h, smoothing = settings.beta * margin, settings.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
    return losses * _is_pair(scores)


def loss_gradient(scores: CompletionScores, settings: DpoSection) -> Tensor:
    """Return the gradient [B, C] of the summed loss to the policy's log-probabilities."""
    with torch.enable_grad():
        policy = scores.policy.clone().requires_grad_()
        total = pair_losses(scores._replace(policy=policy), settings).sum()
    return torch.autograd.grad(total, policy)[0]


def rewards(scores: CompletionScores, settings: DpoSection) -> Tensor:
    """Return [3]: the summed rewards of chosen and of rejected completions, and how often the first is higher.

    A reward is beta times the log-ratio (arXiv 2305.18290, section 4).
    """
    chosen, rejected = (settings.beta * ratios for ratios in log_ratios(scores, settings))
    is_pair = _is_pair(scores)
    return torch.stack([(value * is_pair).sum() for value in (chosen, rejected, (chosen > rejected).to(chosen.dtype))])


def log_ratios(scores: CompletionScores, settings: DpoSection) -> tuple[Tensor, Tensor]:
    """Return [B, C / 2] of chosen and of rejected completions: how much likelier than by the reference, in nats.

    In the mean of a label where that is asked for.
    """
    ratios = scores.policy - scores.reference
    if settings.length_normalised:
        ratios = ratios / scores.lengths.clamp(min=1)
    return ratios[:, ::2], ratios[:, 1::2]


def _is_pair(scores: CompletionScores) -> Tensor:
    """Return [B, C / 2]: 1 where both completions have labels that count, else 0."""
    return ((scores.lengths[:, ::2] > 0) & (scores.lengths[:, 1::2] > 0)).to(scores.policy.dtype)
