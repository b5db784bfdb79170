"""Accelerators by name: peak dense TFLOP/s by dtype, and memory.

Peaks are the vendors' own, without sparsity, at the product's boost clock:

- Volta: "NVIDIA Tesla V100 GPU Accelerator" and "NVIDIA V100S" datasheets. Turing: "NVIDIA T4" datasheet.
- Ampere: "NVIDIA A100 Tensor Core GPU", "A30", "A40" and "A10" datasheets, "NVIDIA A10G" datasheet (half of its
  sparse 140). The A800 differs from the A100 in NVLink only.
- Ada: "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S" datasheets; they print figures with sparsity, halved here.
- Hopper: "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200" datasheets, with sparsity, halved here; the unrounded 989.4
  of the SXM part is in the "NVIDIA H100 Tensor Core GPU Architecture" paper. GH200: "NVIDIA GH200 Grace Hopper".
- Blackwell: "NVIDIA HGX B200" and "NVIDIA GB200 NVL72" datasheets, an eighth (a 72nd) of the system, sparsity halved.
- AMD: "Instinct MI250X", "MI300X" and "MI325X" datasheets, matrix rates; a MI250X is two devices.

fp32 is the rate of plain fp32 arithmetic, which torch uses for matrix products unless TF32 is switched on; fp64 is that
of the matrix units where there are any. A dtype without hardware of its own (bf16 before Ampere) has no entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Accelerator:
    """One kind of device: `pattern` matches its name as `torch.cuda.get_device_name` gives it."""

    name: str
    pattern: str
    memory_bytes: int
    fp64: float
    fp32: float
    fp16: float
    bf16: float | None

    def peak(self, dtype: str) -> float | None:
        """Peak dense TFLOP/s in `dtype` ("fp64", "fp32", "bf16" or "fp16")."""
        peak: float | None = getattr(self, dtype)
        return peak


# In this order: the first pattern that matches wins, so a special part stands before the general one.
ACCELERATORS = (
    Accelerator("GB200", r"\bGB200\b", 186 * GB, fp64=40, fp32=80, fp16=2500, bf16=2500),
    Accelerator("B200", r"\bB200\b", 180 * GB, fp64=37, fp32=75, fp16=2250, bf16=2250),
    Accelerator("H200 NVL", r"\bH200 NVL\b", 141 * GB, fp64=60, fp32=60, fp16=835.5, bf16=835.5),
    Accelerator("GH200", r"\bGH200\b", 96 * GB, fp64=67, fp32=67, fp16=989.4, bf16=989.4),
    Accelerator("H200 SXM", r"\bH200\b", 141 * GB, fp64=67, fp32=67, fp16=989.4, bf16=989.4),
    Accelerator("H100 NVL", r"\bH100 NVL\b", 94 * GB, fp64=60, fp32=60, fp16=835.5, bf16=835.5),
    Accelerator("H100 PCIe", r"\bH100 PCIe\b", 80 * GB, fp64=51, fp32=51, fp16=756.5, bf16=756.5),
    Accelerator("H100 SXM", r"\bH100\b", 80 * GB, fp64=67, fp32=67, fp16=989.4, bf16=989.4),
    Accelerator("H20", r"\bH20\b", 96 * GB, fp64=1, fp32=44, fp16=148, bf16=148),
    Accelerator("L40S", r"\bL40S\b", 48 * GB, fp64=1.4, fp32=91.6, fp16=362.05, bf16=362.05),
    Accelerator("L40", r"\bL40\b", 48 * GB, fp64=1.4, fp32=90.5, fp16=181.05, bf16=181.05),
    Accelerator("L4", r"\bL4\b", 24 * GB, fp64=0.47, fp32=30.3, fp16=121, bf16=121),
    Accelerator("A100 80GB", r"\bA[18]00\b.*80GB", 80 * GB, fp64=19.5, fp32=19.5, fp16=312, bf16=312),
    Accelerator("A100 40GB", r"\bA[18]00\b", 40 * GB, fp64=19.5, fp32=19.5, fp16=312, bf16=312),
    Accelerator("A40", r"\bA40\b", 48 * GB, fp64=0.58, fp32=37.4, fp16=149.7, bf16=149.7),
    Accelerator("A30", r"\bA30\b", 24 * GB, fp64=10.3, fp32=10.3, fp16=165, bf16=165),
    Accelerator("A10G", r"\bA10G\b", 24 * GB, fp64=0.55, fp32=35, fp16=70, bf16=70),
    Accelerator("A10", r"\bA10\b", 24 * GB, fp64=0.49, fp32=31.2, fp16=125, bf16=125),
    Accelerator("V100S PCIe", r"\bV100S\b", 32 * GB, fp64=8.2, fp32=16.4, fp16=130, bf16=None),
    Accelerator("V100 PCIe 32GB", r"\bV100-PCIE-32GB", 32 * GB, fp64=7, fp32=14, fp16=112, bf16=None),
    Accelerator("V100 PCIe", r"\bV100-PCIE", 16 * GB, fp64=7, fp32=14, fp16=112, bf16=None),
    Accelerator("V100 SXM 32GB", r"\bV100-SXM\d-32GB", 32 * GB, fp64=7.8, fp32=15.7, fp16=125, bf16=None),
    Accelerator("V100 SXM", r"\bV100\b", 16 * GB, fp64=7.8, fp32=15.7, fp16=125, bf16=None),
    Accelerator("T4", r"\bT4\b", 16 * GB, fp64=0.25, fp32=8.1, fp16=65, bf16=None),
    Accelerator("MI325X", r"\bMI325X\b", 256 * GB, fp64=163.4, fp32=163.4, fp16=1307.4, bf16=1307.4),
    Accelerator("MI300X", r"\bMI300X\b", 192 * GB, fp64=163.4, fp32=163.4, fp16=1307.4, bf16=1307.4),
    Accelerator("MI250X (one of two)", r"\bMI250X\b", 64 * GB, fp64=47.9, fp32=47.9, fp16=191.5, bf16=191.5),
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The accelerator of a device name; None for a CPU and for anything not in the table."""
    return next((known for known in ACCELERATORS if re.search(known.pattern, device_name, re.IGNORECASE)), None)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak dense TFLOP/s of a device in "fp64", "fp32", "bf16" or "fp16"; None where it is not known."""
    accelerator = find_accelerator(device_name)
    return accelerator.peak(dtype) if accelerator else None
