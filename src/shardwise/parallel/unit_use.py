"""Use of sharded units: ranks whose microbatches use different blocks or parameters stay in step.

What a rank does not use takes part with zeros: a parameter in the reduction of its unit, and a whole unit in the
gathers and reductions of forward and backward. Units take part in the order in which the model has them. A rank that
runs one first takes part for those before it that it has not run; the rest follow at the end. In backward the order is
reversed.

Where a rank runs units in another order, or repeats one, that order has to be equal on all ranks. It is compared
before the optimizer uses a number (`compare_use`). The native engine notices it earlier: it compares the units' names
in every collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.autograd import accumulate_grad_hooks, gradient_hooks, share_attributes, version_of
from shardwise._torch_compat.fsdp2 import ShardedUnit, UnitHooks
from shardwise.collectives import registration
from shardwise.collectives.names import SAME_ORDER, CollectiveName, unit_names
from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.model.value_sums import is_other, value_sum

ORDER_OF_UNITS = CollectiveName("the order of sharded units", "world", "all_gather")
END_OF_UNITS = CollectiveName("the end of sharded units", "shards and replicas", "barrier")
NAMES_OF_UNITS = CollectiveName("the names of sharded units", "world", "all_gather_object")

MOST_EVENTS = 1 << 16  # of a step; older ones are forgotten, on all ranks alike


@dataclass(frozen=True)
class Traits:
    """Traits of a parameter that a forward may change: whether it is trained, and its number of gradient hooks."""

    trained: bool
    hooks: int

    @classmethod
    def of(cls, parameter: Tensor) -> Traits:
        """Return the traits of a parameter now."""
        return cls(parameter.requires_grad, len(gradient_hooks(parameter)) + len(accumulate_grad_hooks(parameter)))

    def change(self, later: Traits) -> str:
        """Say what has happened since; "" for nothing."""
        if later.trained != self.trained:
            return "freezes or unfreezes"
        return "puts a hook on the gradient of" if later.hooks > self.hooks else ""


@dataclass(frozen=True)
class GatheredState:
    """A gathered parameter: its traits, how often autograd saw it written, and the sum of its values.

    Traits and sum are None where they are not watched.
    """

    traits: Traits | None
    version: int
    total: Tensor | None

    def change(self, later: GatheredState) -> str:
        """Say what has happened since; "" for nothing."""
        if later.version != self.version or is_other(later.total, self.total):
            return "writes"
        return self.traits.change(later.traits) if self.traits and later.traits else ""


class UnitUse(UnitHooks):
    """The units under one root, as this rank's microbatches use them.

    Attributes:
        changed: what a forward of this step has done to parameters, by their units and places in these.
        irregular: times in this step that the order was not the model's.
        events: gathers and reductions of this step, as (operation, unit).
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        takes_part: bool,
        watches_traits: bool = False,
        watches_values: bool = False,
    ) -> None:
        """Watch `modules`, the root first.

        Args:
            modules: all of FSDP2's modules under one root.
            takes_part: whether a rank takes part for whole units that it does not run.
            watches_traits: whether a forward may do more to parameters than autograd sees: a user's.
            watches_values: whether the values of gathered parameters are compared before and after a forward, which
                may write them behind autograd's back.
        """
        names = unit_names(modules[0])
        units = {id(unit.state): unit for unit in map(ShardedUnit, reversed(modules))}  # one for a group of blocks
        self.units = list(units.values())[::-1]
        self.names = [names[unit.module] for unit in self.units]
        self._reductions = [CollectiveName(name, Axis.REPLICA, "all_reduce") for name in self.names]
        self._groups = list(dict.fromkeys(group for unit in self.units for group in unit.process_groups()))
        self.takes_part = takes_part
        self.watches_traits, self.watches_values = watches_traits, watches_values
        self.changed: dict[tuple[int, int], str] = {}
        self.irregular = 0
        self.events: deque[tuple[str, int]] = deque(maxlen=MOST_EVENTS)
        self._compared = False
        self._gathered: set[int] = set()
        self._kept: set[int] = set()
        self._filled: set[int] = set()
        self._used: set[int] = set()
        self._states: dict[int, list[GatheredState]] = {}
        self._traits: list[list[Traits]] = []  # of sharded parameters, at the root's forward
        self._forwarded: set[int] = set()
        self._backwarded: set[int] = set()
        self._reduced: set[int] = set()
        self._needs_backward = self._find_needs_backward(modules[0])
        self._inside = [self._find_inside(unit) for unit in self.units]
        for index, unit in enumerate(self.units):
            unit.watch(self, index)

    def _find_needs_backward(self, root: Any) -> list[bool]:
        """Return for each unit whether it or anything ahead of it in the model is trained."""
        owners: dict[nn.Parameter, int] = {}
        for index, unit in enumerate(self.units):
            owners |= {parameter: index for module in unit.modules for parameter in module.parameters()}
        needs: dict[int, bool] = {}
        trained = False
        for parameter in root.parameters():
            trained = trained or parameter.requires_grad
            needs[owners[parameter]] = trained
        return [needs.get(index, False) for index in range(len(self.units))]

    def _find_inside(self, outer: ShardedUnit) -> set[int]:
        """Return the units inside of `outer`, whose backward begins before theirs."""
        modules = {id(inner) for module in outer.modules for inner in module.modules() if inner is not module}
        return {index for index, unit in enumerate(self.units) if id(unit.module) in modules}

    # ---- called by FSDP2's units

    def before_forward(self, index: int) -> None:
        """Take part for the units ahead of `index` that this microbatch has not run."""
        if index == 0:
            self._forwarded.clear()
            self._traits = self._sharded_traits() if self.watches_traits else []
            return
        if self._backwarded:
            return  # a unit inside of a checkpoint, whose forward runs again in backward
        if index in self._forwarded:
            self.irregular += 1
            self._hold(index)
        self._run_skipped_forwards(index)
        self._forwarded.add(index)
        self._record("forward", index)

    def after_gathering(self, index: int) -> None:
        """Note the versions of the unit's parameters; gathered ones have the attributes of sharded ones."""
        if index not in self._gathered:
            self._gathered.add(index)
            for sharded, gathered in self.units[index].parameters():
                share_attributes(sharded, gathered)
        self._states[index] = self._states_of(index)

    def after_forward(self, index: int) -> None:
        """Note which parameters the unit's forward has changed; at the root's end take part for skipped units."""
        if index == 0:
            self._run_skipped_forwards(len(self.units))
            self._compare_first_forward()
            self._compare_traits()
        before = self._states.pop(index, [])
        for place, (earlier, now) in enumerate(zip(before, self._states_of(index), strict=False)):
            if (change := earlier.change(now)) and (index, place) not in self.changed:
                self.changed[index, place] = change

    def _sharded_traits(self) -> list[list[Traits]]:
        return [[Traits.of(sharded) for sharded, _ in unit.parameters()] for unit in self.units]

    def _compare_traits(self) -> None:
        """Note what the root's forward has done to parameters of units that did not run at the time."""
        now_of_all = self._sharded_traits() if self._traits else []
        for index, (before, now) in enumerate(zip(self._traits, now_of_all, strict=True)):
            for place, (earlier, later) in enumerate(zip(before, now, strict=True)):
                if change := earlier.change(later):
                    self.changed[index, place] = change

    def _compare_first_forward(self) -> None:
        """Compare the orders of all ranks once, ahead of the first backward, where unequal ones would not meet.

        Until then what was gathered for a skipped unit is kept, so that one that runs late gathers nothing.
        """
        for index in self._kept:
            self.units[index].free()
        self._kept.clear()
        if self._compared or not self.takes_part or not torch.is_grad_enabled() or dist.get_backend() == "fake":
            return  # a traced job has no other ranks
        self._compared = True
        irregular = torch.tensor(self.irregular, device=self._device())
        with ORDER_OF_UNITS:
            dist.all_reduce(irregular)
        if irregular.item():
            compare_use([self], 0, irregular.device)

    def _device(self) -> torch.device:
        """Return the device on which the units compute."""
        parameters = (gathered for unit in self.units for _, gathered in unit.parameters())
        return next((gathered.device for gathered in parameters if gathered is not None), torch.device("cpu"))

    def _states_of(self, index: int) -> list[GatheredState]:
        gathered_parameters = (gathered for _, gathered in self.units[index].parameters() if gathered is not None)
        return [
            GatheredState(
                Traits.of(gathered) if self.watches_traits else None,
                version_of(gathered),
                value_sum(gathered) if self.watches_values else None,
            )
            for gathered in gathered_parameters
        ]

    def before_backward(self, index: int) -> None:
        """Take part for the units behind `index` that this backward has not reached."""
        if index == 0:
            return
        self.irregular += index in self._backwarded or not self._needs_backward[index]
        self._run_skipped_backwards(index)
        self.irregular += any(later not in self._reduced for later in self._backwarded if later > index)
        self._backwarded.add(index)
        self._record("backward", index)

    def before_reduction(self, index: int) -> CollectiveName:
        """Give parameters without a gradient one of zeros, if the unit is about to be reduced.

        Returns:
            The name of the all-reduce over replicas, which FSDP2 calls itself.
        """
        unit = self.units[index]
        self._reduced.add(index)
        self._record("reduction", index)
        if unit.reduces:
            filled = {id(sharded) for sharded in unit.fill_unused()}
            self._filled |= filled
            self._used.update(id(sharded) for sharded, _ in unit.parameters() if id(sharded) not in filled)
        return self._reductions[index]

    def at_end_of_backward(self) -> None:
        """Take part for the units that backward has not reached, and reduce those whose inputs had no gradient."""
        if self.takes_part:
            for index in reversed(range(1, len(self.units))):
                if index in self._backwarded and index not in self._reduced:
                    self.units[index].reduce()
                elif index not in self._backwarded and self._needs_backward[index]:
                    self.units[index].backward_without_computing()
        self._backwarded.clear()
        self._reduced.clear()

    def only_reduces(self) -> None:
        """Take what comes next for the end of a backward that has run: it reduces what earlier ones have left."""
        self._backwarded.update(range(1, len(self.units)))

    def _run_skipped_forwards(self, end: int) -> None:
        skipped = [index for index in range(1, end) if index not in self._forwarded]
        if not self.takes_part:
            self.irregular += len(skipped)
            return
        for index in skipped:
            self._hold(index)
            self.units[index].forward_without_computing()

    def _hold(self, index: int) -> None:
        if not self._compared and self.takes_part:
            self.units[index].hold()
            self._kept.add(index)

    def _run_skipped_backwards(self, start: int) -> None:
        if not self.takes_part:
            return
        for index in reversed(range(start + 1, len(self.units))):
            is_next = index not in self._backwarded and index not in self._inside[start]
            if is_next and self._needs_backward[index]:
                self.units[index].backward_without_computing()

    def _record(self, operation: str, index: int) -> None:
        if torch.is_grad_enabled():
            self.events.append((operation, index))

    # ---- once a step

    def meet(self) -> None:
        """Meet the ranks that share the units, on the native engine: one that runs more of them than others is told.

        In a group of all ranks the next collective does that. Collective.
        """
        for group in self._groups:
            if group is not dist.group.WORLD and dist.get_backend(group) == registration.BACKEND:
                with END_OF_UNITS:
                    dist.barrier(group)

    def never_used(self) -> set[int]:
        """Return the sharded parameters, by identity, that no microbatch of this rank has used in this step."""
        return self._filled - self._used

    def changes(self) -> list[str]:
        """Say what a forward of this step has done to parameters."""
        names = [unit.parameter_names() for unit in self.units]
        return [f"{change} the parameter {names[unit][place]}" for (unit, place), change in self.changed.items()]

    def reset(self) -> None:
        """Forget the step."""
        self._filled.clear()
        self._used.clear()
        self.changed.clear()
        self.events.clear()
        self.irregular = 0


