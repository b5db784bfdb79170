"""Passes over parameters and gradients that FSDP2 makes where one rank has all of each unit.

Nothing travels, and yet each gathering casts a unit's parameters of 4 bytes to c and copies them, and each reduction
copies gradients into a buffer, divides them and copies them out, in r bytes:

- gathering: (4 + c) + 2c, in forward, and in backward again where blocks are freed between (`reshard_after_forward`).
  Kept, blocks are gathered once a step (`Plan.keeps_between_microbatches`), as the root is.
- adding up: the first microbatch's gradients are cast, c + r; each further one's are added, c + 2r.
- reduction: (r + r) + 4r, once a step; where nothing was added up before it (c + r) + 4r. Parameters in host memory
  have it in every microbatch (`Plan.adds_whole`), and the host adds up.

Where several ranks share the units these passes are a part of what the constants of stacks were fitted with.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.job.axes import state_axes
from shardwise.planner.formulas.axis_traffic import block_elements, elements_of_rank
from shardwise.planner.formulas.compute import BYTES, rates
from shardwise.planner.formulas.prediction import TrainingConfiguration

STORED = 4  # bytes of a parameter


class UnitBytes(NamedTuple):
    """Bytes moved of an element: by gathering it, by adding up a microbatch's gradient (the mean), by reduction."""

    gathering: float
    adding: float
    reduction: float


def block_passes(configuration: TrainingConfiguration) -> float:
    """Return the seconds that the passes over one block take in each microbatch."""
    moved = _unit_bytes(configuration)
    if moved is None:
        return 0.0
    reduced = moved.reduction if _reduces_each(configuration) else 0.0
    gathered = 0.0
    if not _stays(configuration):
        kept = configuration.kept_blocks / configuration.model.layers
        gathered = moved.gathering * (2 - kept if configuration.reshard_after_forward else 1)
    return _seconds(configuration, gathered, moved.adding + reduced, sum(block_elements(configuration)))


def step_passes(configuration: TrainingConfiguration, blocks: int) -> float:
    """Return the seconds of those over a rank's units that are made once a step, and over the root in all of it."""
    moved = _unit_bytes(configuration)
    if moved is None:
        return 0.0
    own, m = blocks * sum(block_elements(configuration)), configuration.accumulation
    root = sum(elements_of_rank(configuration, blocks)) - own
    if _reduces_each(configuration):
        return m * _seconds(configuration, moved.gathering, moved.reduction, root)
    gathered = moved.gathering if _stays(configuration) else 0.0
    of_root = _seconds(configuration, moved.gathering, moved.reduction + m * moved.adding, root)
    return of_root + _seconds(configuration, gathered, moved.reduction, own)


def _stays(configuration: TrainingConfiguration) -> bool:
    """Return whether blocks stay gathered from a step's first microbatch to its last."""
    return configuration.whole_in_step or not (configuration.reshard_after_forward or _reduces_each(configuration))


def _reduces_each(configuration: TrainingConfiguration) -> bool:
    """Return whether each microbatch reduces its gradients."""
    return configuration.offload_parameters and not configuration.whole_in_step


def _unit_bytes(configuration: TrainingConfiguration) -> UnitBytes | None:
    """Return what is moved of an element; None where FSDP2 has no unit, or several ranks share each."""
    if configuration.zero < 3 or configuration.degree(*state_axes()) > 1:
        return None
    c, r, m = BYTES[configuration.precision], BYTES[configuration.reduction], configuration.accumulation
    gathering = 2.0 * c + (STORED + c if c < STORED else 0)
    if m == 1 or _reduces_each(configuration):
        return UnitBytes(gathering, 0.0, c + 5.0 * r)
    adding = (m - 1) * (c + 2.0 * r) + (c + r if c != r else 0)
    return UnitBytes(gathering, adding / m, 6.0 * r)


def _seconds(configuration: TrainingConfiguration, gathering: float, of_gradient: float, elements: float) -> float:
    """Return the seconds of so many bytes of each element, and of the gradient of each that is trained."""
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
    return elements * (gathering + of_gradient * configuration.trained) / speed.bandwidth
