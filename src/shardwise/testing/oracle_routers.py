"""Losses and biases of routers in one process, written again from their definitions, on what transformers records.

The balancing loss is that of transformers (`load_balancing_loss_func`) with the optimizer step as its batch; the bias
moves as DeepSeek-V3 has it (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.job.schema import Job

CORRECTION_BIAS = "e_score_correction_bias"


class RouterReference:
    """The routers of the oracle's model over one step."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        section = job.router
        adds = getattr(config, "output_router_logits", False) and section.balancing_loss == "auto"
        given = section.balancing_coefficient
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
        self.coefficient = coefficient if adds or section.balancing_loss == "global" else 0.0
        self.z_loss, self.rate = section.z_loss, section.bias_update_rate
        self.chosen: int = getattr(config, "num_experts_per_tok", 0) or 0
        self.model = model
        self.assigned: Tensor | None = None
        self.rows = 0
        self.routed: dict[str, Tensor] = {}

    @property
    def has_loss(self) -> bool:
        """True where the loss has a term of the routers."""
        return bool(self.coefficient or self.z_loss)

    def begin(self) -> None:
        """Forget the step before."""
        self.assigned, self.rows, self.routed = None, 0, {}

    def count(self, recorded: Sequence[Tensor]) -> None:
        """Add the choices of some samples: logits [tokens, experts] of every layer."""
        for logits in recorded:
            flat = logits.detach().reshape(-1, logits.shape[-1])
            best = flat.softmax(-1).topk(self.chosen, -1).indices.flatten()
            counts = torch.bincount(best, minlength=flat.shape[-1]).double()
            self.assigned = counts if self.assigned is None else self.assigned + counts
            self.rows += len(flat)

    def term(self, recorded: Sequence[Tensor]) -> Tensor:
        """Return the share of some samples in the losses of the step, whose choices are counted."""
        assert self.assigned is not None
        total = torch.zeros((), dtype=torch.float64)
        for logits in recorded:
            flat = logits.reshape(-1, logits.shape[-1]).double()
            even = (flat.softmax(-1) * self.assigned).sum() * len(self.assigned) / self.rows**2
            total = total + self.coefficient * even + self.z_loss * flat.logsumexp(-1).square().sum() / self.rows
        return total

    @contextmanager
    def counting_routes(self) -> Iterator[None]:
        """Count inside, by correction bias, to which experts tokens go."""
        handles = []
        for name, _ in self.model.named_buffers() if self.rate else ():
            owner, _, leaf = name.rpartition(".")
            if leaf == CORRECTION_BIAS:
                handles.append(self._count_behind(name, owner))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count_behind(self, bias: str, router: str) -> Any:
        """Watch the experts beside a router."""
        layer = self.model.get_submodule(router.rpartition(".")[0])

        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            counts = torch.bincount(args[1].flatten(), minlength=self.model.get_buffer(bias).numel())
            self.routed[bias] = self.routed.get(bias, 0) + counts

        experts: nn.Module = layer.get_submodule("experts")
        return experts.register_forward_pre_hook(count)

    def move_biases(self) -> None:
        """Move every correction bias against what was counted."""
        for name, counts in self.routed.items():
            bias = self.model.get_buffer(name)
            bias += self.rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)
