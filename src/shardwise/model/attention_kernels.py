"""Which attention kernels there are, what each can do, and which one a call gets: plain data, nothing here computes.

The legality table, `shardwise doctor` and the call itself (kernels/attention/dispatch.py) ask the same table, so that
what is announced is what runs. A kernel is taken by `auto` in the order of `PREFERENCE`, the first that can do what is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import util
from typing import NamedTuple

WIDE = ("fp64", "fp32", "bf16", "fp16")
NARROW = ("bf16", "fp16")


@dataclass(frozen=True)
class Needs:
    """What one attention call needs of its kernel.

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
class Kernel:
    """What one kernel can do.

    Attributes:
        name: the value of `model.attention`.
        does: a sentence for the documentation.
        masks, softcap: whether it can.
        biases: kinds of bias (`Needs.bias`) it takes.
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
    Kernel("flash", "torch's flash attention alone; nothing but a causal triangle is hidden", masks=False, biases=(),
           dropout="", widths=False, narrow_on_cuda=True, linear=True),
    Kernel("blockwise", "blocks of queries and keys, masks and biases made for each, merged by their log-sum-exp",
           biases=("keys", "scores"), softcap=True, dropout="exact", linear=True),
    Kernel("sdpa", "torch's scaled_dot_product_attention, which chooses among its kernels; masks are made whole"),
    Kernel("efficient", "SDPA held to its memory-efficient kernel", devices=("cuda",), dtypes=("fp32", *NARROW),
           biases=("keys", "scores")),
    Kernel("cudnn", "SDPA held to cuDNN's kernel", devices=("cuda",), dtypes=NARROW, biases=("keys", "scores"),
           largest=128),
    Kernel("flex", "FlexAttention: compiled for masks, biases and caps; on a CPU forward only",
           biases=("keys", "scores"), softcap=True, dropout="", widths=False, backward=("cuda",), linear=True),
    Kernel("flash_attention_2", "the package flash-attn 2", masks=False, biases=(), softcap=True, devices=("cuda",),
           dtypes=NARROW, widths=False, largest=256, package="flash_attn", linear=True),
    Kernel("flash_attention_3", "the package flash-attn 3", masks=False, biases=(), softcap=True, dropout="",
           devices=("cuda",), dtypes=NARROW, largest=256, package="flash_attn_interface", linear=True),
    Kernel("eager", "plain products, the model's own: the reference", softcap=True, dropout="exact"),
)  # fmt: skip
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
PREFERENCE = {"cpu": ("flash", "blockwise", "sdpa", "eager"), "cuda": ("sdpa", "blockwise", "eager")}


class Choice(NamedTuple):
    """The kernel of a call and why it is that one."""

    kernel: Kernel
    reason: str


@cache
def refusal(kernel: Kernel, needs: Needs) -> str:
    """Why `kernel` cannot do what is needed; empty where it can."""
    head = max(needs.head_size, needs.value_size)
    where, dtypes = f"on {needs.device}", NARROW if kernel.narrow_on_cuda and needs.device == "cuda" else kernel.dtypes
    checks = (
        (needs.device not in kernel.devices, f"it runs on {' and '.join(kernel.devices)} only"),
        (kernel.package and not installed(kernel.package), f"the package {kernel.package} is not installed"),
        (needs.gradient and needs.device not in kernel.backward, f"it has no backward {where}"),
        (needs.dtype not in dtypes, f"it computes in {', '.join(dtypes)} {where}, not in {needs.dtype}"),
        (needs.masked and not kernel.masks, "it hides nothing but a causal triangle"),
        (needs.bias and needs.bias not in kernel.biases, f"it takes no {BIASES.get(needs.bias, '')}"),
        (needs.softcap and not kernel.softcap, "it has no soft cap on scores"),
        (needs.dropout and not kernel.dropout, "it has no dropout"),
        (needs.head_size != needs.value_size and not kernel.widths, "queries and values have other sizes"),
        (kernel.largest and head > kernel.largest, f"a head of {head} is more than its largest of {kernel.largest}"),
    )
    return next((reason for broken, reason in checks if broken), "")


BIASES = {"keys": "bias on keys", "scores": "bias on scores", "trained": "bias that has a gradient"}


@cache
def choose(asked: str, needs: Needs) -> Choice | None:
    """The kernel of a call: the one asked for, or with `auto` the first that can do it; None where none can."""
    if asked != "auto":
        return None if refusal(BY_NAME[asked], needs) else Choice(BY_NAME[asked], "asked for")
    passed: list[str] = []
    for name in PREFERENCE[needs.device]:
        why = refusal(BY_NAME[name], needs)
        if not why:
            return Choice(BY_NAME[name], "; ".join(passed) or f"the fastest on {needs.device} for such a call")
        passed.append(f"not {name}: {why}")
    return None


def alternatives(needs: Needs) -> list[str]:
    """Kernels that can do what is needed."""
    return [kernel.name for kernel in KERNELS if not refusal(kernel, needs)]


@cache
def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return util.find_spec(package) is not None
