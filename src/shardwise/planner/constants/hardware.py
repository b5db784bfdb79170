"""Accelerators by name: peak dense TFLOP/s by dtype, memory and bandwidth; rows in data/accelerators.json.

Peaks are the vendors' own, without sparsity, at the product's boost clock:

- Volta: "NVIDIA Tesla V100 GPU Accelerator" and "NVIDIA V100S" datasheets. Turing: "NVIDIA T4" datasheet.
- Ampere: "NVIDIA A100 Tensor Core GPU", "A30", "A40" and "A10" datasheets, "NVIDIA A10G" datasheet (half of its
  sparse 140). The A800 differs from the A100 in NVLink only, the H800 from the H100 in NVLink and fp64: 400 GB/s both
  ways, "NVIDIA A800" and "NVIDIA H800" datasheets.
- Ada: "NVIDIA L4", "NVIDIA L40", "NVIDIA L40S" datasheets; they print figures with sparsity, halved here.
- Hopper: "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200" datasheets, with sparsity, halved here; the unrounded 989.4
  of the SXM part is in the "NVIDIA H100 Tensor Core GPU Architecture" paper. GH200: "NVIDIA GH200 Grace Hopper".
- Blackwell: "NVIDIA HGX B200", "HGX B300", "GB200 NVL72" and "GB300 NVL72" datasheets, an eighth (a 72nd) of the
  system, sparsity halved, but for fp4 of B300 and GB300, whose dense figures they print.
- GeForce RTX 3090, 4090 and 5090: architecture papers of GA102, AD102 and RTX Blackwell, products summed in fp32, which
  is half the rate of fp16 sums there; "NVIDIA RTX A6000" and "RTX 6000 Ada" datasheets.
- AMD: "Instinct MI250X", "MI300X", "MI325X", "MI350X" and "MI355X" datasheets, matrix rates; a MI250X is two devices.

fp8 and fp4 are dense rates of the same sheets, summed in fp32, and null or missing where there is no hardware.

fp32 is the rate of plain fp32 arithmetic, which torch uses for matrix products unless TF32 is switched on; fp64 is that
of the matrix units where there are any. A dtype without hardware of its own (bf16 before Ampere) has no entry.

`bandwidth` (GB/s of device memory), `units` (multiprocessors, AMD's compute units) and `watts` are of the same sheets.
So is `link`, NVLink's, Infinity Fabric's or else PCIe's rate: bridges join pairs, and a ring over a node leaves them.
`host_link` is NVLink-C2C's rate to a Grace CPU, one direction (GH200's and GB200's sheets); others have PCIe.
`matmul` and `memory_bound` are no vendor's: the shares of peak and of bandwidth that large matrix products and
element-wise kernels reach. `attention` is the share of the former's rate that flash attention on long sequences and
large heads reaches, forward and backward; `fused_attention` that of the vendor's own kernels. Where nobody has
measured them they are those of the nearest part. Short runs of H100 reach 0.76 to 0.81 of the peak in bf16
(openxla/xla, matmul_interpolator_data.h); 0.62 is what is left at the clocks that 700 W sustain. Of parts of one die
the share follows power over peak, as `POWER` of `row_cluster` does. cuDNN's attention on H100 is that of arXiv
2407.08608, figures 5, 6; Blackwell's was set by hand. In the
file the first pattern that matches wins, so a special part stands before the general one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 10**9
GIB = 2**30
USABLE = 0.99  # of the memory on the label, which counts in GiB: an "80GB" part has 81,559 MiB for programs
DATA = Path(__file__).parent / "data"


def read_data(name: str) -> Any:
    """One of the planner's own data files."""
    return json.loads((DATA / f"{name}.json").read_text())


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
    bandwidth: float = 100.0  # GB/s
    fp8: float | None = None
    fp4: float | None = None
    link: float = 5.0  # GB/s to the others of its node, one direction
    host_link: float = 0.0  # GB/s to its host, one direction; 0: half of PCIe 4
    units: int = 1
    watts: float = 0.0
    matmul: float = 0.8
    attention: float = 0.45
    fused_attention: float = 0.7
    memory_bound: float = 0.8

    def peak(self, dtype: str) -> float | None:
        """Peak dense TFLOP/s in `dtype`, e.g. "fp64", "bf16" or "fp16"; 8 and 4 bits are held to that of bf16."""
        peak: float | None = getattr(self, "bf16" if bits_of(dtype) < 16 else dtype)
        return peak

    def product_peak(self, dtype: str) -> float:
        """Peak dense TFLOP/s of matrix products with operands in `dtype`, or the nearest wider one that it has."""
        usual = self.peak(dtype) or self.fp32
        if bits_of(dtype) == 4 and self.fp4:
            return self.fp4
        return (self.fp8 if bits_of(dtype) < 16 else None) or usual


def bits_of(dtype: str) -> int:
    """Bits of a number of "fp64" to "fp8", "fp8-row", "mxfp8" or "nvfp4"."""
    return next(bits for bits in (64, 32, 16, 8, 4) if f"p{bits}" in dtype or f"f{bits}" in dtype)


def _read() -> tuple[Accelerator, ...]:
    rows = read_data("accelerators")
    return tuple(Accelerator(memory_bytes=int(row.pop("memory_gb") * GIB * USABLE), **row) for row in rows)


ACCELERATORS = _read()


def find_accelerator(device_name: str) -> Accelerator | None:
    """The accelerator of a device name; None for a CPU and for anything not in the table."""
    return next((known for known in ACCELERATORS if re.search(known.pattern, device_name, re.IGNORECASE)), None)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak dense TFLOP/s of a device in "fp64", "fp32", "bf16" or "fp16"; None where it is not known."""
    accelerator = find_accelerator(device_name)
    return accelerator.peak(dtype) if accelerator else None
