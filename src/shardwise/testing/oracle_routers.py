"""Losses and biases of routers in one process, written again from their definitions, on what transformers records.

The balancing loss is that of transformers (`load_balancing_loss_func`) with the optimizer step as its batch, one layer
of the step, a microbatch, or a sequence of one layer; the bias moves as DeepSeek-V3 has it (arXiv 2412.19437, section
2.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.job.schema import Job
from shardwise.model.discover import experts_of_token
from shardwise.model.routers import correction_biases, find_routers

CORRECTION_BIAS = "e_score_correction_bias"


class RouterReference:
    """The routers of the oracle's model over one step."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        section = job.router
        adds = getattr(config, "output_router_logits", False) and section.balancing_loss == "auto"
        given = section.balancing_coefficient
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
        self.kind = "global" if adds else section.balancing_loss
        self.coefficient = coefficient if self.kind in ("global", "layer", "sequence", "model") else 0.0
        self.microbatch = job.training.microbatch_size or 1
        self.z_loss, self.rate = section.z_loss, section.bias_update_rate
        self.chosen: int = experts_of_token(config) or 0
        self.model = model
        self.assigned: Tensor | None = None  # choices of the step, [layers, experts]
        self.rows = 0  # tokens of the step
        self.routed: dict[str, Tensor] = {}
        self.is_token: Tensor | None = None  # [tokens] of the forward that runs: False where a row is filled up
        self.margin: tuple[float, str] | None = None  # the smallest of any token, and its router
        for stack, (router, output) in find_routers(model).items():
            bias = correction_biases(model).get(stack)
            model.get_submodule(router).register_forward_hook(partial(self._watch_margin, router, output, bias))

    def _watch_margin(self, name: str, output: int, bias: str | None, module: nn.Module, args: Any, made: Any) -> None:
        """Note by how little the last chosen expert of a token was ahead of the first that was not."""
        logits: Tensor = (made[output] if isinstance(made, tuple) else made).detach()
        scores = logits if bias is None else logits.double().sigmoid() + self.model.get_buffer(bias)
        if not 0 < self.chosen < scores.shape[-1]:
            return
        best = scores.reshape(-1, scores.shape[-1]).topk(self.chosen + 1, -1).values
        smallest = float((best[:, -2] - best[:, -1]).min())
        if self.margin is None or smallest < self.margin[0]:
            self.margin = smallest, name

    def notes(self) -> list[str]:
        """Return what is to be said of routes: the smallest margin, since ties may flip in another order of sums."""
        if self.margin is None:
            return []
        smallest, name = self.margin
        return [
            f"The smallest top-k margin of a token is {smallest:.1e}, at {name}: scores that are nearer than rounding "
            "would be routed otherwise in another order of sums."
        ]

    @property
    def has_loss(self) -> bool:
        """True where the loss has a term of the routers."""
        return bool(self.coefficient or self.z_loss)

    def begin(self) -> None:
        """Forget the step before."""
        self.assigned, self.rows, self.routed = None, 0, {}

    def count(self, recorded: Sequence[Tensor]) -> None:
        """Add the choices of some samples: logits [tokens, experts] of every layer."""
        layers = [self._of_tokens(logits.detach().reshape(-1, logits.shape[-1])) for logits in recorded]
        if not layers:
            return
        best = [flat.softmax(-1).topk(self.chosen, -1).indices.flatten() for flat in layers]
        counts = torch.stack([torch.bincount(chosen, minlength=layers[0].shape[-1]).double() for chosen in best])
        self.assigned = counts if self.assigned is None else self.assigned + counts
        self.rows += len(layers[0])

    def samples_at_once(self, size: int) -> int:
        """Return how many samples a forward has, of `size` at most unless the loss is one of microbatches."""
        return self.microbatch if self.kind == "model" and self.coefficient else size

    def term(self, recorded: Sequence[Tensor], samples: int, of_step: int, factor: float = 1.0) -> Tensor:
        """Return the share of some samples, of those of the step, in its losses; their choices are counted.

        `factor` is of the balancing loss, as a mistake would have it.
        """
        assert self.assigned is not None
        coefficient = factor * self.coefficient
        whole = [logits.reshape(-1, logits.shape[-1]).double() for logits in recorded]
        layers = [self._of_tokens(flat) for flat in whole]
        total = torch.zeros((), dtype=torch.float64)
        for flat, with_padding, own in zip(layers, whole, self.assigned, strict=True):
            total = total + self.z_loss * flat.logsumexp(-1).square().sum() / (len(layers) * self.rows)
            if self.kind in ("global", "layer"):
                share = (own if self.kind == "layer" else self.assigned.mean(0)) / self.rows
                even = len(own) * (flat.softmax(-1) * share).sum() / self.rows
                total = total + coefficient * even / len(layers)
            if self.kind == "sequence":
                kept = torch.ones(len(with_padding), dtype=torch.bool) if self.is_token is None else self.is_token
                cuts = zip(with_padding.chunk(samples), kept.chunk(samples), strict=True)
                parts = [self._balance(part[of_part]) for part, of_part in cuts]
                total = total + coefficient * sum(parts, total.new_zeros(())) / (len(layers) * of_step)
        if self.kind == "model":
            total = total + coefficient * self._balance(torch.cat(layers)) * samples / of_step
        return total

    def _of_tokens(self, flat: Tensor) -> Tensor:
        """Return the rows [tokens, .] of a forward that hold tokens."""
        return flat if self.is_token is None else flat[self.is_token]

    def _balance(self, flat: Tensor) -> Tensor:
        """Return transformers' loss of logits [tokens, experts] of whatever layers."""
        best = flat.softmax(-1).topk(self.chosen, -1).indices
        chosen = nn.functional.one_hot(best, flat.shape[-1]).sum(1).double()
        return (chosen.mean(0) * flat.softmax(-1).mean(0)).sum() * flat.shape[-1]

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

    def _count_behind(self, bias: str, owner: str) -> Any:
        """Watch the experts beside a router, or of the layer that owns its bias."""
        layers = [self.model.get_submodule(name) for name in (owner, owner.rpartition(".")[0])]
        layer = next(layer for layer in layers if hasattr(layer, "experts"))

        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            counts = torch.bincount(self._of_tokens(args[1]).flatten(), minlength=self.model.get_buffer(bias).numel())
            self.routed[bias] = self.routed.get(bias, 0) + counts

        experts: nn.Module = layer.get_submodule("experts")
        return experts.register_forward_pre_hook(count)

    def biases(self) -> dict[str, Tensor]:
        """Return copies of all correction biases, by name."""
        return {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if name.rpartition(".")[2] == CORRECTION_BIAS
        }

    def set_biases(self, biases: Mapping[str, Tensor]) -> None:
        """Put values back into the correction biases."""
        for name, values in biases.items():
            self.model.get_buffer(name).copy_(values)

    def move_biases(self) -> None:
        """Move every correction bias against what was counted."""
        for name, counts in self.routed.items():
            bias = self.model.get_buffer(name)
            bias += self.rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)
