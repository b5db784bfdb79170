"""`DistributedModel.register_comm_hook`: a script's own function takes the mean of gradients over data ranks.

FSDP2 is told not to reduce, so that every backward adds to whole gradients on their rank. After the step's last one
the hook gets them, a bucket at a time, as torch's DistributedDataParallel would give them: sums over the microbatches,
divided by nothing. What its future brings is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat.fsdp2 import take_left_gradients
from shardwise.job.axes import state_axes
from shardwise.parallel.layout import smp_axes
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.smp.exceptions import SMPUnsupportedError, SMPValidationError, StepUsageError
from shardwise.smp.v1.session import SmpSessionV1

STOCK = "torch.distributed.algorithms.ddp_comm_hooks"  # their state is a process group, or holds one
MIB = 2**20


class GradientBucket:
    """The gradients that a hook gets; DistributedDataParallel alone can make a `torch.distributed.GradBucket`.

    Args:
        index: number of the bucket in the step, from 0; the parameters of each number are the same in every step.
        is_last: it is the step's last one.
        parameters: the model's, in the order of their gradients.
        shapes: of the gradients.
        buffer: [n] the gradients, flat, one after the other.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[torch.Size],
        buffer: Tensor,
    ) -> None:
        self._index, self._is_last, self._parameters, self._shapes = index, is_last, list(parameters), list(shapes)
        self._buffer = buffer

    def index(self) -> int:
        """Number of the bucket, from 0."""
        return self._index

    def is_last(self) -> bool:
        """True for the step's last one."""
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters whose gradients these are."""
        return self._parameters

    def buffer(self) -> Tensor:
        """[n] all gradients of the bucket."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another [n] in the place of `buffer()`, in another dtype maybe."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer()`, one of each parameter's shape."""
        return flat_views(self._buffer, self._shapes)


def flat_views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return `flat` [n] as tensors of `shapes`, which have n elements together."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


class CommunicationHook:
    """A hook, its state, and how gradients come to it.

    Args:
        session: the session of this process.
        hook_state: given to the hook.
        hook: (state, GradientBucket) -> a future of the bucket's gradients as one tensor [n].
        bucket_mb: MiB from which on a bucket is full.

    Raises:
        SMPUnsupportedError: gradients are sharded over ranks.
        SMPValidationError: `hook` cannot be called, or is torch's own and would take the mean over ranks that hold
            other parameters.
    """

    def __init__(
        self, session: SmpSessionV1, hook_state: Any, hook: Callable[[Any, GradientBucket], Any], bucket_mb: float
    ) -> None:
        if not callable(hook):
            raise SMPValidationError(f"register_comm_hook: hook={hook!r} cannot be called; give a function")
        _check_sharding(session)
        _check_group(session, hook_state, hook)
        self._session = session
        self.hook_state, self.hook, self.bucket_bytes = hook_state, hook, bucket_mb * MIB
        self._buckets: list[list[ParameterEntry]] = []

    def install(self, parallel: ParallelModel) -> None:
        """Make backwards leave whole gradients on their ranks from now on."""
        for module in parallel.fsdp_modules:
            module.set_requires_gradient_sync(False, recurse=False)
        trained = [entry for entry in parallel.tensor_map if entry.parameter.requires_grad]
        self._buckets = _fill(trained, self.bucket_bytes)

    def reduce(self, parallel: ParallelModel) -> None:
        """Put what the hook makes of the gradients in their place. Collective over the data ranks of a stage.

        Raises:
            StepUsageError: the hook returned no future, or one of something else than the bucket's elements.
        """
        left = {id(parameter): gradient for parameter, gradient in take_left_gradients(parallel.fsdp_modules)}
        gradients = {entry.name: _gradient(entry, left) for bucket in self._buckets for entry in bucket}
        used = self._used_anywhere(gradients, parallel.device)
        for index, entries in enumerate(self._buckets):
            # Next comes what another rank's next is, also where a hook's future goes on in a thread of the backend.
            self._reduce_bucket(index, entries, gradients, used)

    def _reduce_bucket(
        self, index: int, entries: Sequence[ParameterEntry], gradients: dict[str, Tensor | None], used: set[str]
    ) -> None:
        """Lead one bucket to the hook and back; parameters without a gradient here bring zeros."""
        shapes = [entry.local.shape for entry in entries]
        gradients_here = [gradients[entry.name] for entry in entries]
        local = [
            torch.zeros_like(entry.local) if gradient is None else gradient
            for entry, gradient in zip(entries, gradients_here)
        ]
        bucket = GradientBucket(
            index,
            index == len(self._buckets) - 1,
            [entry.parameter for entry in entries],
            shapes,
            torch.cat([gradient.flatten() for gradient in local]),
        )
        reduced = flat_views(self._result(bucket), shapes)
        for entry, gradient, mean in zip(entries, local, reduced):
            if entry.name in used:
                _set_gradient(entry.parameter, gradient.copy_(mean))

    def _used_anywhere(self, gradients: dict[str, Tensor | None], device: torch.device) -> set[str]:
        """Return names of the parameters with a gradient on any data rank; optimizers leave the others as they are."""
        counts = torch.tensor([float(gradient is not None) for gradient in gradients.values()], device=device)
        dist.all_reduce(counts, group=self._session.layout.group(*smp_axes("rdp")))
        return {name for name, count in zip(gradients, counts.tolist()) if count}

    def _result(self, bucket: GradientBucket) -> Tensor:
        name, count = getattr(self.hook, "__qualname__", repr(self.hook)), bucket.buffer().numel()
        answer = self.hook(self.hook_state, bucket)
        if not hasattr(answer, "wait"):
            raise StepUsageError(
                f"the communication hook {name} returned {type(answer).__name__}; return a torch.futures.Future of the "
                "bucket's gradients"
            )
        value = answer.wait()
        value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value  # as of a work's own future
        if not isinstance(value, Tensor) or value.numel() != count:
            brought = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise StepUsageError(
                f"the future of the communication hook {name} brought {brought}; it has to bring one tensor of the "
                f"bucket's {count} elements"
            )
        return value.flatten()


def _check_sharding(session: SmpSessionV1) -> None:
    degree = session.layout.size(*state_axes())
    if degree > 1 or session.cfg.shard_optimizer_state:
        key = "shard_optimizer_state=True" if session.cfg.shard_optimizer_state else None
        key = key or f"sharded_data_parallel_degree={degree}"
        raise SMPUnsupportedError(
            f"register_comm_hook: {key} leaves each rank a shard of the summed gradients, and a hook is for whole ones "
            "that are not summed; leave the hook out, or shard nothing"
        )


def _check_group(session: SmpSessionV1, hook_state: Any, hook: Callable[..., Any]) -> None:
    """Refuse torch's own hooks over ranks that hold other parameters: theirs is the group in their state, or all."""
    if not str(getattr(hook, "__module__", "")).startswith(STOCK):
        return
    group = getattr(hook_state, "process_group", hook_state)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return
    size, replicas = dist.get_world_size(group), session.layout.size(*smp_axes("rdp"))
    if size > replicas:
        raise SMPValidationError(
            f"register_comm_hook: {hook.__qualname__} takes the mean over {size} ranks, and {replicas} of them hold "
            "the same parameters; give it smp.get_rdp_process_group() as its process group"
        )


def _fill(entries: Sequence[ParameterEntry], bucket_bytes: float) -> list[list[ParameterEntry]]:
    """Fill buckets from the model's end, where backward begins."""
    buckets: list[list[ParameterEntry]] = [[]]
    size = 0
    for entry in reversed(entries):
        buckets[-1].append(entry)
        size += entry.local.nbytes
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
    return [bucket for bucket in buckets if bucket]


def _gradient(entry: ParameterEntry, left: dict[int, Tensor]) -> Tensor | None:
    """Return what backwards have left, with a gradient from before that was not zeroed, as DistributedDataParallel."""
    old, new = entry.local_gradient, left.get(id(entry.parameter))
    if old is None or new is None:
        return old if new is None else new.to(entry.local)
    return old.add_(new)


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set `gradient` as the parameter's; of one that FSDP2 holds, this rank's only shard is all of it."""
    if isinstance(parameter, DTensor):
        mesh, places = parameter.device_mesh, parameter.placements
        gradient = DTensor.from_local(
            gradient, mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    parameter.grad = gradient
