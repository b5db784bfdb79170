"""Routers of experts in a step: how much each expert was used, and the losses and biases that follow from it.

All of it is defined over the tokens of the optimizer step, whichever ranks and microbatches hold them, so that it is a
number of the job and not of the layout. With f_e the share of expert e in the choices of all layers and tokens, and p_e
its mean probability, the balancing loss is E · Σ f_e · p_e (Switch Transformers, arXiv 2101.03961, equations 4 to 6).
transformers takes it over all layers at once; by layer, each has its own, and the loss is their mean. f is a constant,
so its gradient to a token's probabilities is E · f_e / R for all R rows of the step. f has to be known before the first
backward: where a step is one microbatch, after its forward; else a forward of all microbatches goes ahead, which
computes nothing but routes.

`router.balancing_loss` may also ask for a loss of each microbatch or sequence: `shardwise.parallel.local_balancing`.

The gradient enters where a router's weights reach its experts: they are what backward comes from on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.autograd import number_of_backward
from shardwise.collectives.names import CollectiveName
from shardwise.job.devices import widest_float
from shardwise.kernels.dropout import DropoutScope, active_scope
from shardwise.parallel.local_balancing import LocalBalancing

ROUTES = CollectiveName("the routes of a step", "world", "all_reduce")


class RouterTotals(NamedTuple):
    """Sums over the tokens of a step, on all ranks.

    Attributes:
        balancing_loss: before its coefficient; 0 where it is not asked for.
        load: by stack of experts, the most used expert's rows over the mean.
        idle: share of the experts of all stacks that got no row.
    """

    balancing_loss: float
    load: Mapping[str, float]
    idle: float


class ExpertRouters:
    """The routers of this rank's stages, in training.

    Args:
        stacks: names of all stacks of experts of the model, in order; each rank has some.
        number: experts of each.
        balancing, z_loss: coefficients; 0 leaves the loss out.
        counts_once: whether this rank's tokens are counted, or those of another that holds the same.
        device: of the sums.
        dtype: of gradients before they are rounded to that of the logits, fp32 or wider.
        local: the balancing loss where it is not of the whole step; `balancing` is 0 then.
        by_layer: whether the balancing loss is the mean of the layers' own, or one over all layers.

    Attributes:
        loss_scale: factor of all gradients of the step, which those of the routers' losses have too.
    """

    def __init__(
        self,
        stacks: Sequence[str],
        number: int,
        balancing: float,
        z_loss: float,
        counts_once: bool,
        device: torch.device,
        dtype: torch.dtype,
        local: LocalBalancing | None = None,
        by_layer: bool = False,
    ) -> None:
        self.local, self.by_layer = local, by_layer
        self.stacks, self.number = tuple(stacks), number
        self.balancing, self.z_loss = balancing, z_loss
        self.counts_once, self.device, self.dtype = counts_once, device, dtype
        self.wide = widest_float(device)  # fp64 holds counts of any step exactly, as fp32 does not beyond 2^24
        self.loss_scale = 1.0
        self._counting = False
        # Of a token's probabilities, by stack.
        self._share_gain = torch.zeros(len(self.stacks), number, dtype=dtype, device=device)
        self._z_gain = torch.zeros((), dtype=dtype, device=device)
        self._forget()

    @property
    def needs_totals(self) -> bool:
        """True where gradients need the totals of the step."""
        return bool(self.balancing or self.z_loss)

    def _forget(self) -> None:
        """Drop the sums of the step before."""
        self.routed = torch.zeros(len(self.stacks), self.number, dtype=torch.int64, device=self.device)
        self._shares = torch.zeros(2, *self.routed.shape, dtype=self.wide, device=self.device)
        self._rows = torch.zeros(len(self.stacks), 1, dtype=self.wide, device=self.device)

    def begin(self, sequences: int = 0) -> None:
        """Count from here on, until `settle`; `sequences`: real ones of this rank's step. Collective with `local`."""
        self._forget()
        self._counting = True
        if self.local is not None:
            total = torch.tensor(float(sequences), dtype=self.wide, device=self.device)
            with ROUTES:
                dist.all_reduce(total)
            self.local.begin(total)

    def settle(self) -> None:
        """Sum what was counted over all ranks, and derive the gradients' gains from it. Collective; once a step."""
        if not self._counting:
            return
        self._counting = False
        sums = torch.cat([self.routed.flatten().to(self.wide), self._shares.flatten(), self._rows.flatten()])
        sums = sums * self.counts_once
        with ROUTES:
            dist.all_reduce(sums)
        routed, shares, rows = sums.split([self.routed.numel(), self._shares.numel(), self._rows.numel()])
        self.routed = routed.view_as(self.routed).round().to(torch.int64)
        self._shares, self._rows = shares.view_as(self._shares), rows.view_as(self._rows)
        self._z_gain = (self.z_loss / rows.sum().clamp(min=1)).to(self.dtype)
        choices, _, rows = self._balanced()
        gain = self.balancing * self.number * choices / (len(rows) * rows.square())
        self._share_gain = gain.to(self.dtype).expand_as(self.routed)

    def _balanced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return choices and probabilities [n, experts], and rows [n, 1], of each balance: by layer, or of all."""
        choices, probabilities, rows = *self._shares, self._rows
        if not self.by_layer:
            choices, probabilities, rows = (values.sum(0, keepdim=True) for values in (choices, probabilities, rows))
        return choices, probabilities, rows.clamp(min=1)

    def measured(self) -> Tensor:
        """Return the totals of the step that was settled last, on the device. Collective with `local`."""
        load = self.routed.amax(1) / self.routed.to(self.wide).mean(1).clamp(min=1e-12)
        idle = (self.routed == 0).to(self.wide).mean()
        return torch.cat([self._balancing_loss().to(self.wide).view(1), idle.view(1), load])

    def totals(self, measured: Sequence[float]) -> RouterTotals:
        """Return the totals, of the values that were `measured`."""
        balancing_loss, idle, *load = measured
        return RouterTotals(balancing_loss, dict(zip(self.stacks, load, strict=True)), idle)

    def _balancing_loss(self) -> Tensor:
        if self.local is not None:
            loss = self.local.loss() * self.counts_once
            with ROUTES:
                dist.all_reduce(loss)
            return loss
        choices, probabilities, rows = self._balanced()
        loss = self.number * (choices * probabilities / rows.square()).sum() / len(rows)
        return loss if self.balancing else torch.zeros_like(loss)

    # --- called in the model's forward

    def route(self, stack: str, logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return `weights`, through which the gradients of the router's losses enter in backward.

        Args:
            stack: the experts that are about to be called.
            logits: [..., experts] of the router.
            experts, weights: [T, k].
        """
        logits, number = logits.flatten(0, -2), self.stacks.index(stack)
        counted = counted_tokens(active_scope(), len(logits), logits.device)
        is_first = number_of_backward() < 0  # not a recomputation
        if self._counting and is_first:
            self._count(number, logits.detach(), experts, counted)
        if not ((self.needs_totals or self.local) and torch.is_grad_enabled()):
            return weights
        share_gain: Callable[[Tensor], Tensor] = partial(self._gain_of_step, number)
        if self.local is not None:
            sequences, chosen = sequences_of(active_scope()), experts.shape[1]
            if is_first:
                self.local.count(logits.detach(), counted, sequences, chosen)
            routes = self.local.current()
            share_gain = partial(
                self.local.share_gain, counted=counted, sequences=sequences, chosen=chosen, routes=routes
            )
        if not weights.requires_grad:
            return weights
        attached: Tensor = _RouterLosses.apply(weights, logits, counted, share_gain, self)
        return attached

    def _gain_of_step(self, number: int, logits: Tensor) -> Tensor:
        return self._share_gain[number]

    def _count(self, number: int, logits: Tensor, experts: Tensor, counted: Tensor) -> None:
        """Add a microbatch's tokens of one layer."""
        self.routed[number].scatter_add_(
            0, experts.flatten(), counted.to(torch.int64).repeat_interleave(experts.shape[1])
        )
        if not self.needs_totals:
            return
        weights, chosen = counted.to(self.wide), experts.shape[1]
        choices = logits.softmax(-1).topk(chosen, -1).indices
        self._shares[0, number].scatter_add_(0, choices.flatten(), weights.repeat_interleave(chosen))
        self._shares[1, number] += (logits.to(self.dtype).softmax(-1) * weights[:, None]).sum(0)
        self._rows[number] += weights.sum()

    def gradient(self, logits: Tensor, counted: Tensor, share_gain: Tensor) -> Tensor:
        """Return the gradient [T, experts] of both losses to the logits, times the loss scale.

        Args:
            logits: [T, experts].
            counted: [T].
            share_gain: the gradient to a token's probabilities, [T, experts] or [experts] for all tokens.
        """
        wide = logits.to(self.dtype)
        probabilities = wide.softmax(-1)
        gradient = probabilities * (share_gain - (probabilities * share_gain).sum(-1, keepdim=True))
        if self.z_loss:
            gradient += 2 * self._z_gain * wide.logsumexp(-1, keepdim=True) * probabilities
        return (gradient * (counted[:, None] * self.loss_scale)).to(logits.dtype)


