"""The oracle's own base in 4 or 8 bits: each weight replaced by what its quantized form stands for.

Blocks of 64 elements along a weight's last dim are divided by their largest (QLoRA, arXiv 2305.14314, equations 1 and
2), and rounded to the nearest of the values of NormalFloat (appendix E), or of 255 even steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.job.schema import Job

NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
IN_BLOCK = re.compile(r"\.\d+\..*\.weight$")  # a weight below a numbered block


def quantize_base(job: Job, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` by name, matrices of blocks as the job's `adapter.base` has them, unless they are trained."""
    form, saved = job.adapter.base, job.adapter.modules_to_save
    return {
        name: quantized(value, form)
        if form != "full" and value.dim() == 2 and IN_BLOCK.search(name) and not any(part in name for part in saved)
        else value
        for name, value in weights.items()
    }


def quantized(weight: Tensor, form: str) -> Tensor:
    """Return what the quantized form of a matrix stands for, in the dtype of the matrix."""
    blocks = weight.to(torch.float32).reshape(-1, 64)
    largest = blocks.abs().max(dim=1, keepdim=True).values
    parts = torch.where(largest > 0, blocks / largest, 0.0)
    if form == "int8":
        nearest = torch.round(parts * 127) / 127
    else:
        values = torch.tensor([float(value) for value in NF4.split()])
        nearest = values[(parts[:, :, None].double() - values.double()).abs().argmin(-1)]
    return (nearest * largest).reshape(weight.shape).to(weight.dtype)
