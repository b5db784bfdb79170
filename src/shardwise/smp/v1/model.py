"""`smp.DistributedModel`: a script's module, distributed at its first forward, and its parts of forward and backward.

Distribution waits for the first forward because scripts go on asking after they have wrapped the model: for partitions,
for checkpointing, for another optimizer. Until then the module is as its author wrote it, on the device.

The class is the public face. Its parts do the work, each in a file of its own: `weights`, `hooks`, `step_runner` and
`inspection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.job.axes import Axis
from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1.forward import MicrobatchForward
from shardwise.smp.v1.hooks import ModelHook, ModelHooks
from shardwise.smp.v1.host import HOST
from shardwise.smp.v1.inspection import REDUCES_ITSELF, ModelInspection, refuse_data_parallel, show_shards
from shardwise.smp.v1.replacement import replace_modules, translate_in, translate_out
from shardwise.smp.v1.session import SmpSessionV1, state
from shardwise.smp.v1.step_runner import BackwardSettings, StepRunner
from shardwise.smp.v1.weights import PARTIAL, ModelWeights, marked_partial
from shardwise.smp.v1.wrappers import CastingWrapper, DataParallelWrapper


@dataclass(frozen=True)
class ModelParts:
    """The parts of a distributed model.

    Attributes:
        session: the session of this process.
        wrapper: a module of the script's around its model, if there is one.
        weights: which tensors live here.
        hooks: what the script has the model call.
        runner: forward and backward.
        inspection: what is here and what is split.
    """

    session: SmpSessionV1
    wrapper: CastingWrapper | None
    weights: ModelWeights
    hooks: ModelHooks
    runner: StepRunner
    inspection: ModelInspection


class DistributedModel(nn.Module):
    """Wraps a model; one in a script. Calls of it inside of a step run this rank's part of it.

    Args:
        module: the model, equal on every rank, or without values where it was created under delayed initialization.
        trace_device, trace_execution_times, trace_memory_usage: accepted; the structure is read without running it.
        overlapping_allreduce: accepted; FSDP2 overlaps by blocks. False refuses `register_comm_hook`.
        bucket_cap_mb: MiB of gradients from which on a hook of `register_comm_hook` gets them.
        gradient_as_bucket_view, find_unused_parameters: accepted; parameters without gradients are found.
        backward_passes_per_step: step calls whose gradients are summed before an optimizer step.
        average_grads_across_microbatches: whether gradients are the mean over microbatches, or their sum.
        broadcast_buffers: whether buffers, rank 0's at the start, are the first data rank's after each step that
            has run backward; else each rank's own.

    Raises:
        NotInitializedError: `smp.init` was not called.
        SMPValidationError: `trace_execution_times` with `trace_device="cpu"`, DistributedDataParallel inside, or a
            second distributed model.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        if trace_execution_times and trace_device == "cpu":
            raise SMPValidationError("trace_execution_times=True needs trace_device='gpu'")
        if state.model is not None:
            raise SMPValidationError(
                f"DistributedModel({type(module).__name__}): the script has a distributed model already, and there is "
                "one in a script; use that one, or call smp.state.reset() and smp.init() before another"
            )
        refuse_data_parallel(module)
        device = state.device
        wrapper = CastingWrapper.around(module)
        self.module = replace_modules(module if wrapper is None else wrapper.model)
        if wrapper is not None:
            wrapper.hold(self.get_module())
        settings = BackwardSettings(backward_passes_per_step, average_grads_across_microbatches, broadcast_buffers)
        weights = ModelWeights(state, self.get_module())
        hooks = ModelHooks(state, weights, overlapping_allreduce, bucket_cap_mb)
        runner = StepRunner(state, weights, hooks, MicrobatchForward(state, weights, wrapper), settings)
        self._smp = ModelParts(state, wrapper, weights, hooks, runner, ModelInspection(state, weights))
        whole = state.layout.size(Axis.PIPELINE) == 1 and state.cfg.sharded_data_parallel_degree == 1
        if whole and not any(parameter.is_meta for parameter in self.get_module().parameters()):
            self.get_module().to(device)  # what has no values yet is drawn where it will live
        if state.layout.size(Axis.SHARD) > 1:
            show_shards(self.get_module(), state.layout)
        state.attach_model(self, weights, runner, translate_out, translate_in)

    # ---- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: its part on this rank, inside of a step; without stages also outside of one.

        Raises:
            StepUsageError: outside of a step, where there are stages.
        """
        return self._smp.runner.call_model(args, kwargs, self.training)

    def backward(self, tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None) -> None:
        """Run backward from a loss (or several tensors with the gradients they get), in place of `loss.backward()`.

        Inside of a step it is run when the schedule comes to it, after the body; gradients are then means over
        microbatches and data ranks.

        Raises:
            StepUsageError: outside of a step, where there are stages.
        """
        self._smp.runner.backward(tensors, grad_tensors)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients of backward passes inside on their ranks; the first one outside reduces them all."""
        return self._smp.runner.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) gradients, those too that wait on their ranks for the last pass of a step."""
        super().zero_grad(set_to_none)
        self._smp.runner.drop_gradients()

    @contextmanager
    def join(self, **settings: Any) -> Iterator[None]:
        """Do nothing: accepted; all ranks have to make equally many steps."""
        yield

    # ---- hooks

    def register_post_partition_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once the model has been distributed; at once where it is."""
        return self._smp.hooks.register_post_partition_hook(hook)

    def register_post_step_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` after the first step."""
        return self._smp.hooks.register_post_step_hook(hook)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` take the mean of gradients, in the place of the library.

        Once, before the first backward. The bucket is as DistributedDataParallel's: `buffer()`, `gradients()`,
        `parameters()`, `index()`, `is_last()`, `set_buffer(tensor)`. It holds sums over microbatches, divided by
        nothing (under fp16 times the loss scale). The hook returns a future of one tensor of as many elements: the mean
        over `smp.get_rdp_process_group()`, without tensor parallelism the data ranks, and over the microbatches. A
        bucket comes when the future of the one before it is done.

        Raises:
            SMPUnsupportedError: parameters, gradients or the optimizer's state are sharded.
            SMPValidationError: `overlapping_allreduce` is False; `hook` cannot be called, or is torch's own with a
                group of ranks that hold different parameters.
            StepUsageError: there is a hook already, or a backward was run.
        """
        self._smp.hooks.register_communication_hook(state, hook)

    # ---- the module

    def get_module(self) -> nn.Module:
        """Return the script's module (or what took its place), unwrapped."""
        module = nn.Module.__getattr__(self, "module")  # whatever this class says of other names
        assert isinstance(module, nn.Module)
        return module

    def train(self, mode: bool = True) -> DistributedModel:
        """Set training or evaluation mode; return the model."""
        super().train(mode)
        return self

    def cpu(self) -> DistributedModel:
        """Return the model on the host; where it is distributed, all its weights are gathered there, as in SMP.

        Then `get_module()` has whole parameters and buffers on the CPU, with stages those of this rank's, and
        `state_dict()` reads them. Collective over the ranks that hold the model together. What training goes on with
        stays on the device: the next step or forward, of `get_module()` too, optimizer step, `cuda()`,
        `load_state_dict` or partial save takes the weights back, with what was changed in them meanwhile; every rank
        has to change the same.

        Raises:
            MessageError: one of these ranks does not call it.
        """
        if self.partitioned:
            self._smp.weights.lend_to_host()
        else:
            super().cpu()
        return self

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedModel:
        """Change tensors; `cuda()` after `cpu()` brings the distributed weights, and no whole ones, to the device."""
        weights, device = self._smp.weights, self._smp.session.device
        if weights.are_lent and change(torch.empty(0)).device.type == device.type != HOST.type:
            weights.return_from_host()
        else:
            super()._apply(change, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute where the wrapper has none: `config`, `generate` and such."""
        if name == "module":
            wrapper = self._smp.wrapper
            below = self.get_module() if wrapper is None else wrapper.outer
            return DataParallelWrapper(below) if self._smp.session.cfg.ddp else below
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get_module(), name)

    # ---- weights

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all weights by name, whole, on the CPU; under `shard_optimizer_state` in the dtype of computing.

        Collective over the ranks that hold them together: those of one reduced data rank, and of the shard group under
        sharded data parallelism.

        Args:
            gather_to_rank0: only reduced data rank 0 keeps them; the others get an empty dict.

        Raises:
            MessageError: one of these ranks does not call it.
        """
        weights = self._smp.weights.whole("model.state_dict", exact=False)
        return weights if not gather_to_rank0 or self._smp.session.layout.smp("rdp")[0] == 0 else {}

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return this rank's part of the weights, with the key `_smp_is_partial`.

        Under `shard_optimizer_state` parameters are whole, as in SMP, and ranks that share them may all load one's.
        """
        return marked_partial(self._smp.weights.local_or_gathered())

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> None:
        """Load weights, whole or this rank's part of them (`_smp_is_partial`); a part waits for the first step.

        A dict without that key that holds a Hugging Face model's names is translated where the model was replaced.

        Raises:
            CheckpointError: names or shapes do not fit, and `strict` is True.
        """
        weights = state_dict if PARTIAL in state_dict else translate_in(self.get_module(), state_dict)
        self._smp.weights.load_or_wait(weights, strict)

    # ---- what is on this rank

    @property
    def partitioned(self) -> bool:
        """True once the model has been distributed."""
        return self._smp.weights.parallel is not None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the module's own names: all of them before the first step, then those that live here."""
        return self.get_module().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers by the module's own names."""
        return self.get_module().named_buffers(*args, **kwargs)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters of this pipeline rank by name."""
        return self.get_module().named_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yield parameters of this pipeline rank."""
        return self.get_module().parameters()

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers of this pipeline rank by name."""
        return self.get_module().named_buffers()

    def local_buffers(self) -> Iterator[Tensor]:
        """Yield buffers of this pipeline rank."""
        return self.get_module().buffers()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules of this pipeline rank by name: those that hold something, and those they are in."""
        return self._smp.inspection.local_modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Yield modules of this pipeline rank."""
        return (module for _, module in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what the optimizer updates: this rank's elements of each parameter, by its name."""
        return self._smp.inspection.updated_parameters()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Raise SMPValidationError: torch's DistributedDataParallel asks it of the module that it is put around."""
        raise SMPValidationError(REDUCES_ITSELF)

    # ---- what tensor ranks split

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yield modules whose tensors are split over tensor ranks."""
        return self._smp.inspection.split_modules()

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell if tensor ranks hold parts of it."""
        return self._smp.inspection.split_dim(parameter) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Tell if tensor ranks hold parts of it; buffers are always whole."""
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Tell if it sees the batch of the whole tensor group: all do, where tensors are split."""
        return self._smp.inspection.splits_tensors

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Tell if it sees the batch of the whole tensor group."""
        return self._smp.inspection.splits_tensors

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters reduced over the reduced data group."""
        return iter(self.named_parameters() if self._smp.inspection.splits_tensors else ())

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters reduced over the data group."""
        return iter(() if self._smp.inspection.splits_tensors else self.named_parameters())
