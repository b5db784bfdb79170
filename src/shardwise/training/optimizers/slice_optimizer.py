"""The base of this package's optimizers, whose parameters are slices of logical tensors.

By itself such an optimizer is one of torch's: each parameter is a whole tensor, which is the one-process form.
`ShardedOptimizer` places it: from then on it knows the entry of each parameter in the TensorMap, and the layout, whose
groups it may use for what slices have to agree on. Every rank steps at the same time, also one without any elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise.job.optimizer_records import RECORDS, State
from shardwise.kernels.precision import DTYPES
from shardwise.parallel.logical_state import StateForm, form_of_parameter
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry, Region

STATE_DTYPES = DTYPES | {"uint8": torch.uint8}
CPU_CHUNK = 1 << 16  # elements that are updated together: few enough for a core's cache
GPU_CHUNK = 1 << 22  # enough to fill a GPU; what an update needs beside its state stays below 200 MB


class SliceOptimizer(torch.optim.Optimizer):
    """An optimizer over slices of logical tensors; its record in `RECORDS` says what it keeps.

    A class of this kind gives `update`, or its own `step` where ranks have to agree first.
    """

    model: ParallelModel | None = None  # set by `place`
    names: Collection[str] = ()  # of what it updates on any rank of the stage; set by `ShardedOptimizer`

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._entries: dict[nn.Parameter, ParameterEntry] = {}
        super().__init__(params, defaults)

    def place(self, entries: Mapping[nn.Parameter, ParameterEntry], model: ParallelModel | None) -> None:
        """Say where each parameter stands; `model` is None where every one is a whole tensor."""
        self._entries, self.model = dict(entries), model

    def entry(self, parameter: nn.Parameter) -> ParameterEntry:
        """Return the entry of a parameter: that of a whole tensor, unless it was placed."""
        if parameter not in self._entries:
            self._entries[parameter] = whole_entry(parameter)
        return self._entries[parameter]

    @property
    def device(self) -> torch.device:
        """The device on which ranks agree; parameters may be kept on another."""
        assert self.model is not None
        return self.model.device

    def updates(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Yield the parameters that have a gradient, each with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    yield group, parameter

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        with torch.no_grad():
            for group, parameter in self.updates():
                self.update(group, parameter)

    def update(self, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Update one parameter by its gradient."""
        raise NotImplementedError

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state beside a parameter, which begins as zeros and a count of no steps."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            for key, form in self.forms(parameter).items():
                state[key] = torch.zeros(form.local_shape, dtype=form.dtype, device=parameter.device)
        return state

    def kept(self, parameter: nn.Parameter) -> State:
        """Return the shapes and dtypes of the logical tensors beside a parameter."""
        shape = self.entry(parameter).shape
        return RECORDS[type(self).__name__].state(self.param_groups[0], shape, shape)

    def forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        """Return the forms of the state tensors beside a parameter, by key; those of its own shape by default."""
        entry = self.entry(parameter)
        return {
            key: form_of_parameter(entry, STATE_DTYPES[kept.dtype] if kept.dtype else parameter.dtype)
            for key, kept in self.kept(parameter).items()
        }


def whole_entry(parameter: nn.Parameter) -> ParameterEntry:
    """Return the entry of a tensor that is whole and on one rank."""
    shape = tuple(parameter.shape)
    everything = tuple(slice(0, size) for size in shape)
    return ParameterEntry("", (), shape, parameter, (Region(everything, everything),), replication=1, replica=0)


def chunks_of(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape in pieces of some rows each, so that an update needs little memory beside them."""
    first = tensors[0]
    if first.dim() == 0:
        yield tuple(tensors)
        return
    of_row = max(1, first.numel() // max(1, first.shape[0]))
    rows = max(1, (GPU_CHUNK if accelerator.on_accelerator(first) else CPU_CHUNK) // of_row)
    for start in range(0, first.shape[0], rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)
