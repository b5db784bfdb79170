"""A distributed model's weights: whole by name, this rank's part, and back.

`ModelWeights` is the part of `DistributedModel` that knows which tensors live here. Optimizer and checkpoints work with
it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.modules import persistent_buffers
from shardwise.collectives.names import CollectiveName
from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis, one_copy_axes
from shardwise.parallel.layout import smp_axes
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.v1.host import HOST, HostWeights
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.words import listed

USE_OF_UNITS = CollectiveName("the use of sharded units", "world", "all_reduce")

PARTIAL = "_smp_is_partial"


class ModelWeights:
    """The weights of the script's module, distributed or not yet.

    Args:
        session: the session of this process.
        module: the script's module, or what took its place.

    Attributes:
        names: id of a parameter -> its name in the module.
        parallel: the engine's model, once the module is distributed.
        gathered: parameters whose optimizer state alone is sharded are whole on every rank.
        unsettled: gradients that several ranks hold in part are not summed yet.
    """

    def __init__(self, session: SmpSessionV1, module: nn.Module) -> None:
        self.module = module
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.parallel: ParallelModel | None = None
        self.gathered = False
        self.unsettled = False
        self._settled_steps = 0
        self._session = session
        self._lent: HostWeights | None = None
        self._pending: list[tuple[Mapping[str, Any], bool]] = []
        self._originals: list[nn.Parameter] = []

    def require_parallel(self) -> ParallelModel:
        """Return the engine's model. Raises StepUsageError before the first forward."""
        if self.parallel is None:
            raise StepUsageError("the model is distributed at its first forward, which has not been; run a step first")
        return self.parallel

    def adopt(self, parallel: ParallelModel, originals: list[nn.Parameter]) -> None:
        """Take `parallel` as the model, in the place of its `originals`, and load what waits for it."""
        self.parallel = parallel
        for parameter in originals:  # an optimizer may hold them, and its names go by their identity: only memory goes
            parameter.data = parameter.data.new_empty(0)
        self._originals = originals
        for entry in parallel.tensor_map:
            self.names[id(entry.parameter)] = entry.name
        for weights, strict in self._pending:
            self.load(weights, strict)
        self._pending.clear()

    # ---- out of the model

    def whole(self, call: str, exact: bool = True) -> dict[str, Tensor]:
        """Return whole tensors on the CPU by name, ties under all their names, persistent buffers too.

        Collective once distributed, over the ranks that hold the model together.

        Args:
            call: the function that the script has called.
            exact: False takes parameters that are gathered already as they are, maybe in the dtype of computing;
                collective then over the ranks of one copy of the model, which may be called where the reduced data rank
                is 0.

        Raises:
            MessageError: one of the ranks will not come.
            StepUsageError: what was loaded waits for the first step.
        """
        parallel, session = self.parallel, self._session
        if self._pending:
            raise StepUsageError(f"{call}: weights that were loaded take their places at the first step; run one first")
        if parallel is None:
            return {name: value.detach().to(HOST) for name, value in self.module.state_dict().items()}
        if self._lent is not None:
            return {name: value.detach().to(HOST, copy=True) for name, value in self._lent.weights().items()}
        gathered = self.gathered and not exact
        session.waits.assemble(call, session.layout.ranks(*(smp_axes("mp") if gathered else one_copy_axes())))
        tensors = {
            name: value.detach().to(HOST, copy=True) for name, value in parallel.whole_tensors(unsharded=gathered)
        }
        tensors |= self._all_buffers()
        for group in parallel.facts.ties:
            tensors |= dict.fromkeys(group[1:], tensors[group[0]])
        return tensors

    def _all_buffers(self) -> dict[str, Tensor]:
        buffers = {
            name: buffer.detach().to(HOST) for name, buffer in persistent_buffers(self.module) if not buffer.is_meta
        }
        stages = self._session.layout.size(Axis.PIPELINE)
        if stages == 1:
            return buffers
        by_stage: list[Any] = [None] * stages
        dist.all_gather_object(by_stage, buffers, group=self._session.layout.group(Axis.PIPELINE))
        return {name: buffer for part in by_stage for name, buffer in part.items()}

    def local(self) -> dict[str, Tensor]:
        """Return this rank's elements by name, and its persistent buffers."""
        if self.parallel is None:
            return self.whole("model.local_state_dict")
        self.return_from_host()
        return {entry.name: entry.local.to(HOST, copy=True) for entry in self.parallel.tensor_map} | self._buffers()

    def local_or_gathered(self) -> dict[str, Tensor]:
        """Return SMP's part of a rank: `local`, or, where the optimizer's state alone is sharded, whole parameters.

        The latter are in the dtype of computing. Collective over the shard group then, unless an optimizer step has
        gathered them.

        Raises:
            MessageError: one of its ranks will not come.
        """
        parallel, session = self.parallel, self._session
        if parallel is None or not session.cfg.shard_optimizer_state or session.layout.size(Axis.SHARD) == 1:
            return self.local()
        self.return_from_host()
        if not self.gathered:
            session.waits.assemble("model.local_state_dict", session.layout.ranks(Axis.SHARD))
        tensors = {name: value.to(HOST, copy=True) for name, value in parallel.unsharded_parameters().items()}
        if not self.gathered:
            parallel.reshard()
        return tensors | self._buffers()

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().to(HOST) for name, buffer in persistent_buffers(self.module)}

    def cuts(self) -> dict[str, dict[str, Any]]:
        """Return the cuts of the tensors that this rank holds a part of, by name; they join parts without a model."""
        entries = self.parallel.tensor_map if self.parallel is not None else ()
        splits = {entry.name: entry.split for entry in entries if entry.split is not None}
        # Their axis is tensor, the one that scripts split along; an enum would not be plain data.
        return {
            name: {key: value for key, value in dataclasses.asdict(split).items() if key != "axis"}
            for name, split in splits.items()
        }

    def with_ties(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return `weights` under all names of a parameter that has several; files hold it once."""
        complete = dict(weights)
        for group in self._ties():
            known = [name for name in group if name in weights]
            complete |= {name: weights[known[0]] for name in group if known and name not in weights}
        return complete

    def _ties(self) -> Iterable[Iterable[str]]:
        if self.parallel is not None:
            return list(self.parallel.facts.ties)
        groups: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return groups.values()

    # ---- into the model

    def load_or_wait(self, weights: Mapping[str, Any], strict: bool) -> None:
        """Load `weights`, or keep them for the distributed model: a rank's part, and what a module on meta gets.

        Raises:
            CheckpointError: names or shapes do not fit, and `strict` is True.
        """
        waits = is_partial(weights) or any(parameter.is_meta for parameter in self.module.parameters())
        if self.parallel is None and waits:
            self._pending.append((weights, strict))
        else:
            self._pending.clear()  # what is loaded last counts
            self.load(weights, strict)

    def load(self, weights: Mapping[str, Any], strict: bool) -> None:
        """Load whole weights or one rank's part into the module, distributed or not.

        Raises:
            CheckpointError: names or shapes do not fit, and `strict` is True.
        """
        partial = is_partial(weights)
        tensors = {name: value for name, value in weights.items() if name != PARTIAL}
        parallel = self.parallel
        if parallel is None:
            try:
                self.module.load_state_dict(tensors, strict=strict)
            except RuntimeError as error:
                raise CheckpointError(f"the weights do not fit the model: {error}") from error
            return
        names = parallel.tensor_map.names
        buffers = dict(persistent_buffers(self.module))
        local = {entry.name for entry in parallel.tensor_map}
        if strict:
            known = set(buffers) | set(parallel.facts.parameter_shapes) | set(names)
            _check_names(sorted(local - tensors.keys()), sorted(tensors.keys() - known))
        self.release()
        for entry in parallel.tensor_map:
            if entry.name in tensors:
                _load_entry(entry, tensors[entry.name], partial)
        for name, buffer in buffers.items():
            if name in tensors:
                buffer.copy_(tensors[name])

    # ---- between steps

    def share_buffers(self) -> None:
        """Copy the first data rank's running statistics to the other ranks that hold the same. Collective over them.

        DistributedDataParallel does so before each forward.
        """
        layout = self._session.layout
        if layout.data_ranks == 1:
            return
        group = layout.group(*smp_axes("rdp"))
        for _, buffer in persistent_buffers(self.module):
            if buffer.is_floating_point() or buffer.dim() == 0:  # masks stay as they are
                dist.broadcast(buffer, dist.get_process_group_ranks(group)[0], group=group)

    def settle_gradients(self) -> None:
        """Sum what several ranks hold in part, once for each optimizer step. Collective."""
        self.return_from_host()
        if self.unsettled and self.parallel is not None:
            self.parallel.sum_shared_gradients()
            self.parallel.apply_gradient_hooks(self._settled_steps)
            self._settled_steps += 1
            counts = torch.tensor(self.parallel.use_counts(), device=self.parallel.device)
            with USE_OF_UNITS:
                dist.all_reduce(counts)
            self.parallel.settle_use(*(count > 0 for count in counts.tolist()))
        self.unsettled = False

    def gather(self) -> None:
        """Gather whole parameters after an optimizer step under `shard_optimizer_state`. Collective over the shards.

        Scripts may then ask for them on some ranks alone, as in SMP.
        """
        if self.parallel is not None and self._session.cfg.shard_optimizer_state:
            self.parallel.unshard()
            self.gathered = True

    def release(self) -> None:
        """Let go of whole parameters before the shards change, also of those that an evaluation has left gathered."""
        self.return_from_host()
        if self.parallel is not None:
            if self.gathered:
                self.parallel.unshard(wait=True)  # what is under way cannot be let go of
            self.parallel.reshard()
        self.gathered = False

    # ---- on the host

    @property
    def are_lent(self) -> bool:
        """True while the module has whole weights on the CPU."""
        return self._lent is not None

    def lend_to_host(self) -> None:
        """Put whole weights on the CPU into the module, until `return_from_host`. Collective.

        Raises:
            MessageError: one of the ranks will not come.
        """
        if self._lent is None:
            whole = self.whole("model.cpu")
            self.release()
            self._lent = HostWeights(self.module, self.require_parallel(), whole, self.return_from_host)

    def return_from_host(self) -> None:
        """Put the distributed weights back where `lend_to_host` has put whole ones."""
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None


def marked_partial(weights: dict[str, Any]) -> dict[str, Any]:
    """Return `weights` with the key that says that these are one rank's part."""
    return {**weights, PARTIAL: True}


def is_partial(weights: Mapping[str, Any]) -> bool:
    """Tell if these are one rank's part."""
    return bool(weights.get(PARTIAL, False))


def _load_entry(entry: ParameterEntry, value: Tensor, partial: bool) -> None:
    """Load a whole tensor, or a rank's part: its elements, or what its shard group holds together."""
    shapes = [tuple(entry.local.shape), tuple(entry.parameter.shape)] if partial else [entry.shape]
    if tuple(value.shape) not in shapes:
        raise CheckpointError(
            f"{entry.name} is {list(value.shape)} in the checkpoint and {list(shapes[-1])} here; it is of other "
            "degrees or another model"
        )
    if not partial:
        entry.store(value.to(entry.local.device))
    elif tuple(value.shape) == shapes[-1]:
        entry.store_part(value)
    else:
        entry.local.copy_(value)


def _check_names(missing: list[str], unknown: list[str]) -> None:
    if missing or unknown:
        problems = [f"lack {listed(missing)}"] * bool(missing) + [f"have {listed(unknown)} too"] * bool(unknown)
        raise CheckpointError(f"the weights {' and '.join(problems)}; use strict=False to load what fits")
