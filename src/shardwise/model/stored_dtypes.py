"""Names of dtypes in safetensors files: of what a checkpoint holds, and a file of weights.

Float8 is not among them: such weights need scales, which a file keeps as tensors of their own.
"""

from __future__ import annotations

import torch

STORED_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in STORED_DTYPES.items()}
