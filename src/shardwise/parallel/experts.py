"""Dispatch and combine of experts that ranks share: each token travels to the ranks of its experts and back.

Rows that arrived are computed by expert, each with weight 1. The routing weights are applied where the token came from,
so that the router's gradient is whole there. No token is dropped, and one exchange of counts goes ahead of the rows
(GShard's dispatch and combine, arXiv 2006.16668, section 3.2, without a capacity).

Between hosts a token goes once to each host that has some of its experts (experts_by_host.py).

Tensor ranks hold the same tokens, and each sends a part of them. With sequence parallelism they hold parts already.

A checkpointed block routes once: its recomputation takes the forward's routes (kept_routes.py).

Experts that are called in another way (`ExpertCall`) get rows that have one expert each, with weight 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.tensor import SequenceRows, gather_whole_sequence, scatter_sequence
from shardwise.kernels.experts import SortedExperts, select_rows, sum_rows
from shardwise.model.experts import ExpertCall
from shardwise.parallel import experts_at_once, experts_by_host
from shardwise.parallel.experts_at_once import FAKE, DirectRoutes
from shardwise.parallel.experts_by_host import HostRoutes
from shardwise.parallel.kept_routes import KeptRows, routes_of
from shardwise.parallel.layout import ExpertLevels


@dataclass(frozen=True)
class SharedExperts:
    """The experts of one layer, shared among the ranks of `levels`.

    Attributes:
        name: of the module, for messages.
        experts: this rank's.
        number: experts of all ranks.
        levels: the ranks.
        tensor: the tensor ranks that hold the same tokens; None where each rank has its own.
    """

    name: str
    experts: SortedExperts
    number: int
    levels: ExpertLevels
    tensor: dist.ProcessGroup | None = None

    @property
    def forward(self) -> Callable[..., Tensor]:
        """Return the function that takes the place of the module's forward."""
        forwards = {ExpertCall.ROUTED: self.run, ExpertCall.SORTED: self.run_sorted, ExpertCall.DENSE: self.run_dense}
        return forwards[self.experts.call]

    @torch.compiler.disable
    def run(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts. Collective over `levels`, and over `tensor`.

        Args:
            hidden_states: [T, H], or [B, S, H] of as many tokens.
            experts: [T, k], numbers of the experts of each token.
            weights: [T, k].
        """
        outputs = self._run_tokens(hidden_states.flatten(0, -2), experts, weights)
        return outputs.view(*hidden_states.shape[:-1], outputs.shape[-1])

    @torch.compiler.disable
    def run_sorted(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Return the outputs [R, ...] of `inputs` [R, H], sorted by expert; each has `expert_size` of them. Collective.

        All ranks of `tensor` have the same rows.
        """
        sizes = torch.tensor(expert_size, device=inputs.device)
        numbers = torch.arange(self.number, device=inputs.device).repeat_interleave(sizes, output_size=len(inputs))
        return self._run_rows(inputs, numbers)

    @torch.compiler.disable
    def run_dense(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs of `hidden_states` [number * T, H], T for each expert, without the zeros. Collective.

        The experts have no biases: a row of zeros comes out as zeros and has no part in a gradient.
        """
        tokens = len(hidden_states) // self.number
        if dist.get_backend(self.levels.all) == FAKE:
            places = torch.arange(tokens, device=hidden_states.device) * self.number  # as many for each expert
        else:
            places = hidden_states.detach().ne(0).any(1).nonzero().squeeze(1)  # NaN is not 0: it travels
        outputs = self._run_rows(select_rows(hidden_states, places), places // max(1, tokens))
        return sum_rows(outputs, places, len(hidden_states))

    def _run_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Run `rows` [R, H], each on the one expert that `numbers` [R] says."""
        return self._run_tokens(rows, numbers[:, None], rows.new_ones(len(rows), 1))

    def _run_tokens(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of tokens, of which each rank of `tensor` sends a part."""
        if self.tensor is None:
            return self._run_own(hidden_states, experts, weights)
        rows = SequenceRows(self.tensor, dist.get_rank(self.tensor), 1, len(hidden_states))
        first, end = rows.bounds(rows.index)
        own_states, own_weights = (scatter_sequence(values[None], rows)[0] for values in (hidden_states, weights))
        return gather_whole_sequence(self._run_own(own_states, experts[first:end], own_weights)[None], rows)[0]

    def _run_own(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of tokens that no other rank has."""
        levels = self.levels
        if levels.cross is None or levels.local is None or dist.get_backend(levels.all) == FAKE:
            return self._run_at_once(hidden_states, experts, weights)
        return self._run_by_host(levels.cross, levels.local, hidden_states, experts, weights)

    # --- between hosts

    def _run_by_host(
        self,
        cross: dist.ProcessGroup,
        local: dist.ProcessGroup,
        hidden_states: Tensor,
        experts: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Send each token once to every host that has some of its experts; that host's ranks share them."""
        row_bytes = hidden_states.shape[1] * hidden_states.element_size()

        def make(kept: KeptRows) -> HostRoutes:
            return HostRoutes(self.name, cross, self.number, experts, row_bytes, kept)

        routes = routes_of(self.name, experts, make)
        rows, weights_there = experts_by_host.dispatch(routes, local, hidden_states, weights)
        return experts_by_host.combine(routes, self._compute_sorted(rows, routes.inside.counts), weights_there)

    # --- at once

    def _run_at_once(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Send each token to the ranks of its experts, once an expert."""
        group = self.levels.all
        agree = DirectRoutes.even if dist.get_backend(group) == FAKE else DirectRoutes.of
        routes = routes_of(self.name, experts, lambda kept: agree(self.name, group, self.number, experts, kept))
        rows = experts_at_once.dispatch_at_once(routes, hidden_states)
        return experts_at_once.combine_at_once(routes, self._compute_sorted(rows, routes.counts), weights)

    def _compute_sorted(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs [R, H] of this rank's experts for `rows` [R, H], of which each expert has `counts`.

        Without a row a blank one is computed: the experts then have gradients, of zeros, and backward reaches the
        exchange on this rank too.
        """
        if len(rows):
            return self.experts(rows, counts)
        blank = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return self.experts(blank, (torch.arange(len(counts), device=rows.device) == 0).to(counts.dtype))[:0]