class _RouterLosses(torch.autograd.Function):
    """Weights as they are; in backward the logits get the gradient of the router's losses."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        logits: Tensor,
        counted: Tensor,
        share_gain: Callable[[Tensor], Tensor],
        routers: ExpertRouters,
    ) -> Tensor:
        ctx.save_for_backward(logits, counted)
        ctx.share_gain, ctx.routers = share_gain, routers
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        logits, counted = ctx.saved_tensors
        return gradients[0], ctx.routers.gradient(logits, counted, ctx.share_gain(logits)), None, None, None


def sequences_of(scope: DropoutScope | None) -> int:
    """Return how many sequences the microbatch whose forward runs has, repeated rows among them."""
    return 1 if scope is None or scope.counted is None else len(scope.counted)


def counted_tokens(scope: DropoutScope | None, tokens: int, device: torch.device) -> Tensor:
    """Return [tokens] bool: tokens of real rows; repeated rows do not count, nor what fills up rows or their parts."""
    if scope is None or scope.counted is None:
        return torch.ones(tokens, dtype=torch.bool, device=device)
    rows = scope.counted[:, None]
    first, end = scope.positions or (0, None)  # with sequence parallelism, of the tensor rank
    is_token = None if scope.is_token is None else scope.is_token[:, first:end]
    if is_token is None or is_token.numel() != tokens:  # a mask of other sequences, such as an encoder's
        return rows.expand(-1, tokens // len(rows)).flatten()
    return (rows & is_token).flatten()


def updated_bias(bias: Tensor, routed: Tensor, rate: float) -> Tensor:
    """Return the bias of a router's scores [experts] behind a step that sent `routed` tokens to each expert.

    b + rate · sign(mean of routed - routed): DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    below = routed.to(widest_float(routed.device)).mean() - routed
    return bias + rate * below.sign().to(bias.dtype)
