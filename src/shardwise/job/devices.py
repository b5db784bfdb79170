"""The kinds of devices that ranks compute on, one record each, and what each can do.

Rules, the planner, `shardwise doctor` and the reference page read these records; they need no torch. What is asked of
torch, whatever the kind, is in `_torch_compat/accelerator.py`. A new kind is a record here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from shardwise.job.capability import Capability, unless

if TYPE_CHECKING:
    import torch

CPU, CUDA, XPU, MPS = "cpu", "cuda", "xpu", "mps"
ALONE_BACKEND = "alone"  # the backend of one rank, in collectives/alone.py


class Feature(StrEnum):
    """Something that some kinds of devices can do and others cannot."""

    RANKS = "several ranks"
    UNITS = "units of FSDP2"
    REDRAWN = "dropout that checkpoints draw again"
    ENGINE = "the native engine's collectives"
    TWO_LEVELS = "two-level collectives"
    FP64 = "fp64"
    FLOAT8 = "products of float8"
    GROUPED = "grouped products of experts"
    LIGER = "Liger's kernels"
    GRAPHS = "captured graphs"
    ASIDE = "copies beside compute, from pinned memory"
    PEAK = "the allocator's peak memory"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: torch's type of the device, the value of `parallel.device`.
        means: a word for it, for tables.
        backend: torch's, of groups of several ranks.
        compute: `precision.compute` where it is `auto`.
        microbatch_tokens: a forward of as many keeps the device busy without filling it.
        flops_a_byte: of compute beside one byte between ranks; a rough figure that ways are chosen by.
        is_default: `auto` takes it where there is one.
        tried: what has run on such a device.
        lacks: the reason for each feature that it has not.
        like: another kind, whose attention kernels it has; unset: its own.
    """

    name: str
    means: str
    backend: str
    compute: str
    microbatch_tokens: int
    flops_a_byte: float
    is_default: bool
    tried: str
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    like: str = ""

    def supports(self, feature: Feature) -> Capability:
        """Answer whether devices of this kind have `feature`."""
        return unless(self.lacks.get(feature, ""))

    def refusal(self, feature: Feature) -> str:
        """Return the reason why they have not, and where the ranks run; empty where they have it."""
        reason = self.supports(feature).reason
        return reason and f"{reason}, and the ranks run on {self.name}"


KINDS = (
    DeviceKind(
        CPU, "processors", "gloo", "fp32", 4096,
        flops_a_byte=20.0,  # 50 GFLOP/s beside 2.5 GB/s
        is_default=True, tried="everything",
        lacks={
            Feature.FLOAT8: "processors have none; GPUs have them from Ada, Hopper and CDNA 3 on",
            Feature.LIGER: "Liger's kernels run on a GPU",
            Feature.GRAPHS: "CUDA graphs need a GPU",
            Feature.ASIDE: "its own memory is the host's",
            Feature.PEAK: "the peak of the process is shown, its resident set",
        },
    ),
    DeviceKind(
        CUDA, "GPUs of NVIDIA, and of AMD by ROCm", "nccl", "bf16", 16384,
        flops_a_byte=1000.0,  # 400 TFLOP/s beside 400 GB/s
        is_default=True, tried="one H100 and one H200, torch 2.11; ROCm never",
    ),
    DeviceKind(
        XPU, "GPUs of Intel", "xccl", "bf16", 16384,
        flops_a_byte=1000.0,
        is_default=True, tried="nothing",
        lacks={
            Feature.ENGINE: "the engine moves tensors of CPUs and of CUDA",
            Feature.TWO_LEVELS: "two levels are carried by Gloo, NCCL and the engine",
            Feature.FLOAT8: "products of float8 were never tried there",
            Feature.GROUPED: "grouped products were never tried there",
            Feature.LIGER: "Liger's kernels were never tried there",
            Feature.GRAPHS: "graphs are captured on CUDA alone",
        },
    ),
    DeviceKind(
        MPS, "GPUs of Apple", ALONE_BACKEND, "fp32", 4096,
        flops_a_byte=1000.0,
        is_default=False, tried="nothing; jobs of one rank on a simulated device that refuses what Metal refuses",
        lacks={
            Feature.RANKS: "none of torch's backends moves Metal's tensors",
            Feature.UNITS: "FSDP2 needs streams, which torch.mps has not",
            Feature.REDRAWN: "torch's checkpoints keep no state of Metal's generator",
            Feature.ENGINE: "there is one process",
            Feature.TWO_LEVELS: "there is one process",
            Feature.FP64: "Metal has no fp64",
            Feature.FLOAT8: "Metal has no products of float8",
            Feature.GROUPED: "grouped products were never tried there",
            Feature.LIGER: "Liger's kernels are Triton's, which has none for Metal",
            Feature.GRAPHS: "graphs are captured on CUDA alone",
            Feature.ASIDE: "its memory is the host's",
            Feature.PEAK: "torch.mps counts what is allocated now alone; the peak of the process is shown",
        },
    ),
)  # fmt: skip
_kinds = {kind.name: kind for kind in KINDS}


def device_kind(device_type: str) -> DeviceKind:
    """Return the record of a type of device."""
    return _kinds[device_type]


def add_device_kind(kind: DeviceKind) -> None:
    """Let `device_kind` know a type that torch has been given from outside, as that of a trace."""
    _kinds[kind.name] = kind


def kernels_of(device_type: str) -> str:
    """Return the type by which records of attention kernels know a type of devices."""
    kind = _kinds.get(device_type)  # none of `meta`
    return device_type if kind is None else kind.like or kind.name


def copies_aside(device_type: str) -> bool:
    """Return whether copies between a device of this type and its host go on beside compute, from pinned memory."""
    kind = _kinds.get(device_type)  # none of `meta`
    return kind is not None and kind.supports(Feature.ASIDE).ok


def has_fp64(device_type: str) -> bool:
    """Return whether devices of this type compute in fp64."""
    kind = _kinds.get(device_type)  # none of `meta`
    return kind is None or kind.supports(Feature.FP64).ok


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on `device`: fp64, or fp32 on one that has none."""
    import torch  # which reading a job does not need

    return torch.float64 if has_fp64(device.type) else torch.float32


def default_device_type() -> str:
    """Return the type that `parallel.device` auto is on this machine."""
    from shardwise._torch_compat import accelerator  # torch, which reading a job does not need

    kind = _kinds.get(accelerator.available())
    return kind.name if kind is not None and kind.is_default else CPU
