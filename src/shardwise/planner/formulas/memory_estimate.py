"""The bytes of a rank at one moment, as plain data; `shardwise.planner.formulas.memory` computes it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at one moment of a step, by cause.

    parameters: master shards. gradients: gradient shards. optimizer: its state. gathered: whole parameters in the
    compute dtype. communication: buffers of all-gather and reduce-scatter. unsharded_gradients: whole gradients that
    have not been reduced yet. activations: what backward needs. working: temporaries of backward. logits: the logits
    of one chunk (or all of them). reference: shards of the frozen copy of a preference loss. ema: shards of the moving
    averages of weights. host: bytes in host memory, which the device's total leaves out.
    """

    moment: str
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0
    unsharded_gradients: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    logits: float = 0.0
    reference: float = 0.0
    ema: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.causes().values())

    def causes(self) -> dict[str, float]:
        """Cause -> bytes on the device."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("moment", "host")}
