"""The attention kernels: what each can do, and which one a call gets. Plain data, nothing here computes.

The legality table, `shardwise doctor` and the call itself (kernels/attention/dispatch.py) ask the same table, so that
what is announced is what runs. A kernel is taken by `auto` in the order of `PREFERENCE`, the first that can do what is
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import util
from typing import NamedTuple

from shardwise.model.capability import Capability, unless

WIDE = ("fp64", "fp32", "bf16", "fp16")
NARROW = ("bf16", "fp16")


@dataclass(frozen=True)
class AttentionNeeds:
    """Needs of one attention call.

    Attributes:
        device, dtype: `cpu` or `cuda`; `fp64`, `fp32`, `bf16` or `fp16`.
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


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel and what it can do.

    Attributes:
        name: the value of `model.attention`.
        does: a sentence for the documentation.
        masks, softcap: whether it can.
        biases: kinds of bias (`AttentionNeeds.bias`) it takes.
        dropout: "" none; "exact" a function of seed, step and index, equal on every layout; "own" its own generator.
        devices, dtypes: where it runs.
        narrow_on_cuda: there it computes in bf16 and fp16 only.
        widths: whether values may have another size than queries.
        largest: largest head size; 0 is any.
        package: that has to be installed.
        linear: its memory grows linearly with the sequence, whatever is needed.
        backward: devices on which it has one.
    """

    name: str
    does: str
    masks: bool = True
    biases: tuple[str, ...] = ("keys", "scores", "trained")
    softcap: bool = False
    dropout: str = "own"
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = WIDE
    narrow_on_cuda: bool = False
    widths: bool = True
    largest: int = 0
    package: str = ""
    linear: bool = False
    backward: tuple[str, ...] = ("cpu", "cuda")


KERNELS = (
    AttentionKernel(
        "flash",
        "torch's flash attention alone; nothing but a causal triangle is hidden",
        masks=False,
        biases=(),
        dropout="",
        widths=False,
        narrow_on_cuda=True,
        linear=True,
    ),
    AttentionKernel(
        "blockwise",
        "blocks of queries and keys, masks and biases made for each, merged by their log-sum-exp",
        biases=("keys", "scores"),
        softcap=True,
        dropout="exact",
        linear=True,
    ),
    AttentionKernel(
        "sdpa", "torch's scaled_dot_product_attention, which chooses among its kernels; masks are made whole"
    ),
    AttentionKernel(
        "efficient",
        "SDPA held to its memory-efficient kernel",
        devices=("cuda",),
        dtypes=("fp32", *NARROW),
        biases=("keys", "scores"),
    ),
    AttentionKernel(
        "cudnn", "SDPA held to cuDNN's kernel", devices=("cuda",), dtypes=NARROW, biases=("keys", "scores"), largest=128
    ),
    AttentionKernel(
        "flex",
        "FlexAttention: compiled for masks, biases and caps; on a CPU forward only",
        biases=("keys", "scores"),
        softcap=True,
        dropout="",
        widths=False,
        backward=("cuda",),
        linear=True,
    ),
    AttentionKernel(
        "flash_attention_2",
        "the package flash-attn 2",
        masks=False,
        biases=(),
        softcap=True,
        devices=("cuda",),
        dtypes=NARROW,
        widths=False,
        largest=256,
        package="flash_attn",
        linear=True,
    ),
    AttentionKernel(
        "flash_attention_3",
        "the package flash-attn 3",
        masks=False,
        biases=(),
        softcap=True,
        dropout="",
        devices=("cuda",),
        dtypes=NARROW,
        largest=256,
        package="flash_attn_interface",
        linear=True,
    ),
    AttentionKernel("eager", "plain products, the model's own: the reference", softcap=True, dropout="exact"),
)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
PREFERENCE = {"cpu": ("flash", "blockwise", "sdpa", "eager"), "cuda": ("sdpa", "blockwise", "eager")}


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


@cache
def choose_kernel(name: str, needs: AttentionNeeds) -> KernelChoice | None:
    """Return the kernel of a call: the one of that name, or for `auto` the first that can do it; None: none can."""
    if name != "auto":
        return KernelChoice(BY_NAME[name], "asked for") if kernel_supports(BY_NAME[name], needs).ok else None
    passed: list[str] = []
    for candidate in PREFERENCE[needs.device]:
        capability = kernel_supports(BY_NAME[candidate], needs)
        if capability.ok:
            reason = "; ".join(passed) or f"the fastest on {needs.device} for such a call"
            return KernelChoice(BY_NAME[candidate], reason)
        passed.append(f"not {candidate}: {capability.reason}")
    return None


def kernels_for(needs: AttentionNeeds) -> list[str]:
    """Return the names of the kernels that can do what is needed."""
    return [kernel.name for kernel in KERNELS if kernel_supports(kernel, needs).ok]


@cache
def installed(package: str) -> bool:
    """Tell whether a package can be imported."""
    return util.find_spec(package) is not None
