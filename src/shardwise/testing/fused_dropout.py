"""Attention dropout inside fused kernels: its masks depend on the layout, so it is off, and its rate is judged.

Torch's fused kernel is asked for a probability by the engine and by the model's own attention; both have to be one. The
rate that a probability really has is measured, by its zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.tracing import is_fake
from shardwise.kernels.attention import interface
from shardwise.kernels.attention.call import AttentionCall
from shardwise.testing.comparison import Difference

PROBE = 128  # positions of the attention by which a rate is measured: 16,384 draws
SIGMAS = 6.0  # of the measurement, by which a rate may be off


@dataclass
class FusedRates:
    """Rates that were met, each with the probability that was asked for."""

    ours: dict[float, float] = field(default_factory=dict)
    oracle: dict[float, float] = field(default_factory=dict)
    is_oracle: bool = False  # whose forward runs now

    @contextmanager
    def of_oracle(self) -> Iterator[None]:
        """Count what is asked inside as the oracle's."""
        self.is_oracle = True
        try:
            yield
        finally:
            self.is_oracle = False

    def note(self, probability: float, rate: Callable[[], float]) -> None:
        """Keep a probability with its rate."""
        rates = self.oracle if self.is_oracle else self.ours
        if probability > 0 and probability not in rates:
            rates[probability] = rate()

    def compare(self, step: int) -> list[Difference]:
        """Compare the engine's rates with the probabilities that the model's own attention asks for."""
        if not self.oracle or not self.ours:
            return []
        allowed = SIGMAS * math.sqrt(0.25 / PROBE**2)
        wrong = [
            rate for rate in self.ours.values() if min(abs(rate - probability) for probability in self.oracle) > allowed
        ]
        right = ", ".join(f"{probability:g}" for probability in self.oracle)
        sentence = f"the fused kernel drops {wrong[0]:.2g} of attention, not {right}" if wrong else ""
        return [Difference(step, "dropout", sentence, math.inf if wrong else 0.0, 0.0)]


@contextmanager
def fused_dropout_off(exact: bool) -> Iterator[FusedRates]:
    """Inside, scaled_dot_product_attention drops nothing, in every thread (recomputation has its own).

    Args:
        exact: attention dropout of the job is equal on every layout, and stays. Else other kernels of ours drop nothing
            either: the model's own attention is fused in every layer.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    rates = FusedRates()

    def without(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        if not is_fake(query):  # shapes that travel between stages are read off a forward that computes nothing
            rates.note(dropout_p, lambda: _rate(original, query, dropout_p))
        output: Tensor = original(query, key, value, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal, **rest)
        return output

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", without))
        if not exact:
            _exact_kernels_off(stack)
        yield rates


def _exact_kernels_off(stack: ExitStack) -> None:
    """Let kernels whose dropout is no fused one's drop nothing; which kernel runs stays as it is."""
    run, own_eager = interface.run_attention, interface._own_eager

    def run_attention(call: AttentionCall, kernel: str = "auto") -> Tensor:
        chosen = interface.kernel_of_call(call, kernel).kernel
        return run(call, kernel) if chosen.dropout == "own" else run(replace(call, dropout=0.0), chosen.name)

    def run_eager(module: nn.Module, call: AttentionCall, *biases: Tensor | None) -> Tensor:
        return own_eager(module, replace(call, dropout=0.0), *biases)

    stack.enter_context(mock.patch.object(interface, "run_attention", run_attention))
    stack.enter_context(mock.patch.object(interface, "_own_eager", run_eager))


@torch.no_grad()
def _rate(attend: Callable[..., Tensor], like: Tensor, probability: float) -> float:
    """Return the share of attention that `attend` drops: of equal probabilities on values that tell keys apart."""
    with accelerator.generators_kept(like.device):
        equal = torch.zeros(1, 1, PROBE, PROBE, dtype=torch.float32, device=like.device)
        keys = torch.eye(PROBE, device=like.device)[None, None]
        return float((attend(equal, equal, keys, dropout_p=probability) == 0).float().mean())
