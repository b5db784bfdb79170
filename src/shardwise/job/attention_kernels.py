"""The attention kernels that `model.attention` can name: one record each, plain data.

A kernel is a function in a file under kernels/attention/ and a record here. The schema of a job, the legality table,
`shardwise doctor` and the call itself read the same records, so that what is announced is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.job.devices import CPU, CUDA, MPS, XPU

WIDE = ("fp64", "fp32", "bf16", "fp16")
NARROW = ("bf16", "fp16")


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel and what it can do.

    Attributes:
        name: the value of `model.attention`.
        does: a sentence for the documentation.
        function: `file:name` under shardwise.kernels.attention; it takes an `AttentionCall`.
        masks, softcap: whether it can.
        biases: kinds of bias (`shardwise.model.attention_choice.AttentionNeeds.bias`) it takes.
        dropout: "" none; "exact" a function of seed, step and index, equal on every layout; "own" its own generator.
        devices, dtypes: where it runs.
        narrow_on_cuda: there it computes in bf16 and fp16 only.
        widths: whether values may have another size than queries.
        largest: largest head size; 0 is any.
        aligned: bits of which a head is a multiple; 0 is any.
        package: that has to be installed.
        linear: its memory grows linearly with the sequence, whatever is needed.
        backward: devices on which it has one.
    """

    name: str
    does: str
    function: str
    masks: bool = True
    biases: tuple[str, ...] = ("keys", "scores", "trained")
    softcap: bool = False
    dropout: str = "own"
    devices: tuple[str, ...] = (CPU, CUDA, XPU, MPS)
    dtypes: tuple[str, ...] = WIDE
    narrow_on_cuda: bool = False
    widths: bool = True
    largest: int = 0
    aligned: int = 0
    package: str = ""
    linear: bool = False
    backward: tuple[str, ...] = (CPU, CUDA, XPU, MPS)


# fmt: off
KERNELS = (
    AttentionKernel("flash", "torch's flash attention alone; nothing but a causal triangle is hidden", "sdpa:flash",
                    masks=False, biases=(), dropout="", devices=(CPU, CUDA), widths=False, narrow_on_cuda=True,
                    linear=True),
    AttentionKernel("blockwise", "blocks of queries and keys, masks and biases made for each, merged by their "
                    "log-sum-exp", "blockwise:blockwise", biases=("keys", "scores"), softcap=True, dropout="exact",
                    linear=True),
    AttentionKernel("sdpa", "torch's scaled_dot_product_attention, which chooses among its kernels; masks are made "
                    "whole", "sdpa:sdpa"),
    AttentionKernel("efficient", "SDPA held to its memory-efficient kernel", "sdpa:efficient", devices=(CUDA,),
                    dtypes=("fp32", *NARROW), biases=("keys", "scores"), aligned=128),
    AttentionKernel("cudnn", "SDPA held to cuDNN's kernel", "sdpa:cudnn", devices=(CUDA,), dtypes=NARROW,
                    biases=("keys", "scores"), largest=128, aligned=128),
    AttentionKernel("flex", "FlexAttention: compiled for masks, biases and caps; on a CPU forward only", "flex:flex",
                    biases=("keys", "scores"), softcap=True, dropout="", devices=(CPU, CUDA), widths=False,
                    backward=(CUDA,), linear=True),
    AttentionKernel("flash_attention_2", "the package flash-attn 2", "flash_packages:flash_attention_2", masks=False,
                    biases=(), softcap=True, devices=(CUDA,), dtypes=NARROW, widths=False, largest=256,
                    package="flash_attn", linear=True),
    AttentionKernel("flash_attention_3", "the package flash-attn 3", "flash_packages:flash_attention_3", masks=False,
                    biases=(), softcap=True, dropout="", devices=(CUDA,), dtypes=NARROW, largest=256,
                    package="flash_attn_interface", linear=True),
    AttentionKernel("eager", "plain products, the model's own: the reference", "eager:eager", softcap=True,
                    dropout="exact"),
)
# fmt: on


def kernel_named(name: str) -> AttentionKernel:
    """Return the record of the kernel `name`."""
    return next(kernel for kernel in KERNELS if kernel.name == name)
