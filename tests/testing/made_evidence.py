"""Evidence of a step without an engine: two small tensors, and an oracle that answers as a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.plan.sequence_lengths import LengthStage, SequenceLengths
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import Tolerances, Update
from shardwise.testing.evidence import Evidence, Part
from shardwise.testing.oracle import Twist, UpdateTwist

NAMES = ("block.weight", "block.bias")


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    """Return a gradient of each parameter."""
    return {"block.weight": scale * torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "block.bias": scale * torch.ones(2)}


@dataclass
class AnsweringEvidence(Evidence):
    """Evidence whose questions to the oracle have answers that were given.

    Attributes:
        mistakes: the mistakes in gradients that bring ours.
        update_mistakes: the mistakes in the update that bring ours.
        fits: coefficients by names of tensors; () stands for all.
    """

    mistakes: Sequence[Twist] = ()
    update_mistakes: Sequence[UpdateTwist] = ()
    fits: Mapping[tuple[str, ...], dict[Part, float]] = field(default_factory=dict)
    label_counts: dict[Part, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vars(self)["counts"] = self.label_counts
        vars(self)["coefficients"] = self.fits.get((), {})
        vars(self)["parts"] = [(rank, number, [2 * number + rank]) for rank, number in self.label_counts]
        vars(self).setdefault("update_ratio", None)
        vars(self).setdefault("tokens", 0)

    def coefficients_of(self, names: Sequence[str]) -> dict[Part, float]:
        return self.fits.get(tuple(names), {})

    def reproduces(self, twist: Twist) -> bool:
        return twist in self.mistakes

    def wrong_updates(self, twist: UpdateTwist) -> list[str]:
        return [] if twist in self.update_mistakes else list(self.right)


def made_plan(data_ranks: int = 2, accumulation: int = 2, job: Any = None, **degrees: int) -> Any:
    """Return what diagnoses read of a plan; `degrees` by the names of axes."""
    job = job or SimpleNamespace(
        optimizer=SimpleNamespace(clip_norm=None, weight_decay=0.0, name="SGD", groups=[]),
        adapter=SimpleNamespace(kind="none"),
        training=SimpleNamespace(z_loss=0.0, label_smoothing=0.0, loss_reduction="token"),
        memory=SimpleNamespace(activation_checkpointing="none"),
        isolates_documents=False,
        reads_pairs=False,
    )
    return SimpleNamespace(
        degrees={axis: degrees.get(axis.name.lower(), 1) for axis in Axis},
        data_ranks=data_ranks,
        accumulation=accumulation,
        accumulation_of=lambda step: accumulation,
        microbatch=1,
        sequence_lengths=SequenceLengths((LengthStage(1),)),
        reference=False,
        dtypes=SimpleNamespace(compute="fp64"),
        job=job,
    )


def captured(**changes: Any) -> Captured:
    """Return a step of the engine that went right but for `changes`."""
    given = {
        "step": 1, "loss": 2.0, "norm": 1.0, "count": 4, "skipped": False, "loss_scale": 1.0, "data_hash": 0,
        "gradients": tensors(), "parameters": tensors(), "copies": {}, "gradient_copies": {}, "moved": [True, True],
    }  # fmt: skip
    return Captured(**(given | changes))


def made_evidence(
    wrong: Sequence[str] | Mapping[str, str] = ("gradient",), ours: Captured | None = None, **changes: Any
) -> Any:
    """Return evidence of quantities that are wrong, each with the name of its first difference."""
    oracle = SimpleNamespace(
        parameters=dict.fromkeys(NAMES),
        model=torch.nn.Module(),
        routers=SimpleNamespace(coefficient=0.0),
        modules_in_order=lambda step: ["block"],
    )
    differences = dict(wrong) if isinstance(wrong, Mapping) else dict.fromkeys(wrong, "block.weight")
    given = {
        "plan": made_plan(), "step": 1, "oracle": oracle, "ours": ours or captured(),
        "wrong": differences, "tolerances": Tolerances.of("fp64"), "loss": 2.0, "norm": 1.0,
        "right": tensors(), "update_with": tensors(), "update": Update(tensors(), tensors(1.5)), "wrong_tensors": NAMES,
    }  # fmt: skip
    return AnsweringEvidence(**(given | changes))
