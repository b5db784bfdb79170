"""Tells by a trial whether a mixer of states can be shared by heads or channels.

The mixer runs with few hidden features and weights drawn at random, once whole and once in parts, as ranks have them.
What these exchange inside of the region, sums of projections and means of a norm, is known behind a first run of all
parts; the second makes their outputs, which add up to the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise._torch_compat import accelerator
from shardwise.model.mixer_parts import FeatureMeans, part_sizes, running_in_part
from shardwise.model.tensor_split import TensorSplit

HIDDEN, POSITIONS = 6, 5
CHUNK = "chunk_size"  # attribute of a mixer whose scan goes chunk by chunk, each filled up
NEAR = 1e-4  # of the largest number: mixers compute in fp32 whatever they are given


def parts_make_the_whole(mixer: nn.Module, splits: Mapping[str, TensorSplit], degree: int) -> bool:
    """Return whether parts of a mixer, whose parameters are on the meta device, add up to the whole.

    Args:
        splits: of its modules by the names in it, its own by "".
        degree: how many parts there are.
    """
    for device in dict.fromkeys((accelerator.HOST, accelerator.available())):  # some packages compute on GPUs alone
        with suppress(Exception), torch.no_grad():  # any code may run in a model's forward
            return _Trial(mixer, splits, degree, device).agrees()
    return False


class _Trial:
    """One mixer, whole and in parts."""

    def __init__(self, mixer: nn.Module, splits: Mapping[str, TensorSplit], degree: int, device: str) -> None:
        self.splits, self.degree = splits, degree
        self.draw = torch.Generator().manual_seed(0)
        self.whole = self._with_weights(mixer, device)
        self.hidden = self._drawn((1, POSITIONS, HIDDEN), device)
        self.met: dict[tuple[str, int], list[Tensor]] = {}  # what parts bring to each other, in the first run

    def agrees(self) -> bool:
        """Run all, and tell whether the parts add up."""
        whole = self.whole(self.hidden)
        first = list(self._outputs(is_first=True))
        parts = sum(self._outputs(is_first=False))
        assert len(first) == self.degree and isinstance(parts, Tensor)
        return parts.shape == whole.shape and bool((parts - whole).abs().max() <= NEAR * whole.abs().max())

    def _with_weights(self, mixer: nn.Module, device: str) -> Any:
        """Return a copy with random weights and buffers, without biases on its output, which is a sum of parts."""
        small: Any = copy.deepcopy(mixer).eval()
        for name, parameter in list(small.named_parameters()):
            shape = list(parameter.shape)
            if name in ("in_proj.weight", "out_proj.weight"):
                shape[1 if name == "in_proj.weight" else 0] = HIDDEN
            owner, _, leaf = name.rpartition(".")
            value = None if name == "out_proj.bias" else nn.Parameter(self._drawn(shape, device), requires_grad=False)
            small.get_submodule(owner).register_parameter(leaf, value)
        for name, buffer in list(small.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(owner), leaf, self._drawn(buffer.shape, device).abs() + 0.5)
        if hasattr(small, CHUNK):
            setattr(small, CHUNK, POSITIONS - 1)
        return small

    def _drawn(self, shape: Any, device: str) -> Tensor:
        return torch.randn(tuple(shape), generator=self.draw).to(device)

    def _outputs(self, is_first: bool) -> Iterator[Tensor]:
        for index in range(self.degree):
            part, own = copy.deepcopy(self.whole), self.splits[""]
            sizes, fused = part_sizes(part, own, self.degree), self.splits["in_proj"]
            width = len(part.in_proj.weight)
            slices = fused.own_slices(width, self.degree, index)
            for name, split in self.splits.items():
                self._cut(part.get_submodule(name), split, index)
            self._connect(part, index, is_first)
            with running_in_part(part, sizes, {}, width, slices):
                yield part(self.hidden)

    def _cut(self, module: nn.Module, split: TensorSplit, index: int) -> None:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            cut = split.of(leaf)
            if cut is not None and split.kind != "partial":
                slices = cut.own_slices(parameter.shape[cut.dim], self.degree, index)
                parts = [parameter.narrow(cut.dim, part.start, part.stop - part.start) for part in slices]
                module.register_parameter(leaf, nn.Parameter(torch.cat(parts, cut.dim), requires_grad=False))

    def _connect(self, part: Any, index: int, is_first: bool) -> None:
        """Give the modules of a part what the others bring."""
        mixer = self.splits[""]
        group = index * mixer.groups // self.degree if mixer.shares_groups(self.degree) else 0

        def meet(name: str, value: Tensor) -> Tensor:
            met = self.met.setdefault((name, group), [])
            if is_first:
                met.append(value)
                return value
            return torch.stack(met).sum(0)

        for name in [name for name, split in self.splits.items() if split.inside]:
            row = part.get_submodule(name)
            row.forward = lambda values, name=name, row=row: meet(name, F.linear(values, row.weight))
        if "norm" in self.splits and mixer.shares_groups(self.degree):
            ranks, inner = self.degree // mixer.groups, part.norm.forward

            def norm(*args: Any, **kwargs: Any) -> Any:
                with FeatureMeans(lambda mean: meet("norm", mean) / (1 if is_first else ranks)):
                    return inner(*args, **kwargs)

            part.norm.forward = norm
