"""All planted faults by name. Each is a function that makes a context; inside of it our side makes the mistake.

Most names are those that a diagnosis reports (`testing.diagnosis`); tests say which name others have to get.
"""

from __future__ import annotations

from shardwise.testing.faults.adapters import ADAPTER_FAULTS
from shardwise.testing.faults.axes import AXIS_FAULTS
from shardwise.testing.faults.batches import BATCH_FAULTS
from shardwise.testing.faults.experts import EXPERT_FAULTS
from shardwise.testing.faults.gradients import GRADIENT_FAULTS
from shardwise.testing.faults.patching import Fault
from shardwise.testing.faults.precision import PRECISION_FAULTS
from shardwise.testing.faults.preference import PREFERENCE_FAULTS
from shardwise.testing.faults.rows import ROW_FAULTS
from shardwise.testing.faults.updates import UPDATE_FAULTS

FAULTS: dict[str, Fault] = {
    **GRADIENT_FAULTS,
    **AXIS_FAULTS,
    **UPDATE_FAULTS,
    **PRECISION_FAULTS,
    **BATCH_FAULTS,
    **ADAPTER_FAULTS,
    **EXPERT_FAULTS,
    **PREFERENCE_FAULTS,
    **ROW_FAULTS,
}
