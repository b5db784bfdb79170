"""Balancing losses that are not of the whole step: of each sequence and layer, or of each microbatch over all layers.

E · Σ f_e · p_e as in `shardwise.parallel.routers`, with f and p of some tokens alone. The step's loss is the mean of
those values, each sequence of the step counting once. What backward needs is known before it, so that no forward goes
ahead: a sequence's f from the layer's own logits, a microbatch's once its forward has run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.job.devices import widest_float


@dataclass
class MicrobatchRoutes:
    """Routes of one microbatch, summed over its layers and tokens."""

    sequences: int  # real ones
    shares: Tensor  # [2, experts]: choices, and probabilities
    rows: Tensor  # [1]: tokens times layers


class LocalBalancing:
    """The balancing loss of a step as a mean over sequences or microbatches.

    Args:
        by_sequence: whether f and p are of a sequence and layer; else of a microbatch and all layers.
        coefficient: factor of the loss.
        number: experts of each layer.
        layers: that have experts.
        device: of the sums.
        dtype: of gradients before they are rounded, fp32 or wider.
    """

    def __init__(
        self, by_sequence: bool, coefficient: float, number: int, layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.by_sequence, self.coefficient = by_sequence, coefficient
        self.number, self.layers, self.device, self.dtype = number, layers, device, dtype
        self.wide = widest_float(device)
        self.step_sequences = torch.ones((), dtype=self.wide, device=device)
        self._sequence_loss = torch.zeros((), dtype=self.wide, device=device)
        self._microbatches: list[MicrobatchRoutes] = []

    def begin(self, sequences: Tensor) -> None:
        """Begin a step of so many real sequences on all ranks."""
        self.step_sequences = sequences.clamp(min=1)
        self._sequence_loss.zero_()
        self._microbatches = []

    def begin_microbatch(self, sequences: int) -> None:
        """Begin the forward of a microbatch of so many real sequences."""
        shares = torch.zeros(2, self.number, dtype=self.wide, device=self.device)
        self._microbatches.append(MicrobatchRoutes(sequences, shares, shares.new_zeros(1)))

    def current(self) -> MicrobatchRoutes:
        """Return the routes of the microbatch whose forward runs."""
        return self._microbatches[-1]

    def loss(self) -> Tensor:
        """Return this rank's share of the loss of the step, before its coefficient: 0-dim."""
        if self.by_sequence:
            return self._sequence_loss / (self.layers * self.step_sequences)
        values = [
            counts.sequences * self.number * counts.shares.prod(0).sum() / counts.rows.clamp(min=1).square().sum()
            for counts in self._microbatches
        ]
        return torch.stack(values).sum() / self.step_sequences if values else self._sequence_loss

    def count(self, logits: Tensor, counted: Tensor, sequences: int, chosen: int) -> None:
        """Add a layer's tokens of the current microbatch; logits [T, experts], counted [T]."""
        choices, probabilities = self._routes(logits, chosen)
        if self.by_sequence:
            weights, length = self._of_sequences(counted, sequences)
            f, p = ((values.view(sequences, -1, self.number) * weights).sum(1) for values in (choices, probabilities))
            self._sequence_loss += self.number * (f * p / length.square()).sum()
            return
        routes, weights = self.current(), counted.to(self.wide)[:, None]
        routes.shares += torch.stack([(choices * weights).sum(0), (probabilities * weights).sum(0)])
        routes.rows += weights.sum()

    def share_gain(
        self, logits: Tensor, counted: Tensor, sequences: int, chosen: int, routes: MicrobatchRoutes
    ) -> Tensor:
        """Return the gradient of the step's loss to a token's probabilities: [T, experts], or [experts] for all."""
        factor = self.coefficient * self.number / self.step_sequences
        if not self.by_sequence:
            gain = factor * routes.sequences * routes.shares[0] / routes.rows.clamp(min=1).square()
            return gain.to(self.dtype)
        choices, _ = self._routes(logits, chosen)
        weights, length = self._of_sequences(counted, sequences)
        choices = choices.view(sequences, -1, self.number)
        f = (choices * weights).sum(1, keepdim=True)
        gain = (factor / (self.layers * length.square()).unsqueeze(1) * f).expand_as(choices)
        return gain.reshape(-1, self.number).to(self.dtype)

    def _of_sequences(self, counted: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return the weight of each token [n, S, 1], 1 or 0, and how many a sequence has, 1 at least: [n, 1]."""
        weights = counted.to(self.wide).view(sequences, -1, 1)
        return weights, weights.sum(1).clamp(min=1)

    def _routes(self, logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
        """Return the choices, one-hot, and the probabilities of each token, [T, experts], widely."""
        best = logits.softmax(-1).topk(chosen, -1).indices
        choices = torch.zeros(len(logits), self.number, dtype=self.wide, device=logits.device)
        return choices.scatter_(1, best, 1.0), logits.to(self.dtype).softmax(-1).to(self.wide)
