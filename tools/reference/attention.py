"""Rows of the reference page about attention: what kernels can do, and which family can run on which, from the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.model.attention import LED, Family
from shardwise.model.attention_kernels import BIASES, KERNELS, PREFERENCE, Kernel, Needs, refusal

KERNEL_HEAD = ("kernel", "what it is", "devices", "dtypes", "masks", "bias", "soft cap", "dropout", "linear memory")
FAMILY_HEAD = ("family", *(f"`{kernel.name}`" for kernel in KERNELS), "CPU `auto`", "note")
HEAD = 64  # head size that the families' rows assume


def kernel_rows() -> Iterator[tuple[str, ...]]:
    """What each kernel can do."""
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
    """Which family trains on which kernel, with all that its models may ask for; on a CPU, else on CUDA."""
    for name, family in LED.items():
        auto = next(kernel for kernel in PREFERENCE["cpu"] if not refusal(_kernel(kernel), _needs(family, "cpu")))
        yield name, *(_runs(kernel, family) for kernel in KERNELS), f"`{auto}`", family.note


def _kernel(name: str) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.name == name)


def _runs(kernel: Kernel, family: Family) -> str:
    """Where it runs, packages taken as installed."""
    able = replace(kernel, package="")
    places = [place for place in ("cpu", "cuda") if not refusal(able, _needs(family, place))]
    return ", ".join(places) or "no"


def _needs(family: Family, device: str) -> Needs:
    dtype = "bf16" if device == "cuda" else "fp32"
    return Needs(device, dtype, family.window, family.bias, family.softcap, False, HEAD, HEAD)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
