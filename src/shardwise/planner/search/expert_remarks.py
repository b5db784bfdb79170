"""The experts of the best layout in words: what is assumed of their load, and whether rows or weights should travel.

With weights gathered in forward and backward in b bytes a number and gradients reduced in r, a layer of E gated experts
of width I moves 3·H·I·E·(2b + r) bytes a microbatch. Exchanging rows moves 4·k·T·H·b for T tokens that go to k experts
each: to them and back, forward and backward. Both are equal at T* = 3·I·E·(2b + r) / (4·k·b) tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.job.axes import Axis
from shardwise.planner.formulas.compute import BYTES, tokens_of
from shardwise.planner.formulas.memory import estimate, worst_imbalance
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.search.search import Candidate, SearchResult

GIB = 2**30


def break_even_tokens(configuration: TrainingConfiguration) -> float:
    """Return T*, tokens of a rank's microbatch: beyond it, gathering a layer's experts moves less than their rows."""
    model, size = configuration.model, BYTES[configuration.precision]
    weights = (3 if model.gated else 2) * model.expert_width * model.experts
    return weights * (2 * size + BYTES[configuration.reduction]) / (4 * model.experts_of_token * size)


def expert_remarks(result: SearchResult) -> Iterator[str]:
    """Yield what is to be said of the experts of the first layout; nothing for a model without stacks of experts."""
    candidates = result.ranked or result.misfits
    if not candidates or not candidates[0].configuration.model.stacked:
        return
    first = candidates[0]
    tokens, even = tokens_of(first.configuration), break_even_tokens(first.configuration)
    less = "their rows" if tokens < even else "their weights"
    yield (
        f"experts: gathering a layer's weights and exchanging its rows move as many bytes at T* = {even:,.0f} tokens "
        f"of a rank and microbatch; the first layout has {tokens:,}, where {less} are less"
    )
    if first.plan.degrees[Axis.EXPERT] > 1:
        yield _load(first, result)


def _load(candidate: Candidate, result: SearchResult) -> str:
    """Say what imbalance is assumed, and the memory with it and at the worst."""
    facts, assumed = result.question.facts, candidate.configuration.imbalance
    worst = worst_imbalance(candidate.plan, facts)
    sizes = [
        estimate(candidate.plan, facts, imbalance=load).total / GIB for load in (min(assumed, worst), max(1.0, worst))
    ]
    return (
        f"experts: the fullest rank is taken to get {assumed:g} times the mean of the rows, and its closed form is "
        f"then {sizes[0]:.2f} GiB; were all tokens sent to its experts ({worst:g} times), {sizes[1]:.2f} GiB"
    )
