"""ParallelModel: a user's model as this rank runs it, and `run(objective)`, the one door to forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.collectives.names import CollectiveName, group_name, is_of_collective, ranks_in_step
from shardwise.collectives.rank_record import mark_phase
from shardwise.collectives.tensor import sum_together
from shardwise.errors import ModelError
from shardwise.job.axes import Axis, data_axes
from shardwise.job.devices import widest_float
from shardwise.job.objects import user_code
from shardwise.kernels.attention.row_positions import numbers_positions
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.kernels.linear import WeightGradients
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.model.gradient_hooks import GradientHook
from shardwise.parallel.averaged_weights import AveragedWeights
from shardwise.parallel.context import ContextParallel, SequenceShard, Sides
from shardwise.parallel.deferred_head import DeferredHead
from shardwise.parallel.gradient_hooks import apply_gradient_hooks
from shardwise.parallel.gradient_sync import begin_microbatch, reduce_gradients
from shardwise.parallel.layout import Layout
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.parallel.own_collectives import defining_files, own_collectives_refused
from shardwise.parallel.pipeline import MicrobatchWork, Pipeline
from shardwise.parallel.routers import ExpertRouters, updated_bias
from shardwise.parallel.running_statistics import RunningStatistics
from shardwise.parallel.sharded_access import class_writes_refused, sharded_access_named, sharded_classes
from shardwise.parallel.stage_boundary import StageBoundary
from shardwise.parallel.tensor_map import ParameterEntry, TensorMap
from shardwise.parallel.unit_use import UnitUse, compare_use
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import holders
from shardwise.words import listed

UNUSED_PARAMETERS = CollectiveName("unused parameters", "world", "all_reduce")


def _shapes_of(inputs: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes of a forward's arguments, by name."""
    return tuple((name, tuple(value.shape)) for name, value in inputs.items() if isinstance(value, Tensor))


def with_gradient(output: Tensor) -> Tensor:
    """Return a stage's output as one that backward reaches, also where all that made it is frozen."""
    return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()


@dataclass
class ModelPart:
    """One virtual stage of a model on this rank; the whole model where there is no pipeline.

    Attributes:
        module: the user's model, sharded in place, less what belongs to other stages.
        head: set when logits are never whole and the head is here.
        boundary: inputs and outputs of the stage; None without a pipeline.
        weight_gradients: those that backward leaves for later, if the schedule wants it so.
        fsdp_modules: FSDP2's modules, the root first; empty when nothing is sharded. Parts under one root share them.
        completes: the backward that comes is the last of a step.
        root_forward: the module's forward, through the root that it shares with other parts, if it does.
    """

    module: nn.Module
    head: DeferredHead | None = None
    boundary: StageBoundary | None = None
    weight_gradients: WeightGradients | None = None
    fsdp_modules: list[FSDPModule] = field(default_factory=list)
    root_forward: Callable[..., Any] | None = None
    completes: bool = False

    @property
    def is_last(self) -> bool:
        """True where the model's output is made."""
        return self.boundary is None or self.boundary.is_last

    def forward(self, inputs: dict[str, Any], boundary_input: Tensor | None) -> Any:
        """Run the model's forward; `boundary_input` are the hidden states [B, S, H] of the stage before."""
        if self.boundary is not None:
            self.boundary.input = boundary_input
            if self.boundary.room is not None and self.boundary.prepare is not None:
                self.boundary.prepare(inputs)  # the step's microbatches differ in size
        output = self.module(**inputs) if self.root_forward is None else self.root_forward(**inputs)
        if self.boundary is not None and self.boundary.is_last:  # others give their output, and forget both
            self.boundary.input = None
        return output

    def boundary_output(self) -> Tensor:
        """Return the hidden states [B, S, H] for the next stage."""
        assert self.boundary is not None
        return self.boundary.take_output()