def compare_use(uses: Sequence[UnitUse], stage: int, device: torch.device) -> None:
    """Raise on every rank if ranks of one stage ran units in different orders, or a forward wrote a parameter.

    Collective over all ranks.
    """
    events = [(f"{operation} of {use.names[index]}") for use in uses for operation, index in use.events]
    changed = sorted({change for use in uses for change in use.changes()})
    digest = int.from_bytes(blake2b("\0".join(events).encode(), digest_size=8).digest(), "little") >> 1
    message = torch.tensor([stage, digest, len(changed)], dtype=torch.int64, device=device)
    answers = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    with ORDER_OF_UNITS:
        dist.all_gather(answers, message)
    reports = [tuple(answer.tolist()) for answer in answers]
    digests = {(number, value) for number, value, _ in reports}
    if len(digests) == len({number for number, _ in digests}) and not any(count for *_, count in reports):
        return
    gathered: list[tuple[int, list[str], list[str]] | None] = [None] * dist.get_world_size()
    with NAMES_OF_UNITS:
        dist.all_gather_object(gathered, (stage, events, changed))
    raise ModelError(_explain([entry for entry in gathered if entry is not None]))


def _explain(ranks: Sequence[tuple[int, list[str], list[str]]]) -> str:
    """Return the message for (stage, events, changes of parameters) of each rank."""
    for rank, (_, _, changed) in enumerate(ranks):
        if changed:
            return (
                f"the forward on rank {rank} {changed[0]}, which is sharded: the ranks' copies are dropped after the "
                "forward, and the change with them. Keep what the forward writes in a buffer, change the parameter in "
                "a callback after the step, put hooks on it in the constructor, or train with one worker"
            )
    first: dict[int, tuple[int, list[str]]] = {}
    for rank, (stage, events, _) in enumerate(ranks):
        other, expected = first.setdefault(stage, (rank, events))
        if events != expected:
            pairs = zip([*expected, "nothing"], [*events, "nothing"], strict=False)
            ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            return (
                f"sharded units run in different orders: {ours} on rank {other} where rank {rank} has {theirs}. "
                f"{SAME_ORDER}"
            )
    return "sharded units run in different orders on the ranks"
