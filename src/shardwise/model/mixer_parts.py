"""The sizes with which a mixer of states runs on a part of its heads or channels, and means over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch_compat.modules import replaced_parameters
from shardwise.model.tensor_split import TensorSplit

OF_ALL = ("intermediate_size", "num_heads", "n_mamba_heads")  # sizes that each rank has a part of
GROUPS, GROUP_SIZE = "n_groups", "group_size"
CONVOLUTION = ("in_channels", "out_channels", "groups")


class FeatureMeans(TorchFunctionMode):
    """Let `shared` change each mean that is taken inside: into one over the features of all ranks."""

    def __init__(self, shared: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.shared(result) if func in (Tensor.mean, torch.mean) else result


def part_sizes(mixer: Any, split: TensorSplit, degree: int) -> dict[str, dict[str, int]]:
    """Return the attributes of a mixer (by "") and of its modules that say how wide a part of it is."""
    own = {name: getattr(mixer, name) // degree for name in OF_ALL if hasattr(mixer, name)}
    inner = mixer.out_proj.in_features
    channels = inner // degree
    if split.shared:
        own[GROUPS] = max(1, split.groups // degree)
        channels += 2 * own[GROUPS] * split.shared
        own["conv_dim"] = channels
    norm = getattr(mixer, "norm", None)
    widths = {
        GROUPS: max(1, split.groups // degree),
        GROUP_SIZE: mixer.out_proj.in_features // max(degree, split.groups),
    }
    of_norm = {name: size for name, size in widths.items() if hasattr(norm, name)}
    return {"": own, "conv1d": dict.fromkeys(CONVOLUTION, channels)} | ({"norm": of_norm} if of_norm else {})


@contextmanager
def running_in_part(
    mixer: nn.Module,
    sizes: Mapping[str, Mapping[str, int]],
    convolution: Mapping[str, Tensor],
    width: int,
    slices: Sequence[slice],
) -> Iterator[None]:
    """Let a mixer be a part of itself inside; its initializer and others find the sizes of the whole.

    A fused kernel for training would take the projection to the hidden states in, whose parts are summed: it is left.

    Args:
        sizes: `part_sizes`.
        convolution: parameters of its convolution in the place of its own.
        width: of the whole fused projection, and of buffers that multiply it.
        slices: the part's of both.
    """
    with ExitStack() as stack:
        for name, own in sizes.items():
            stack.enter_context(_with_attributes(mixer.get_submodule(name), own))
        buffers = {
            name: torch.cat([buffer[..., part] for part in slices], -1)
            for name, buffer in mixer.named_buffers(recurse=False)
            if buffer.dim() and buffer.shape[-1] == width
        }
        stack.enter_context(_with_attributes(mixer, {**buffers, "training": False}))
        stack.enter_context(replaced_parameters(mixer.get_submodule("conv1d"), convolution))
        yield


@contextmanager
def _with_attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