@dataclass
class ParallelModel:
    """One rank's part of a model.

    Attributes:
        parts: one a pipeline stage on this rank.
        tensor_map: what lives here.
        device: where forward and backward run.
        partial: names of parameters whose gradients are parts, and the group over which they are summed.
        tied: parameters whose gradients are summed over several pipeline ranks, by name, and which.
        pipeline: what drives the parts, if they are stages.
        context: what splits sequences, if ranks share them.
        gradient_hooks: hooks of the user's on gradients of parameters that are here, by name.
        uses: the use of sharded units by this rank's microbatches, one a root.
        unsharded: names of trainable parameters that every data rank holds whole, beside sharded ones.
        statistics: the buffers that forwards change; None where the model has none.
        routers: the routers of experts, if there are some.
        reference: a frozen copy of the model with which a preference loss compares it, if there is one.
        ema: moving averages of the weights (`training.ema_decay`), if the job wants them.
        detached: no loss of this rank in the last step depends on a parameter by autograd; False where it has none.
    """

    parts: list[ModelPart]
    plan: Plan
    layout: Layout
    facts: ModelFacts
    tensor_map: TensorMap
    device: torch.device
    partial: tuple[tuple[Sequence[str], dist.ProcessGroup], ...] = ()
    tied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    context: ContextParallel | None = None
    gradient_hooks: Mapping[str, tuple[GradientHook, ...]] = field(default_factory=dict)
    uses: Sequence[UnitUse] = ()
    unsharded: Sequence[str] = ()
    statistics: RunningStatistics | None = None
    routers: ExpertRouters | None = None
    reference: ParallelModel | None = None
    ema: AveragedWeights | None = None
    detached: bool = False

    @property
    def module(self) -> nn.Module:
        """The user's model as far as the first part has it: its config, its class, its buffers outside of blocks."""
        return self.parts[0].module

    @property
    def head(self) -> DeferredHead | None:
        """The deferred head, where this rank has it."""
        return self.parts[-1].head

    @property
    def fsdp_modules(self) -> list[FSDPModule]:
        """FSDP2's modules of all parts."""
        return [module for modules in self._roots for module in modules]

    @property
    def _roots(self) -> list[list[FSDPModule]]:
        """FSDP2's modules by root; parts may share one."""
        return list({id(part.fsdp_modules): part.fsdp_modules for part in self.parts}.values())

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return torch_dtype(self.plan.dtypes.compute)

    @property
    def is_reporting_rank(self) -> bool:
        """True on one of the ranks that read the same rows: it reports their counts."""
        return self.layout.index(Axis.CONTEXT, Axis.TENSOR, Axis.PIPELINE) == 0

    @property
    def contributes(self) -> bool:
        """True where the loss that this rank computed is part of the sum: of equal ones, one alone is."""
        is_last = self.pipeline is None or self.pipeline.boundaries[-1].is_last
        return is_last and self.layout.index(Axis.TENSOR) == 0

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter, on this rank or another, by its first name."""
        kept = self.facts.kept_dtype(name)
        dtype: torch.dtype = getattr(torch, kept) if kept else torch_dtype(self.plan.dtypes.parameters)
        return dtype

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of losses and norms: fp32, or fp64 for an fp64 job."""
        return torch_dtype(self.plan.dtypes.loss)

    def run(self, objective: Objective, microbatches: Sequence[Any], step: int, seed: Tensor | None = None) -> Tensor:
        """Run forward, and with a `seed` backward, of all microbatches; return [2]: summed loss and count on this rank.

        Args:
            microbatches: at least one; all ranks bring equally many.
            step: number of the step; dropout depends on it.
            seed: 0-dim gradient of each microbatch's summed loss; None for evaluation.
        """
        wide = widest_float(self.device)  # fp32 counts to 16.8 million, and a step may have more pixels
        totals = [torch.zeros(2, dtype=wide, device=self.device)]
        microbatches = objective.prepared(microbatches, step)
        if self.head is not None:
            self.head.seed = 1.0 if seed is None else seed
        routers = self.routers if seed is not None else None
        have_gradients: list[bool] = []

        def work(number: int, index: int, boundary_input: Tensor | None) -> Tensor:
            """Run forward of one microbatch through one part: its boundary output, or the loss times `seed`."""
            part, (microbatch, sequences) = self.parts[number], self._split(microbatches[index])
            if routers is not None and routers.local is not None:
                routers.local.begin_microbatch(int(microbatch.counted.sum()))
            with self.scope(microbatch, step, sequences), torch.set_grad_enabled(seed is not None):
                with self._users_forward():
                    output = part.forward(objective.inputs(microbatch), boundary_input)
                if not part.is_last:
                    return with_gradient(part.boundary_output())
                loss, count = objective.loss(microbatch, output)
            if routers is not None and routers.needs_totals:
                routers.settle()
            totals.append(torch.stack([loss.detach().to(wide), count.to(wide)]))
            have_gradients.append(loss.requires_grad)
            return loss if seed is None else loss * seed.to(loss.dtype)

        self._prepare_for(objective, microbatches)
        if routers is not None:
            routers.begin(self._own_sequences(microbatches) if routers.local is not None else 0)
            if routers.needs_totals and (len(microbatches) > 1 or self.pipeline is not None):
                self._count_routes(objective, microbatches, step)
        with self._users_code("backward"):
            self.drive(work, len(microbatches), backward=seed is not None, is_first_sum=True)
        if self.head is not None:
            self.head.seed = 1.0  # the tensor would outlive its step
        if seed is not None:
            self.sum_shared_gradients()
            self.apply_gradient_hooks(step)
        if routers is not None:
            routers.settle()
        self.detached = bool(have_gradients) and not any(have_gradients)
        return torch.stack(totals).sum(0)

    def _own_sequences(self, microbatches: Sequence[Any]) -> int:
        """Return the real sequences of some microbatches, on one of the ranks that hold the same; 0 on the others."""
        first = self.layout.index(Axis.TENSOR) == 0 and self.layout.index(Axis.PIPELINE) == 0
        return sum(int(microbatch.counted.sum()) for microbatch in microbatches) if first else 0

    @cached_property
    def _users_files(self) -> list[ModuleType]:
        """The Python modules in which classes of the user's module are defined."""
        return defining_files(module for part in self.parts for module in part.module.modules())

    @cached_property
    def sharded_classes(self) -> dict[type, frozenset[str]]:
        """The classes that FSDP2 made of those of the user's module, and the names that they had at first."""
        return sharded_classes(module for part in self.parts for module in part.module.modules())

    def _users_code(self, action: str) -> AbstractContextManager[None]:
        """Name an error of a user's module with its file and line; one of a collective of ours is none."""
        if self.facts.has_config:
            return nullcontext()
        return user_code(f"the {action} of {self.facts.definition}", is_of_collective)

    @contextmanager
    def _users_forward(self) -> Iterator[None]:
        """Name an error of a user's module, and refuse its own collectives."""
        if self.facts.has_config:
            yield
            return
        with (
            self._users_code("forward"),
            sharded_access_named(self.facts.definition),
            class_writes_refused(self.facts.definition, self.sharded_classes),
            own_collectives_refused(files=self._users_files),
        ):
            yield

    def _split(self, microbatch: Any) -> tuple[Any, SequenceShard | Sides | None]:
        """Return this rank's part of a microbatch, and which it is; the whole where sequences are whole."""
        return self.context.split(microbatch) if self.context else (microbatch, None)

    def _count_routes(self, objective: Objective, microbatches: Sequence[Any], step: int) -> None:
        """Run forward of all microbatches ahead of the step, for what its routers choose. Collective."""
        assert self.routers is not None
        self.run_ahead(objective, microbatches, step, lambda microbatch, output: None)
        self.routers.settle()

    def run_ahead(
        self, objective: Objective, microbatches: Sequence[Any], step: int, at_end: Callable[[Any, Any], None]
    ) -> None:
        """Run forward of all microbatches of a step without gradients. Collective.

        Args:
            at_end: called on the last stage with each of this rank's microbatches in order, as far as it is here, and
                the model's output.
        """

        def work(number: int, index: int, boundary_input: Tensor | None) -> Tensor:
            part, (microbatch, sequences) = self.parts[number], self._split(microbatches[index])
            with self.scope(microbatch, step, sequences), torch.no_grad():
                output = part.forward(objective.inputs(microbatch), boundary_input)
                if not part.is_last:
                    return part.boundary_output()
                at_end(microbatch, output)
                return torch.zeros((), device=self.device)

        self._prepare_for(objective, microbatches)
        self.drive(work, len(microbatches), backward=False)
        self.reshard()

    def scale_router_losses(self, loss_scale: float) -> None:
        """Give the gradients of the routers' losses the factor that all gradients of the next step have."""
        if self.routers is not None:
            self.routers.loss_scale = loss_scale

    def update_router_biases(self) -> None:
        """Move the biases of routers that have one against the uneven use of their experts in the step before."""
        rate = self.plan.job.router.bias_update_rate
        if not rate or self.routers is None:
            return
        for part in self.parts:
            buffers = dict(part.module.named_buffers())
            for stack, routed in zip(self.routers.stacks, self.routers.routed, strict=True):
                bias = buffers.get(self.facts.router_biases.get(stack, ""))
                if bias is not None:
                    bias.copy_(updated_bias(bias, routed, rate))

    def _prepare_for(self, objective: Objective, microbatches: Sequence[Any]) -> None:
        """Make stages ready for what travels between them in such microbatches.

        Raises:
            ModelError: hidden states would be of several shapes, for which a schedule has no room.
        """
        if self.pipeline is None:
            return
        if self.facts.stages.has_flat_boundaries:
            self._make_room(objective, microbatches)
        elif self.plan.sequence_lengths.grow or self.facts.takes_token_ids:
            self._shape_chain(microbatches)

    def _shape_chain(self, microbatches: Sequence[Any]) -> None:
        """Let stages wait for hidden states as long as the rows.

        A model with images takes rows of the length that these need, and a data set of one's own may give any.
        """
        assert self.pipeline is not None
        ids = [microbatch.inputs.get("input_ids") for microbatch in microbatches]  # a script brings its own
        if ids[0] is None:
            return
        shapes = {tuple(of_microbatch.shape) for of_microbatch in ids}
        if len(shapes) > 1:
            raise ModelError(
                f"the microbatches of a step have input_ids of several shapes, {listed(map(str, sorted(shapes)))}, and "
                f"stages of {self.facts.definition} take those of one; pad the rows, or use pipeline_parallel_degree 1"
            )
        self.pipeline.reshape(len(ids[0]), self.plan.positions_of(ids[0].shape[1]))

    def _make_room(self, objective: Objective, microbatches: Sequence[Any]) -> None:
        """Let stages see the inputs of some microbatches, each shape of them once.

        Where what travels between stages is of several sizes, all of it travels in the room of the largest.
        """
        boundaries = [part.boundary for part in self.parts if part.boundary is not None]
        shapes, sizes = set(), set()
        for inputs in map(objective.inputs, microbatches):
            if (own := _shapes_of(inputs)) not in shapes:
                self.prepare(inputs)
                shapes.add(own)
                sizes.add(tuple((boundary.shapes, boundary.input_shapes) for boundary in boundaries))
        if len(sizes) > 1:
            for boundary, of_boundary in zip(boundaries, zip(*sizes, strict=True), strict=True):
                both = zip(*(travels for travels, _ in of_boundary if travels is not None), strict=True)
                boundary.room = tuple(max(size for (size,) in side) for side in both)

    def prepare(self, inputs: dict[str, Any]) -> None:
        """Let traced stages see what the model is about to be called with."""
        for part in self.parts:
            if part.boundary is not None and part.boundary.prepare is not None:
                part.boundary.room = None
                part.boundary.prepare(inputs)

    def drive(
        self, work: MicrobatchWork, count: int, backward: bool, last: bool = True, is_first_sum: bool = False
    ) -> None:
        """Call `work` for every microbatch of every part, in the schedule's order, and backward on what it returns.

        Gradients of parameters that several ranks hold in part are left to `sum_shared_gradients`.

        Args:
            work: runs a microbatch of a part; of the last part it returns the loss times the seed of backward.
            count: microbatches.
            backward: whether the losses are run backward.
            last: whether the last microbatch's backward completes the gradients, or more are to come.
            is_first_sum: whether no earlier call has left gradients.
        """

        def begin(number: int, is_last: bool) -> None:
            self.parts[number].completes = last and is_last
            begin_microbatch(self.parts[number].fsdp_modules, self.plan, last and is_last, is_first_sum)
            if self.plan.job.model.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()  # what the last microbatch's graphs hold is no longer read

        if self.statistics is not None and backward:
            self.statistics.begin()
        with ranks_in_step():
            if self.pipeline is None:
                for index in range(count):
                    begin(0, index == count - 1)
                    if backward:
                        mark_phase("forward")
                    loss = work(0, index, None)
                    if backward and loss.requires_grad:  # a script's microbatch may have none
                        mark_phase("backward")
                        loss.backward()
            elif backward:
                mark_phase("forward and backward of the stages")
                self.pipeline.train(work, begin, count, [part.weight_gradients for part in self.parts])
                if self.plan.splits_backward and last:
                    for modules in self._roots:
                        reduce_gradients(modules)
            else:
                self.pipeline.evaluate(work, count)
        self._share_changed_buffers()

    def _share_changed_buffers(self) -> None:
        """Copy running statistics from the stage whose forward changes them to the others, which save or show them."""
        boundary = self.parts[0].boundary
        for name, stage in (boundary.changed_buffers if boundary else {}).items():
            owners = (part for part in self.parts if part.boundary and part.boundary.stage == stage)
            source = next(owners, self.parts[0]).module.get_buffer(name)
            owner = self.layout.rank_at(pipeline=self.plan.stage_ranks[stage])
            dist.broadcast(source, owner, group=self.layout.group(Axis.PIPELINE))
            for part in self.parts:
                buffer = part.module.get_buffer(name)
                if buffer is not source:
                    buffer.copy_(source)

    def complete_gradients(self) -> None:
        """Reduce what backwards have left that did not complete the gradients. Collective over those who share them."""
        for use in self.uses:
            use.only_reduces()
        for modules in self._roots:
            reduce_gradients(modules)

    def sum_shared_gradients(self) -> None:
        """Sum gradients of parameters that several ranks hold, each for a part of the activations or of the stages."""
        for names, group in self.partial:
            sum_together(self.tensor_map.gradients(names), group, self.device, "partial gradients")
        if self.unsharded:
            self._sum_used(self.unsharded, self.layout.group(*data_axes()), "unsharded gradients")
        for ranks, names in self._tied():
            self._sum_used(names, self.layout.holders_group(ranks), "tied gradients")

    def apply_gradient_hooks(self, step: int) -> None:
        """Let the user's hooks change the gradients of a step, which are whole sums by now. Collective."""
        for name, hooks in self.gradient_hooks.items():
            apply_gradient_hooks(self.tensor_map[name], hooks, self.plan.job.training.seed + step)

    def _sum_used(self, names: Sequence[str], group: dist.ProcessGroup, unit: str) -> None:
        """Sum gradients of parameters that some of a group's ranks have used; one that none has is left without."""
        trained = [name for name in names if self.tensor_map[name].parameter.requires_grad]
        parameters = [self.tensor_map[name].parameter for name in trained]
        if not trained:
            return
        unused = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        for number in unused:
            parameters[number].grad = torch.zeros_like(parameters[number])
        gradients = self.tensor_map.gradients(trained)
        used = torch.ones(len(parameters), dtype=gradients[0].dtype, device=self.device)  # for one message with them
        for number in unused:
            used[number] = 0
        sum_together([used, *gradients], group, self.device, unit)
        if unused:  # only then have the counts to be read on the host
            counts = used.tolist()
            for number in (number for number in unused if not counts[number]):
                parameters[number].grad = None

    def use_counts(self) -> tuple[int, int, int]:
        """Return numbers of this rank's step. Collective.

        They are parameters that it has not used, irregularities of its units' order, and buffers that it has changed.
        """
        self.meet()
        unused = sum(len(use.never_used()) for use in self.uses)
        irregular = sum(use.irregular + len(use.changed) for use in self.uses)
        return unused, irregular, 0 if self.statistics is None else len(self.statistics.changed())

    def meet(self) -> None:
        """Meet the ranks that share units, ahead of a collective of all ranks. Collective.

        Raises:
            ModelError: some rank has gathered or reduced a unit more often than another.
        """
        for use in self.uses:
            use.meet()

    def settle_use(self, unused: bool, irregular: bool, changed_buffers: bool = False) -> None:
        """Compare the ranks' use of units, drop gradients that are zeros of all ranks, share statistics. Collective.

        Args:
            unused: some rank has not used a parameter.
            irregular: some rank has run units in an order that is not the model's.
            changed_buffers: the forwards of some rank have changed a buffer.

        Raises:
            ModelError: the ranks are out of step, or a forward has written a parameter.
        """
        if irregular:
            compare_use(self.uses, self.layout.index(Axis.PIPELINE), self.device)
            for use in self.uses:
                use.takes_part = False  # their order is not the model's, and equal on all ranks
        if unused:
            self._drop_unused_gradients()
        for use in self.uses:
            use.reset()
        if self.statistics is not None and changed_buffers:
            self.statistics.settle(self.device)
        elif self.statistics is not None:
            self.statistics.forget()

    def _drop_unused_gradients(self) -> None:
        """Drop the zeros of parameters that no rank has used: an optimizer leaves those as they are."""
        never_used = {key for use in self.uses for key in use.never_used()}
        names = list(self.facts.parameter_shapes)
        used_here = {
            entry.name for entry in self.tensor_map
            if entry.parameter.grad is not None and id(entry.parameter) not in never_used
        }  # fmt: skip
        used = torch.tensor([name in used_here for name in names], dtype=torch.int32, device=self.device)
        with UNUSED_PARAMETERS:
            dist.all_reduce(used)
        unused = {name for name, count in zip(names, used.tolist(), strict=True) if count == 0}
        for entry in self.tensor_map:
            if entry.name in unused:
                entry.parameter.grad = None

    def copy_tied(self) -> None:
        """Copy embeddings that are tied across stages from the first stage to the others that hold them."""
        for ranks, names in self._tied():
            group = self.layout.holders_group(ranks)
            first = dist.get_process_group_ranks(group)[0]
            for name in names:
                with CollectiveName(name, group_name(group), "broadcast"):
                    dist.broadcast(self.tensor_map[name].local, first, group=group)

    def _tied(self) -> Iterator[tuple[Sequence[int], list[str]]]:
        """Yield (pipeline ranks, names of the parameters that are tied across them)."""
        for ranks in dict.fromkeys(self.tied.values()):
            yield ranks, [name for name, holders in self.tied.items() if holders == ranks]

    def whole_tensors(
        self, gradients: bool = False, unsharded: bool = False, names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (logical name, whole tensor or gradient) of every parameter of the model, on every rank. Collective.

        Args:
            gradients: those of the parameters.
            unsharded: parameters are taken as `unshard` has gathered them: collective over one copy of the model.
            names: of these parameters alone.
        """
        parts = self.unsharded_parameters() if unsharded else {}
        wanted = self.facts.parameter_shapes if names is None else names
        if self.pipeline is None:
            for entry in [entry for entry in self.tensor_map if entry.name in wanted]:
                yield entry.name, self._whole(entry, gradients, parts.get(entry.name))
            return
        group = self.layout.group(Axis.PIPELINE)
        stages_of = holders(self.plan, self.facts)
        for name, shape in [item for item in self.facts.parameter_shapes.items() if item[0] in wanted]:
            owner = self.layout.rank_at(pipeline=self.plan.stage_ranks[stages_of[name][0]])
            is_local = name in self.tensor_map.names
            part = parts.get(self.tensor_map[name].name) if is_local else None
            value = (
                self._whole(self.tensor_map[name], gradients, part)
                if is_local
                else torch.empty(shape, dtype=self.parameter_dtype(name))
            )
            whole = value.to(self.device).contiguous()
            if dist.get_rank() != owner:
                whole = torch.empty_like(whole)  # `value` may be the parameter or gradient itself, which a read keeps
            dist.broadcast(whole, owner, group=group)
            yield name, whole

    def _whole(self, entry: ParameterEntry, gradient: bool, part: Tensor | None) -> Tensor:
        whole = entry.whole(gradient, part)
        return whole.to(self.parameter_dtype(entry.name)) if entry.packing else whole

    def unshard(self, wait: bool = False) -> None:
        """Begin to gather all parameters, for the next forward or `whole_tensors`; with `wait`, until they are there.

        Collective over the shard group.
        """
        for module in self.fsdp_modules:
            module.unshard(async_op=not wait)

    def unsharded_parameters(self) -> dict[str, Tensor]:
        """Return parameters as the modules hold them while they are gathered, in the dtype of parameters.

        Packed weights stay packed.
        """
        self.unshard(wait=True)
        named = ((name, value) for part in self.parts for name, value in part.module.named_parameters())
        first = ((self.tensor_map.names[name], value.detach()) for name, value in named)
        packed = self.facts.packed
        return {name: value if name in packed else value.to(self.parameter_dtype(name)) for name, value in first}

    def last_logits(self, ids: Tensor) -> Tensor:
        """Return [B, V] fp32 logits of the last of [B, S] ids, on every rank. Collective; under `whole_logits`."""
        return self.read_logits(ids, lambda logits: logits[:, -1].float(), self.facts.vocabulary_size)

    def read_logits(self, ids: Tensor, read: Callable[[Tensor], Tensor], width: int) -> Tensor:
        """Return what `read` makes of the logits of some ids, on every rank. Collective; under `whole_logits`.

        Args:
            ids: [B, S] of this rank's share of the data; shares have the same shape.
            read: makes [B, width] in fp32 of logits [B, S, V].
        """

        def work(number: int, index: int, boundary_input: Tensor | None) -> Tensor:
            part = self.parts[number]
            output = part.forward({"input_ids": ids, "use_cache": False}, boundary_input)
            return read(output.logits) if part.is_last else part.boundary_output()

        if self.pipeline is None:
            return work(0, 0, None)
        self.prepare({"input_ids": ids})
        shape = None if self.facts.stages.has_flat_boundaries else (*ids.shape, self.facts.hidden_size)
        results = self.pipeline.evaluate(work, 1, shape)
        # A view of the logits would be sent as the bytes that lie behind its first element.
        values = results[0].contiguous() if results else torch.empty(len(ids), width, device=self.device)
        dist.broadcast(values, self.pipeline.last_rank, group=self.layout.group(Axis.PIPELINE))
        return values

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of all parts."""
        for part in self.parts:
            part.module.train(mode)

    @contextmanager
    def whole_logits(self) -> Iterator[None]:
        """Use evaluation mode and the model's own head inside, for generation."""
        training = self.module.training
        self.train(False)
        if self.head:
            self.head.deferred = False
        try:
            yield
        finally:
            self.train(training)
            if self.head:
                self.head.deferred = True

    def reshard(self) -> None:
        """Free parameters that stay gathered after a forward that no backward follows."""
        for module in self.fsdp_modules:
            module.reshard()

    @contextmanager
    def ema_in_place(self) -> Iterator[None]:
        """Let the model have the moving averages of its weights inside; nothing else may use them meanwhile."""
        assert self.ema is not None
        self.reshard()
        self.ema.swap()
        try:
            yield
        finally:
            self.reshard()
            self.ema.swap()

    @contextmanager
    def scope(
        self, microbatch: Microbatch, step: int, sequences: SequenceShard | Sides | None = None
    ) -> Iterator[None]:
        """Be inside the dropout scope of a microbatch, where generators draw what belongs to it."""
        seed = self.plan.job.training.seed
        functional = self.facts.has_functional_dropout
        part = 0 if self.facts.heads_whole else self.layout.index(Axis.TENSOR)
        documents = getattr(microbatch, "document_ids", None) if self.plan.attention else None
        scope = DropoutScope(
            seed,
            step,
            microbatch.rows,
            functional=functional,
            part=part,
            sequences=None if isinstance(sequences, tuple) else sequences,
            sides=sequences if isinstance(sequences, tuple) else (),
            documents=documents,
            counted=getattr(microbatch, "counted", None),
            is_token=None if self.facts.stages.encoder else getattr(microbatch, "is_token", None),
            first_row=_first_row(microbatch) if self.facts.may_draw and len(microbatch.rows) else None,
            numbers_positions=numbers_positions(self.module, getattr(microbatch, "inputs", None)),
        )
        with dropout_scope(scope), scope.seeded(""):
            yield


def _first_row(microbatch: Microbatch) -> int:
    known: int | None = getattr(microbatch, "first_row", None)
    return int(microbatch.rows[0]) if known is None else known
