"""Low-rank adapters of linear layers and of stacks of experts: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

An adapter's parameters are children of the layer that it adapts, and its arithmetic is an attribute of it, `adapter`,
which `kernels.linear` calls with the layer's product. So it goes wherever a linear layer goes: on a tensor rank the
layer's part makes a part of the output with the adapter's part, and what sums or gathers the one does the other.

Experts compute with their whole stack at once, in the model's own code. So each call of them finds the changed stack in
the place of its own (`StackUpdate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise._torch_compat.modules import replaced_parameters
from shardwise.collectives.tensor import reduce_from_region
from shardwise.kernels.packed_weights import unpacked_weight
from shardwise.model.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_shapes
from shardwise.model.facts import LayerAdapter

Multiply = Callable[[Tensor, Tensor], Tensor]  # (values [..., in], weight [out, in]) -> [..., out]


class AdapterWeight(nn.Module):
    """One parameter of an adapter, on the meta device until it is materialized."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def reset_parameters(self) -> None:
        """Fill the weight as a new adapter has it: zeros, so that the model starts as it is."""
        nn.init.zeros_(self.weight)


class DownProjection(AdapterWeight):
    """`lora_A` [rank, inputs], or [experts, rank, inputs]."""

    def reset_parameters(self) -> None:
        """Draw the weight as nn.Linear does, which is peft's rule."""
        nn.init.kaiming_uniform_(self.weight.flatten(0, -2), a=math.sqrt(5))


class LowRankProduct:
    """The arithmetic of one layer's adapter.

    Args:
        layer: nn.Linear or Conv1D with the children `lora_A`, `lora_B`, `lora_dropout` and, for DoRA,
            `lora_magnitude_vector`.
        scaling: factor of B A.
        transposed: the layer's weight is [in, out].
        group: ranks that each hold a part of the input features; None: they are whole.

    Attributes:
        is_on: whether the adapter takes part, or the layer is the one that it adapts.
    """

    def __init__(self, layer: Any, scaling: float, transposed: bool, group: dist.ProcessGroup | None = None) -> None:
        self.layer, self.scaling, self.transposed, self.group = layer, scaling, transposed, group
        self.is_on = True

    def __call__(self, values: Tensor, product: Tensor, multiply: Multiply) -> Tensor:
        """Return the adapted product [..., out] of `values` [..., in], whose own product is `product`.

        That may hold the bias, unless `scales_rows`. `multiply` makes products of `values` themselves.
        """
        if not self.is_on:
            return product
        layer, dropped = self.layer, self.layer.lora_dropout(values)
        if dropped is not values:
            multiply = F.linear
        low = multiply(dropped, layer.lora_A.weight)
        if not self.scales_rows:
            return self._updated(product, low)
        length = (layer.lora_magnitude_vector.weight / self.row_lengths()).to(product.dtype)
        if dropped is values:
            return length * self._updated(product, low)
        # As peft has it: the part that goes through dropout is the difference to the layer's own product.
        base = F.linear(dropped, self._weight(dropped.dtype))
        return product - base + length * self._updated(base, low)

    @property
    def scales_rows(self) -> bool:
        """True where the layer's own product is multiplied too (DoRA), so that its bias has to come afterwards."""
        return hasattr(self.layer, MAGNITUDE)

    def _updated(self, product: Tensor, low: Tensor) -> Tensor:
        """Return product + scaling * low B^T in one operation: on a CPU each more pass costs as much as it."""
        rows, up = product.reshape(-1, product.shape[-1]), self.layer.lora_B.weight
        return torch.addmm(rows, low.reshape(-1, low.shape[-1]), up.T, alpha=self.scaling).view(product.shape)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """The layer's weight, [out, in], in `dtype`."""
        packing: str | None = getattr(self.layer, "packing", None)
        own: Tensor = self.layer.weight
        weight = own.to(dtype) if packing is None else unpacked_weight(own, packing, dtype)
        return weight.T if self.transposed else weight

    @torch.no_grad()
    def row_lengths(self) -> Tensor:
        """Return the length [out] of each row of W + scaling * B A, in fp32 or wider.

        It is taken as a constant in backward (arXiv 2402.09353, section 4.3). |w + s b A|^2 is written as
        |w|^2 + 2 s b (A w) + s^2 b (A A^T) b, so that B A is never made; parts of the input features are summed.
        """
        factors = self._factors()
        wide = torch.promote_types(factors[0].dtype, torch.float32)
        weight, (down, up) = self._weight(wide), (factor.to(wide) for factor in factors)
        cross = (weight @ down.T) * up
        square = ((up @ (down @ down.T)) * up).sum(1)
        total = weight.square().sum(1) + 2 * self.scaling * cross.sum(1) + self.scaling**2 * square
        return (total if self.group is None else reduce_from_region(total, self.group)).sqrt()

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.layer.lora_A.weight, self.layer.lora_B.weight


class StackUpdate:
    """The arithmetic of the adapters of one module of experts: W + scaling * B A in the place of each adapted stack W.

    Args:
        experts: the module, with a child `stack_adapters` that holds the adapters by the names of their stacks.
        scalings: stack's name -> factor of its B A.

    Attributes:
        is_on: whether the adapters take part, or the experts are the ones that they adapt.
    """

    def __init__(self, experts: Any, scalings: dict[str, float]) -> None:
        self.experts, self.scalings, self.forward = experts, scalings, experts.forward
        self.is_on = True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the experts with their changed stacks, which autograd keeps until backward."""
        if not self.is_on:
            return self.forward(*args, **kwargs)
        with replaced_parameters(self.experts, {leaf: self._changed(leaf) for leaf in self.scalings}):
            return self.forward(*args, **kwargs)

    def _changed(self, leaf: str) -> Tensor:
        stack, adapter = getattr(self.experts, leaf), self.experts.stack_adapters[leaf]
        return torch.baddbmm(stack, adapter.lora_B.weight, adapter.lora_A.weight, alpha=self.scalings[leaf])


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the layers of `modules` be what they are without their adapters inside."""
    layers = [getattr(layer, "adapter", None) for module in modules for layer in module.modules()]
    adapters = [adapter for adapter in layers if isinstance(adapter, LowRankProduct | StackUpdate)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def add_adapter_weights(layer: nn.Module, adapter: LayerAdapter, dtype: torch.dtype) -> None:
    """Give a layer on the meta device, or what stands for a stack of experts, the parameters of an adapter."""
    classes = {LORA_A: DownProjection, LORA_B: AdapterWeight, MAGNITUDE: AdapterWeight}
    for name, shape in adapter_shapes("", adapter).items():
        owner = name.split(".")[1]
        layer.add_module(owner, classes[owner](shape, dtype))
