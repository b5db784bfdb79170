"""Rows of the reference page about attention: what kernels can do, and which family can run on which, from the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.job.attention_kernels import KERNELS, AttentionKernel
from shardwise.model.attention_choice import BIASES, AttentionNeeds, choose_kernel, kernel_supports
from shardwise.model.family import FamilyAttention
from shardwise.model.registry import known_families

KERNEL_HEAD = ("kernel", "what it is", "devices", "dtypes", "masks", "bias", "soft cap", "dropout", "linear memory")
FAMILY_HEAD = ("family", *(f"`{kernel.name}`" for kernel in KERNELS), "CPU `auto`", "note")
HEAD = 64  # head size that the families' rows assume


def kernel_rows() -> Iterator[tuple[str, ...]]:
    """Yield what each kernel can do."""
    for kernel in KERNELS:
        yield (
            f"`{kernel.name}`",
            kernel.does,
            ", ".join(kernel.devices),
            ", ".join(kernel.dtypes),
            _yes(kernel.masks),
            ", ".join(BIASES[kind].removeprefix("bias ") for kind in kernel.biases) or "no",
            _yes(kernel.softcap),
            {"exact": "equal on every layout", "own": "its own numbers", "": "no"}[kernel.dropout],
            _yes(kernel.linear),
        )


def family_rows() -> Iterator[tuple[str, ...]]:
    """Yield on which kernel each family trains, with all that its models may ask for; on a CPU, else on CUDA."""
    for model_type, family in known_families().items():
        if family.attention is not None:
            choice = choose_kernel("auto", _needs(family.attention, "cpu"))
            assert choice is not None
            runs = (_devices(kernel, family.attention) for kernel in KERNELS)
            yield model_type, *runs, f"`{choice.kernel.name}`", family.attention.note


def _devices(kernel: AttentionKernel, attention: FamilyAttention) -> str:
    """Return where the kernel runs, packages taken as installed."""
    able = replace(kernel, package="")
    devices = [device for device in ("cpu", "cuda") if kernel_supports(able, _needs(attention, device)).ok]
    return ", ".join(devices) or "no"


def _needs(attention: FamilyAttention, device: str) -> AttentionNeeds:
    dtype = "bf16" if device == "cuda" else "fp32"
    return AttentionNeeds(device, dtype, attention.window, attention.bias, attention.softcap, False, HEAD, HEAD)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
