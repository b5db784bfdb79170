"""The oracle's own loss of preferences, pair by pair from whole logits.

Written from the papers (direct preference optimization, arXiv 2305.18290, equation 7; its label smoothing, 2403.00409,
equation 12; IPO, 2310.12036, equation 17), without chunks, sums over ranks or weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.job.schema import DpoSection
from shardwise.testing.oracle_data import NOT_COUNTED, Rows


def preference_loss(rows: Rows, logits: Tensor, frozen: Tensor, settings: DpoSection) -> Tensor:
    """Return the summed loss of all pairs, of the [B, S, V] logits of the model and of its reference."""
    assert rows.labels is not None and rows.completions is not None
    policy, reference = _log_probabilities(logits, rows.labels), _log_probabilities(frozen, rows.labels)
    losses = [0.0 * policy.sum()]
    for row in range(len(rows.labels)):
        counted = rows.labels[row] != NOT_COUNTED
        for number in range(0, int(rows.completions[row].max()) + 1, 2):
            both = [counted & (rows.completions[row] == completion) for completion in (number, number + 1)]
            if all(place.any() for place in both):
                ratios = [_ratio(policy[row], reference[row], place, settings) for place in both]
                losses.append(_pair_loss(ratios[0] - ratios[1], settings))
    return torch.stack(losses).sum()


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, S] of each label; of one that is not counted, of some token."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.to(wide).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def _ratio(policy: Tensor, reference: Tensor, place: Tensor, settings: DpoSection) -> Tensor:
    """The logarithm of pi(y | x) / pi_ref(y | x) of a completion; its mean over its labels if asked for."""
    # Of whole sums, as any other program: what they round is seen where rounding is measured.
    ratio = policy[place].sum() - reference[place].sum()
    return ratio / int(place.sum()) if settings.length_normalised else ratio


def _pair_loss(margin: Tensor, settings: DpoSection) -> Tensor:
    if settings.loss == "ipo":
        return (margin - 0.5 / settings.beta) ** 2
    preferred = torch.sigmoid(settings.beta * margin).log()
    other = torch.sigmoid(-settings.beta * margin).log()
    return -((1 - settings.label_smoothing) * preferred + settings.label_smoothing * other)
