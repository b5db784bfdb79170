"""The dtypes that were met, against the plan's: of compute, loss, reduction, master weights and optimizer state.

A number made in 16 bits and widened afterwards has the dtype that was promised; it shows by holding numbers of 16 bits
alone, where the oracle's own do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.kernels.precision import torch_dtype
from shardwise.plan.plan import Plan
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import Difference
from shardwise.testing.oracle import Oracle
from shardwise.testing.oracle_rounding import RoundedStep
from shardwise.testing.precision_record import COARSE, holds_numbers_of

EXACT = 0.05  # of the noise of 16 bits: what is nearer to fp32 than that was computed in it


def compare_dtypes(plan: Plan, ours: Captured, oracle: Oracle, is_first: bool) -> list[Difference]:
    """Return a difference for each role, named by a sentence where it is wrong; the oracle has made the same update.

    `is_first` says that no step before has updated the model: in fp16 those before it may have overflowed.
    """
    sentences = {
        "compute": _compute(plan, ours),
        "reduction": _unlike("gradients are summed over ranks in", "reduction", plan, ours),
        "sums": _coarse_sums(plan, ours, oracle),
        "loss": "" if oracle.narrows_logits else _loss(plan, ours, is_first),
        "parameters": _unlike("master weights are in", "parameters", plan, ours)
        or _coarse_parameters(plan, ours, oracle),
        "optimizer": _unlike("the optimizer's state is in", "optimizer", plan, ours)
        or _coarse_state(plan, ours, oracle),
    }
    return [difference(ours.step, role, sentence) for role, sentence in sentences.items()]


def difference(step: int, role: str, sentence: str) -> Difference:
    """Return the difference of a role: its name is the sentence that says what is wrong, if something is."""
    return Difference(step, "dtype", sentence or role, math.inf if sentence else 0.0, 0.0)


def compare_exactness(plan: Plan, ours: Captured, rounded: RoundedStep) -> list[Difference]:
    """Return a difference that disagrees where gradients of a 16-bit job lack the noise of 16 bits."""
    names = [name for name in rounded.wide if name in ours.gradients]
    apart = math.hypot(*(float((ours.gradients[n].double() - rounded.wide[n].double()).norm()) for n in names))
    compute = plan.dtypes.compute
    is_exact = apart < EXACT * rounded.least_noise
    sentence = f"gradients are as exact as fp32's: they are not computed in {compute}, as the plan says"
    return [difference(ours.step, "compute", sentence if is_exact else "")]


def _compute(plan: Plan, ours: Captured) -> str:
    return "" if plan.float8 else _unlike("blocks compute in", "compute", plan, ours)


def _loss(plan: Plan, ours: Captured, is_first: bool) -> str:
    return _unlike("the loss is taken in", "loss", plan, ours) or _coarse_loss(plan, ours, is_first)


def _unlike(what: str, role: str, plan: Plan, ours: Captured) -> str:
    """Return what is said of a dtype that is not the plan's."""
    planned = torch_dtype(getattr(plan.dtypes, role))
    for rank, record in enumerate(ours.precision):
        for dtype, where in getattr(record, role).items():
            if dtype != planned:
                name = str(dtype).removeprefix("torch.")
                return f"{what} {name} ({where}, rank {rank}), {getattr(plan.dtypes, role)} belongs there"
    return ""


def _coarse_loss(plan: Plan, ours: Captured, is_first: bool) -> str:
    if plan.job.reads_pairs and is_first:  # the model is its reference yet, and the loss ipo a plain fraction
        return ""
    losses = [loss for record in ours.precision if record.loss for loss in record.losses if loss]
    for dtype in COARSE if losses else ():
        if all(float(torch.tensor(loss, dtype=torch.float64).to(dtype)) == loss for loss in losses):
            return f"losses are numbers of {_named(dtype)}, {plan.dtypes.loss} belongs there"
    return ""


def _coarse_sums(plan: Plan, ours: Captured, oracle: Oracle) -> str:
    """Judge sums of several microbatches: the gradient of one may hold numbers of 16 bits."""
    if plan.data_ranks * plan.accumulation_of(ours.step) == 1 or len(oracle.rows_of(ours.step)) <= plan.microbatch:
        return ""
    return _coarser("sums of gradients hold", plan.dtypes.reduction, ours.gradients, oracle.gradients)


def _coarse_parameters(plan: Plan, ours: Captured, oracle: Oracle) -> str:
    return _coarser("master weights hold", plan.dtypes.parameters, ours.parameters, oracle.parameters)


def _coarse_state(plan: Plan, ours: Captured, oracle: Oracle) -> str:
    for name in dict.fromkeys(name for record in ours.precision for name in record.coarse_state):
        kept = [record.coarse_state[name] for record in ours.precision if name in record.coarse_state]
        states = [state[name] for state in oracle.optimizer.state.values() if name in state]
        for dtype in COARSE:
            if all(dtype in coarse for coarse in kept) and not holds_numbers_of(dtype, states):
                return f"the optimizer's {name} holds numbers of {_named(dtype)}, {plan.dtypes.optimizer} belongs there"
    return ""


def _coarser(what: str, planned: str, ours: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> str:
    for dtype in COARSE:
        if holds_numbers_of(dtype, list(ours.values())) and not holds_numbers_of(dtype, list(oracle.values())):
            return f"{what} numbers of {_named(dtype)}, {planned} belongs there"
    return ""


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
