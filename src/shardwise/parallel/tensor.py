"""Tensor parallelism on plain local tensors (Megatron-LM, arXiv 1909.08053, section 3).

A split module keeps its part of the weight. Two autograd collectives stand at the borders of a region: a column module
needs the whole input, so its input's gradient is summed in backward; a row module makes a partial output, so that is
summed in forward, and its bias is added once, after the sum. Nothing else of the model's code changes: attention sees
fewer heads, and views with -1 adapt to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.families.facts import TensorSplit
from shardwise.layout import Layout
from shardwise.parallel.tensor_map import Cut

# Attributes that say how wide a part is: of attention modules that cut a fused projection, and of Conv1D's output.
WIDTHS = ("split_size",)
OUTPUTS = ("out_features", "nf")


class _Enter(torch.autograd.Function):
    """The identity whose gradient is summed over the tensor group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over the tensor group, whose gradient is each part's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def split_tensors(model: nn.Module, splits: Mapping[str, TensorSplit], layout: Layout) -> dict[str, Cut]:
    """Cut the modules of `splits` (on the meta device) to this rank's part; parameter name -> how it was cut."""
    group = layout.group("tensor")
    degree, index = layout.size("tensor"), layout.index("tensor")
    cuts: dict[str, Cut] = {}
    for name, split in splits.items():
        module = model.get_submodule(name)
        for leaf, dim in _cut_parameters(module, split).items():
            parameter = module._parameters[leaf]
            assert parameter is not None
            cut = Cut(tuple(parameter.shape), dim, split.sections, degree, index)
            local = parameter.new_empty(cut.local_shape())
            module._parameters[leaf] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            cuts[f"{name}.{leaf}"] = cut
        if split.kind == "row":
            _sum_output(module, split, group)
        else:
            _narrow(module, OUTPUTS, cuts[f"{name}.weight"])
    for region in sorted({name.rpartition(".")[0] for name in splits}):
        _enter(model.get_submodule(region), degree, group)
    return cuts


def _cut_parameters(module: nn.Module, split: TensorSplit) -> dict[str, int]:
    """Leaf name -> dim; the bias of a row module belongs to the sum and stays whole."""
    biased = split.kind == "column" and module._parameters.get("bias") is not None
    return {"weight": split.dim} | ({"bias": 0} if biased else {})


def _sum_output(module: Any, split: TensorSplit, group: dist.ProcessGroup) -> None:
    """A row module's product, summed, then its bias. Its weight is [out, in], or [in, out] where `dim` is 0."""

    def forward(values: Tensor) -> Tensor:
        weight = module.weight.T if split.dim == 0 else module.weight
        total: Tensor = _Leave.apply(F.linear(values, weight), group)
        return total if module.bias is None else total + module.bias

    module.forward = forward


def _narrow(module: Any, names: Sequence[str], cut: Cut) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, cut.local_shape()[cut.dim])


def _enter(region: Any, degree: int, group: dist.ProcessGroup) -> None:
    """Lead the region's first input, positional or `hidden_states`, through `_Enter`; tell it how wide its part is."""
    inner: Callable[..., Any] = region.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_Enter.apply(args[0], group), *args[1:])
        else:
            kwargs["hidden_states"] = _Enter.apply(kwargs["hidden_states"], group)
        return inner(*args, **kwargs)

    region.forward = forward
    for name in WIDTHS:
        if isinstance(getattr(region, name, None), int):
            setattr(region, name, getattr(region, name) // degree)


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
