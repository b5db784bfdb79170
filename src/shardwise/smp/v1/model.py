"""`smp.DistributedModel`: a script's module, distributed at its first forward, and its parts of forward and backward.

Distribution waits for the first forward because scripts go on asking after they have wrapped the model: for partitions,
for checkpointing, for another optimizer. Until then the module is as its author wrote it, on the device.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.data.batch import Batch
from shardwise.job.axes import Axis
from shardwise.parallel.gradient_sync import begin_microbatch
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.plan.normalisation import SMP_MEAN, LossCounts
from shardwise.smp.v1.building import Shape, build, forms_of, shape_of
from shardwise.smp.v1.exceptions import SMPValidationError, StepUsageError
from shardwise.smp.v1.hooks import Hook, Hooks
from shardwise.smp.v1.host import Host
from shardwise.smp.v1.inspection import Inspection, refuse_data_parallel, show_shards
from shardwise.smp.v1.levels import CastingLevel, DataParallelLevel
from shardwise.smp.v1.nesting import form, leaves, to_device
from shardwise.smp.v1.own_backward import OutsideBackward
from shardwise.smp.v1.process import state
from shardwise.smp.v1.rows import merge, narrow
from shardwise.smp.v1.weights import is_partial, load_weights, marked, part_of_weights, share_buffers, whole_weights

if TYPE_CHECKING:
    from shardwise.smp.v1.steps import StepRun


SHAPES = 64  # of steps' arguments that are known at once: one may hold the number of the step


class DistributedModel(Inspection, Hooks, Host, nn.Module):
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
        from shardwise.smp.v1.replacement import replace_modules

        refuse_data_parallel(module)
        device = state.device
        self._level = CastingLevel.around(module)
        self.module = replace_modules(module if self._level is None else self._level.model)
        if self._level is not None:
            self._level.hold(self.get_module())
        self.parallel: ParallelModel | None = None
        self.average, self._shares_buffers = average_grads_across_microbatches, broadcast_buffers
        self.passes, self._pass, self._synchronise, self._held = backward_passes_per_step, 0, True, False
        self.names = {id(parameter): name for name, parameter in self.get_module().named_parameters()}
        self._run: StepRun | None = None
        self._outside = OutsideBackward(self._begin_outside, lambda: self._finish_backward(self._last))
        self._last = True  # whether the backward outside of a step that runs completes the gradients
        self._shapes: dict[Any, tuple[Shape, dict[str, Any]]] = {}
        self._forward_parameters = inspect.signature(self.get_module().forward)
        self._after_partition: OrderedDict[int, Hook] = OrderedDict()
        self._after_step: OrderedDict[int, Hook] = OrderedDict()
        self._stepped = False
        self.pending_weights: list[tuple[Mapping[str, Any], bool, bool]] = []
        self.gathered = False  # parameters whose optimizer state alone is sharded are whole on every rank
        self.unsettled = False  # gradients that several ranks hold in part are not summed yet
        self.communication, self.reduced, self.host = None, False, None
        self.overlapping, self.bucket_mb = overlapping_allreduce, bucket_cap_mb
        whole = state.layout.size(Axis.PIPELINE) == 1 and state.cfg.sharded_data_parallel_degree == 1
        if whole and not any(parameter.is_meta for parameter in self.get_module().parameters()):
            self.get_module().to(device)  # what has no values yet is drawn where it will live
        if state.layout.size(Axis.SHARD) > 1:
            show_shards(self.get_module())
        state.model = self

    # ---- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: its part that is here, inside of a step; without stages also outside of one.

        Raises:
            StepUsageError: outside of a step, where there are stages.
        """
        self.come_back()
        args, kwargs = to_device(args, state.device), to_device(kwargs, state.device)
        if self._run is not None:
            return self._run.call(args, kwargs)
        self._needs_step("model(...)")
        parallel = self.build(self.bind(args, kwargs))
        output = self.compute(parallel.parts[0], args, kwargs, 0, 1)
        state.step_count += self.training and torch.is_grad_enabled()  # the next one's dropout is another
        return self._outside.watch(output)

    def backward(self, tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None) -> None:
        """Backward from a loss (or several tensors with the gradients they get); in the place of `loss.backward()`.

        Inside of a step it is run when the schedule comes to it, after the body; gradients are then means over
        microbatches and data ranks.

        Raises:
            StepUsageError: outside of a step, where there are stages.
        """
        several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(several))
        total = torch.stack([t.sum() if g is None else (t * g).sum() for t, g in zip(several, gradients)]).sum()
        if self._run is not None:
            self._run.note(total * self.seed(len(self._run.calls)))
            return
        self._needs_step("model.backward(...)")
        seed = self._begin_outside()
        with self._outside.library():
            if total.requires_grad:
                (total * seed).backward()
        self._finish_backward(self._last)

    def _begin_outside(self) -> float:
        """Before a backward outside of a step, without stages; what its loss is multiplied by."""
        parallel = self.require_parallel()
        self.come_back()
        self._last = self._completes()
        begin_microbatch(parallel.parts[0].fsdp_modules, parallel.plan, self._last)
        return self.seed(1)

    def _needs_step(self, what: str) -> None:
        degree = state.layout.size(Axis.PIPELINE)
        if degree > 1:
            raise StepUsageError(
                f"{what} outside of a step cannot reach the other stages of pipeline_parallel_degree {degree}; call it "
                "in a function decorated with @smp.step"
            )

    def seed(self, microbatches: int) -> float:
        """The gradient of each microbatch's loss: SMP averages over microbatches and over data-parallel ranks, or
        leaves both to a communication hook."""
        scale = state.optimizer.loss_scale if state.optimizer is not None else 1.0
        scale /= 1 if state.cfg.prescaled_batch else state.layout.size(Axis.TENSOR)
        if self.communication is not None:
            return scale
        counts = LossCounts(microbatches=microbatches if self.average else 1, data_ranks=state.layout.data_ranks)
        return SMP_MEAN.seed(counts, scale)

    def stepping(self, run: StepRun) -> None:
        """Run all microbatches of a step, forward and, unless under `no_grad`, backward."""
        self.come_back()
        self._run = run
        try:
            if self.parallel is None or run.staged:
                self._prepare(run)
            parallel = self.require_parallel()
            last = run.backward and self._completes()
            parallel.drive(run.work, len(run.calls), run.backward, last=last)
        finally:
            self._run = None
        state.step_count += 1
        if run.backward:
            self._finish_backward(last)
        if not self._stepped:
            self._stepped = True
            self._call(self._after_step)

    def _prepare(self, run: StepRun) -> None:
        """Build the model for the first step, and its stages' traffic for microbatches of another shape."""
        key = self.training, run.body, *map(form, leaves(run.calls[0]))
        if key not in self._shapes:
            if len(self._shapes) == SHAPES:
                del self._shapes[next(iter(self._shapes))]
            inputs = run.first_inputs()
            merged = inputs if state.cfg.prescaled_batch else merge(inputs)
            self.build(merged)
            self._shapes[key] = shape_of(merged), forms_of(merged)
        shape, inputs = self._shapes[key]
        parallel = self.require_parallel()
        if parallel.pipeline is not None:
            parallel.pipeline.reshape(*shape)
            parallel.prepare(inputs)

    def build(self, inputs: Mapping[str, Any]) -> ParallelModel:
        """Distribute the module, if that has not happened; `inputs` are its keyword arguments. Collective."""
        if self.parallel is None:
            given = list(self.get_module().parameters())
            self.parallel = build(self.get_module(), inputs)
            for parameter in given:  # an optimizer may hold them, and its names go by their identity: only memory goes
                parameter.data = parameter.data.new_empty(0)
            self._given = given
            for entry in self.parallel.tensor_map:
                self.names[id(entry.parameter)] = entry.name
            for weights, strict, same in self.pending_weights:
                load_weights(self, weights, strict, same)
            self.pending_weights.clear()
            if self.communication is not None:
                self.communication.install(self.parallel)
            if state.optimizer is not None:
                state.optimizer.adopt(self.parallel)
            self._call(self._after_partition)
        return self.parallel

    def compute(
        self,
        part: ModelPart,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        index: int,
        count: int,
        arrived: Tensor | None = None,
    ) -> Any:
        """Forward of microbatch `index` of `count` through `part`; hidden states where it is not the last one."""
        parallel = self.require_parallel()
        own = state.cfg.prescaled_batch or state.layout.size(Axis.TENSOR) == 1
        inputs = self.bind(args, kwargs)
        merged = inputs if own else merge(inputs)
        rows = shape_of(merged).rows
        first = (parallel.layout.data_rank * count + index) * rows
        microbatch = Batch({}, None, torch.arange(first, first + rows, device=state.device))
        with parallel.scope(microbatch, state.step_count):
            output = part.forward(merged, arrived)
        if not (torch.is_grad_enabled() or self.gathered):
            parallel.release_gathered()  # as a backward does: scripts look at gradients, and change what they look at
        if not part.is_last:
            return part.boundary_output()
        output = output if own else narrow(output, shape_of(inputs).rows)
        return output if self._level is None else self._level.output(args, kwargs, output)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the module's forward by name."""
        if self._level is not None:
            args, kwargs = self._level.arguments(args, kwargs)
        bound = self._forward_parameters.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._forward_parameters.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise StepUsageError("the model's forward takes *args; give it names, or pass them by keyword")
            else:
                named[name] = value
        return named

    def _completes(self) -> bool:
        """Whether the gradients are complete after the backward that comes."""
        self._pass += 1
        if not self._synchronise:
            self._held = True
            return False
        complete = self._held or self._pass % self.passes == 0  # what no_sync has held back goes out with this one
        self._held = False
        return complete

    def _finish_backward(self, complete: bool) -> None:
        self.reduced = True
        if complete and self._shares_buffers:
            share_buffers(self)
        if complete and self.communication is not None:
            self.communication.reduce(self.require_parallel())
        self.unsettled, self.gathered = True, False
        if state.optimizer is not None and complete and state.optimizer.eager:
            state.optimizer.settle()
        elif state.optimizer is not None:
            state.optimizer.show_gradients()

    def settle_gradients(self) -> None:
        """Sum what several ranks hold in part, once for each optimizer step. Collective."""
        self.come_back()
        if self.unsettled and self.parallel is not None:
            self.parallel.sum_shared_gradients()
        self.unsettled = False

    def gather(self) -> None:
        """After an optimizer step under `shard_optimizer_state`: every rank gets whole parameters, as in SMP, so that
        scripts may ask for them on some ranks alone. Collective over the shard group."""
        if self.parallel is not None and state.cfg.shard_optimizer_state:
            self.parallel.gather()
            self.gathered = True

    def release(self) -> None:
        """Let go of whole parameters, before the shards change: also of those that an evaluation has left gathered."""
        self.come_back()
        if self.parallel is not None:
            if self.gathered:
                self.parallel.gather(wait=True)  # what is under way cannot be let go of
            self.parallel.release_gathered()
        self.gathered = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backward passes inside on their ranks; the first one outside reduces them all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    # ---- the module

    def require_parallel(self) -> ParallelModel:
        """The distributed model. Raises StepUsageError before the first forward."""
        if self.parallel is None:
            raise StepUsageError("the model is distributed at its first forward, which has not been; run a step first")
        return self.parallel

    def get_module(self) -> nn.Module:
        """The script's module (or what took its place), unwrapped."""
        module = nn.Module.__getattr__(self, "module")  # whatever this class says of other names
        assert isinstance(module, nn.Module)
        return module

    def train(self, mode: bool = True) -> DistributedModel:
        """Training or evaluation mode; returns the model."""
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the module's: `config`, `generate`, `gradient_checkpointing_enable`."""
        if name == "module":
            below = self.get_module() if self._level is None else self._level.outer
            return DataParallelLevel(below) if state.cfg.ddp else below
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get_module(), name)

    @contextmanager
    def join(self, **settings: Any) -> Iterator[None]:
        """Accepted; all ranks have to make equally many steps."""
        yield

    # ---- weights

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """All weights by name, whole, on the CPU; under `shard_optimizer_state` in the dtype of computing.

        Collective over the ranks that hold them together: those of one reduced data rank, and of the shard group under
        sharded data parallelism.

        Args:
            gather_to_rank0: only reduced data rank 0 keeps them; the others get an empty dict.

        Raises:
            MessageError: one of these ranks does not call it.
        """
        weights = whole_weights(self, "model.state_dict", exact=False)
        return weights if not gather_to_rank0 or state.layout.smp("rdp")[0] == 0 else {}

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the weights, with the key `_smp_is_partial`; under `shard_optimizer_state` parameters are
        whole, as in SMP, and ranks that share them may all load one's."""
        return marked(part_of_weights(self))

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> None:
        """Weights, whole or this rank's part of them (`_smp_is_partial`); a part waits for the first step.

        A dict without that key that holds a Hugging Face model's names is translated where the model was replaced.

        Raises:
            CheckpointError: names or shapes do not fit, and `strict` is True.
        """
        waits = is_partial(state_dict) or any(parameter.is_meta for parameter in self.module.parameters())
        if self.parallel is None and waits:
            self.pending_weights.append((state_dict, strict, same_partition_load))
            return
        load_weights(self, state_dict, strict, same_partition_load)
