"""Experts computed on rows that are sorted by expert, and the rows' way from tokens and back.

transformers' experts take tokens with the numbers and weights of their experts: they copy, sort, weight and sum. Rows
that have travelled to their experts are copies already and have no weight there, so that most of this is left out. The
first kernel of `KERNELS` that serves a stack computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise._torch_compat import accelerator
from shardwise.job.devices import Feature, device_kind
from shardwise.model.experts import ExpertCall, ungrouped_reason

ExpertForward = Callable[..., Tensor]  # of transformers, which takes what `ExpertCall` says
GROUPED_CAPABILITY = (8, 0)  # of a GPU, from which on torch has grouped products


@dataclass(frozen=True)
class SortedExperts:
    """A stack of experts, called with rows that are sorted by expert.

    Attributes:
        stack: the module, with its experts of this rank.
        forward: its own, as it was before anything was put around it.
        call: what that takes.
    """

    stack: nn.Module
    forward: ExpertForward
    call: ExpertCall = ExpertCall.ROUTED

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs [R, H] of `rows` [R, H], of which each expert has `counts` [experts]; R > 0."""
        kernel = next(kernel for kernel in KERNELS if kernel.serves(self, rows))
        return kernel.compute(self, rows, counts)


class ExpertKernel(NamedTuple):
    """A way to compute a stack of experts on sorted rows."""

    name: str
    serves: Callable[[SortedExperts, Tensor], bool]
    compute: Callable[[SortedExperts, Tensor, Tensor], Tensor]


def _serves_grouped(experts: SortedExperts, rows: Tensor) -> bool:
    """Return True where the stack's own forward would take grouped products, and torch has them."""
    own = getattr(experts.forward, "__self__", None) is experts.stack
    return own and not grouped_obstacle(experts.stack, rows.device)


def grouped_obstacle(stack: nn.Module, device: torch.device) -> str:
    """Return why `stack` is not computed by grouped products on `device`; empty where it is."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < GROUPED_CAPABILITY:
        return f"a GPU of capability {capability[0]}.{capability[1]} has no grouped products, from 8.0 on"
    return device_kind(device.type).supports(Feature.GROUPED).reason or ungrouped_reason(stack)


def _grouped(experts: SortedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute all experts at once, by a product of groups of rows for each of their layers."""
    stack: Any = experts.stack
    ends = counts.cumsum(0).to(torch.int32)

    def linear(values: Tensor, name: str) -> Tensor:
        weight = getattr(stack, name)
        weight = weight if stack.is_transposed else weight.transpose(-2, -1)
        product: Tensor = F.grouped_mm(values.to(weight.dtype), weight, offs=ends)
        if not stack.has_bias:
            return product
        return product + getattr(stack, f"{name}_bias").repeat_interleave(counts, 0, output_size=len(values))

    inner = stack._apply_gate(linear(rows, "gate_up_proj")) if stack.has_gate else stack.act_fn(linear(rows, "up_proj"))
    outputs = linear(inner, "down_proj")
    if getattr(stack, "has_post_expert_norm", False):  # transformers 5.24 has it, 5.17 has not
        outputs = stack.post_expert_norm(outputs)
    return outputs.to(rows.dtype)


def _by_own_forward(experts: SortedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    if experts.call is ExpertCall.SORTED:
        return experts.forward(rows, counts.tolist())
    if experts.call is ExpertCall.DENSE:
        return _by_dense_forward(experts, rows, counts)
    numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
    return experts.forward(rows, numbers[:, None], rows.new_ones(len(rows), 1)).flatten(0, -2)


def _by_dense_forward(experts: SortedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute [experts * most, H], in which an expert's rows are filled up with zeros."""
    number, most = len(counts), int(counts.max())
    firsts = torch.arange(number, device=rows.device) * most - (counts.cumsum(0) - counts)
    places = torch.arange(len(rows), device=rows.device)
    places = places + firsts.repeat_interleave(counts, output_size=len(rows))
    outputs = experts.forward(sum_rows(rows, places, number * most))
    return select_rows(outputs, places)


GROUPED_PRODUCTS = ExpertKernel("grouped products", _serves_grouped, _grouped)
OWN_FORWARD = ExpertKernel("the stack's own forward", lambda experts, rows: True, _by_own_forward)
KERNELS = (GROUPED_PRODUCTS, OWN_FORWARD)


# ---- rows of tokens


def select_rows(values: Tensor, places: Tensor) -> Tensor:
    """Return row `places` [R] of `values` [T, H]; its gradient sums in fp32 or wider, in one order."""
    rows: Tensor = _SelectedRows.apply(values, places)
    return rows


def sum_rows(rows: Tensor, places: Tensor, number: int, weights: Tensor | None = None) -> Tensor:
    """Return [number, H], in which each of `rows` [R, H] is added to row `places` [R], times its weight if it has one.

    Sums are made in the order of the rows, in fp32 or wider.
    """
    total: Tensor = _SummedRows.apply(rows, places, number, weights)
    return total


def add_rows(total: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Add each of `rows` [R, H] to row `places` [R] of `total`, in their order, and return it; no autograd."""
    if accelerator.on_accelerator(rows):  # index_add_ sums in any order there
        return total.index_put_((places,), rows, accumulate=True)
    return total.index_add_(0, places, rows)


def blank_sums(rows: Tensor, number: int) -> Tensor:
    """Return zeros [number, H] in the dtype in which `rows` [R, H] are summed."""
    return rows.new_zeros(number, rows.shape[1], dtype=_wide(rows))


def in_wide_dtype(values: Tensor) -> Tensor:
    """Return `values` in the dtype in which rows are summed: fp32 or wider."""
    return values.to(_wide(values))


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


class _SelectedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.number = len(values)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,), gradient = ctx.saved_tensors, gradients[0]
        return add_rows(blank_sums(gradient, ctx.number), in_wide_dtype(gradient), places).to(gradient.dtype), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, number: int, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, *(() if weights is None else (rows, weights)))
        ctx.dtype = rows.dtype
        weighted = in_wide_dtype(rows) if weights is None else in_wide_dtype(rows) * weights[:, None]
        return add_rows(blank_sums(rows, number), weighted, places).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        places, *weighting = ctx.saved_tensors
        gradient = gradients[0].index_select(0, places)
        if not weighting:
            return gradient, None, None, None
        rows, weights = weighting
        of_weights = torch.linalg.vecdot(in_wide_dtype(rows), in_wide_dtype(gradient)).to(weights.dtype)
        return (in_wide_dtype(gradient) * weights[:, None]).to(ctx.dtype), None, None, of_weights
