"""Dispatch and combine of experts that ranks share: each token travels to the ranks of its experts and back.

The experts' own forward runs unchanged, on the rows that arrived, each for one expert of this rank with weight 1. The
routing weights are applied where the token came from, so that the router's gradient is whole there. Rows are sorted by
expert once. No token is dropped, and one exchange of counts goes ahead of the rows (GShard's dispatch and combine,
arXiv 2006.16668, section 3.2, without a capacity).

Tensor ranks hold the same tokens, and each sends a part of them. With sequence parallelism they hold parts already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.experts import RowExchange, exchange_counts
from shardwise.collectives.names import CollectiveName, group_name
from shardwise.collectives.tensor import SequenceRows, gather_whole_sequence, scatter_sequence

ExpertForward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SharedExperts:
    """The experts of one layer, shared among the ranks of `group`.

    Attributes:
        name: of the module, for messages.
        forward: of this rank's experts: (hidden states [R, H], expert of this rank [R, 1], weights [R, 1]) -> [R, H].
        number: experts of all ranks.
        group: the ranks, in the order of their experts.
        tensor: the tensor ranks that hold the same tokens; None where each rank has its own.
    """

    name: str
    forward: ExpertForward
    number: int
    group: dist.ProcessGroup
    tensor: dist.ProcessGroup | None = None

    @torch.compiler.disable
    def run(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts. Collective over `group`, and over `tensor`.

        Args:
            hidden_states: [T, H].
            experts: [T, k], numbers of the experts of each token.
            weights: [T, k].
        """
        if self.tensor is None:
            return self._run_own(hidden_states, experts, weights)
        rows = SequenceRows(self.tensor, dist.get_rank(self.tensor), 1, len(hidden_states))
        first, end = rows.bounds(rows.index)
        own_states, own_weights = (scatter_sequence(values[None], rows)[0] for values in (hidden_states, weights))
        return gather_whole_sequence(self._run_own(own_states, experts[first:end], own_weights)[None], rows)[0]

    def _run_own(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of tokens that no other rank has."""
        order = experts.flatten().argsort(stable=True)
        exchange, counts = self._exchange(experts)
        received = exchange.run(hidden_states[order // experts.shape[1]])
        returned = exchange.reversed.run(self._compute(received, counts))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        outputs = returned[place].view(*experts.shape, returned.shape[1])
        return (outputs * weights[..., None]).sum(1).to(hidden_states.dtype)

    def _exchange(self, experts: Tensor) -> tuple[RowExchange, Tensor]:
        """Return the exchange of the sorted rows, and [ranks, experts of this rank] rows that each rank sends."""
        name = CollectiveName(self.name, group_name(self.group), "all_to_all_single")
        if dist.get_backend(self.group) == "fake":
            return self._even_exchange(experts.numel(), name, experts.device)
        counts = torch.bincount(experts.flatten(), minlength=self.number)
        received = exchange_counts(counts, self.group, name)
        sent = counts.view(self.group.size(), -1).sum(1).tolist()
        return RowExchange(self.group, name, sent, received.sum(1).tolist()), received

    def _even_exchange(self, rows: int, name: CollectiveName, device: torch.device) -> tuple[RowExchange, Tensor]:
        """Return the exchange of a dry run, which knows no routes: each expert gets as many rows."""
        ranks = self.group.size()
        sizes = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
        counts = torch.full((ranks, self.number // ranks), rows // self.number, device=device)
        return RowExchange(self.group, name, sizes, sizes), counts

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs [R, H] of this rank's experts for `rows`, which come rank by rank, expert by expert.

        Without a row a blank one is computed: the experts then have gradients, of zeros, and backward reaches the
        exchange on this rank too.
        """
        ranks, local = counts.shape
        numbers = (
            torch.arange(local, device=rows.device)
            .repeat(ranks)
            .repeat_interleave(counts.flatten(), output_size=len(rows))
        )
        received = len(rows)
        if not received:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            numbers = numbers.new_zeros(1)
        return self.forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))[:received]
