"""The kernel that a call of attention gets: what the call needs, which kernels can do it, and which is taken.

`auto` takes the first of `PREFERENCE_ON_CPU`, or of `PREFERENCE_ON_GPU`, that can do what is needed. The records of the
kernels are in job/attention_kernels.py; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import util
from typing import NamedTuple

from shardwise.job.attention_kernels import KERNELS, NARROW, AttentionKernel, kernel_named
from shardwise.job.capability import Capability, unless
from shardwise.job.devices import CPU


@dataclass(frozen=True)
class AttentionNeeds:
    """Needs of one attention call.

    Attributes:
        device, dtype: the type of device; `fp64`, `fp32`, `bf16` or `fp16`.
        masked: something is hidden besides what a causal triangle hides: padding, documents, a window.
        bias: "" none; "keys" one number a head and key (ALiBi); "scores" one a score; "trained" has a gradient.
        softcap: scores pass a soft cap (Gemma 2).
        dropout: probabilities are dropped.
        head_size, value_size: of queries and keys, and of values; 0 is not known.
        gradient: whether backward will follow.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    masked: bool = False
    bias: str = ""
    softcap: bool = False
    dropout: bool = False
    head_size: int = 0
    value_size: int = 0
    gradient: bool = True


PREFERENCE_ON_CPU = ("flash", "blockwise", "sdpa", "eager")
PREFERENCE_ON_GPU = ("sdpa", "blockwise", "eager")


class KernelChoice(NamedTuple):
    """The kernel of a call and why it is that one."""

    kernel: AttentionKernel
    reason: str


BIASES = {"keys": "bias on keys", "scores": "bias on scores", "trained": "bias that has a gradient"}


@cache
def kernel_supports(kernel: AttentionKernel, needs: AttentionNeeds) -> Capability:
    """Answer whether `kernel` can do what is needed."""
    return unless(next(_obstacles(kernel, needs), ""))


def _obstacles(kernel: AttentionKernel, needs: AttentionNeeds) -> Iterator[str]:
    head = max(needs.head_size, needs.value_size)
    where = f"on {needs.device}"
    dtypes = NARROW if kernel.narrow_on_cuda and needs.device == "cuda" else kernel.dtypes
    if needs.device not in kernel.devices:
        yield f"it runs on {' and '.join(kernel.devices)} only"
    if kernel.package and not installed(kernel.package):
        yield f"the package {kernel.package} is not installed"
    if needs.gradient and needs.device not in kernel.backward:
        yield f"it has no backward {where}"
    if needs.dtype not in dtypes:
        yield f"it computes in {', '.join(dtypes)} {where}, not in {needs.dtype}"
    if needs.masked and not kernel.masks:
        yield "it hides nothing but a causal triangle"
    if needs.bias and needs.bias not in kernel.biases:
        yield f"it takes no {BIASES.get(needs.bias, '')}"
    if needs.softcap and not kernel.softcap:
        yield "it has no soft cap on scores"
    if needs.dropout and not kernel.dropout:
        yield "it has no dropout"
    if needs.head_size != needs.value_size and not kernel.widths:
        yield "queries and values have other sizes"
    if kernel.largest and head > kernel.largest:
        yield f"a head of {head} is more than its largest of {kernel.largest}"
    unit = kernel.aligned // int(needs.dtype[2:])
    if unit and (needs.head_size % unit or needs.value_size % unit):
        yield f"in {needs.dtype} it takes heads of a multiple of {unit}, not of {needs.head_size or needs.value_size}"


@cache
def choose_kernel(name: str, needs: AttentionNeeds) -> KernelChoice | None:
    """Return the kernel of a call: the one of that name, or for `auto` the first that can do it; None: none can."""
    if name != "auto":
        kernel = kernel_named(name)
        return KernelChoice(kernel, "asked for") if kernel_supports(kernel, needs).ok else None
    passed: list[str] = []
    for candidate in map(kernel_named, PREFERENCE_ON_CPU if needs.device == CPU else PREFERENCE_ON_GPU):
        capability = kernel_supports(candidate, needs)
        if capability.ok:
            reason = "; ".join(passed) or f"the fastest on {needs.device} for such a call"
            return KernelChoice(candidate, reason)
        passed.append(f"not {candidate.name}: {capability.reason}")
    return None


def kernels_for(needs: AttentionNeeds) -> list[str]:
    """Return the names of the kernels that can do what is needed."""
    return [kernel.name for kernel in KERNELS if kernel_supports(kernel, needs).ok]


@cache
def installed(package: str) -> bool:
    """Tell whether a package can be imported."""
    return util.find_spec(package) is not None
