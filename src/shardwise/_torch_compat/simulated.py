"""Torch's means for an accelerator that Python registers, and for fake tensors on one.

No public names: torch calls a backend that is all Python an experiment (`torch.utils.backend_registration`, torch 2.11
to 2.14). Of what it registers, hooks and guards are for the whole process and for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils.checkpoint import DefaultDeviceType

from shardwise._torch_compat.accelerator import on_accelerator
from shardwise._torch_compat.remembered_fakes import RememberedFakeMode
from shardwise._torch_compat.tracing import FakeTensor, tree_leaves

_ATEN = torch.ops.aten
UNNAMED = "privateuseone"
DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]
LARGEST_HEAD = 256  # that flash attention takes
# Attributes of storages: torch keeps a storage's Python object as long as the storage.
PINNED, OF_VALUES = "_shardwise_pinned", "_shardwise_of_values"
NO_FP64 = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
READS_NOTHING = ("empty", "new_", "record_stream", "resize", "set_")

# Products, which autocast computes in its dtype, and what it computes in fp32.
_LOWERED = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
_RAISED = (
    "binary_cross_entropy_with_logits", "cross_entropy_loss", "cumsum", "exp", "layer_norm", "log", "log_softmax.int",
    "mse_loss", "nll_loss", "pow.Tensor_Scalar", "rsqrt", "softmax.int", "sum",
)  # fmt: skip
_libraries: list[torch.library.Library] = []  # what they register lasts as long as they do


def name_of_backend() -> str:
    """Return the name of this process's accelerator from outside of torch; `privateuseone` before it has one."""
    return torch._C._get_privateuse1_backend_name()


def register_backend(name: str, module: Any) -> None:
    """Make `name` a type of devices, `torch.<name>` its module: for the whole process, for good."""
    backend_registration.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _register_autocast(name)
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[-1].impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    for operator in _with_kernels():
        _libraries[-1].impl(operator, _unreached, "PrivateUse1")


def _with_kernels() -> Iterator[str]:
    """Yield operators that CPUs and GPUs have kernels of, and that torch takes apart for devices which have none."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has_kernel(name, "CPU") and has_kernel(name, "CompositeImplicitAutograd"):
            yield name.removeprefix("aten::")


def _unreached(*args: Any, **kwargs: Any) -> Any:
    """Stand for a kernel: tensors are fake, so that none runs."""
    raise NotImplementedError("the simulated device computes nothing")


def _register_autocast(name: str) -> None:
    """Let `torch.autocast(name)` cast what it casts on a GPU: products, norms and losses."""
    everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend((everything, own))
    for operator in _LOWERED:
        own.impl(operator, _cast(operator, lambda: torch.get_autocast_dtype(name)), "AutocastPrivateUse1")
    for operator in _RAISED:
        own.impl(operator, _cast(operator, lambda: torch.float32), "AutocastPrivateUse1")


def _cast(operator: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    """Return the operator after a cast of its floating-point arguments, without autocast below it."""
    packet, _, overload = operator.partition(".")
    function = getattr(getattr(_ATEN, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))

    def cast(value: Any) -> Any:
        casts = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype()) if casts else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return run


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that a GPU would choose; a plain device of Python's would have products and a softmax.

    Torch turns a mask of bools into numbers first, in each call (`sdp::convert_boolean_attn_mask`).
    """
    narrow, heads = query.element_size() == 2, query.shape[-3] == key.shape[-3]
    size, is_constant = query.shape[-1], attn_mask is None or not attn_mask.requires_grad
    if attn_mask is None and narrow and query.dim() == 4 and size == value.shape[-1] <= LARGEST_HEAD:
        outputs = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif is_constant and heads and query.dim() == 4:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        outputs = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    else:
        outputs = _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    output: Tensor = outputs[0]
    return output


@contextmanager
def checkpoints_on(device_type: str) -> Iterator[None]:
    """Let activation checkpoints of no device's tensors keep the generator of `device_type` inside."""
    with mock.patch.object(DefaultDeviceType, "_default_device_type", device_type):
        yield


class SimulatedFakeMode(RememberedFakeMode):
    """Fake tensors of a device that is there as far as torch's Python knows, and has no kernels.

    Args:
        made: told of every tensor that an operator returns.
        has_fp64: whether the device has it; else it refuses, as Metal does, whatever would make such a tensor there.
    """

    def __init__(self, made: Callable[[Tensor], None], has_fp64: bool = True, **settings: Any) -> None:
        self._made, self._has_fp64 = made, has_fp64
        super().__init__(**settings)

    @property
    def avoid_device_init(self) -> bool:
        """True: `torch.tensor(values, device=...)` must not make a real tensor on the device."""
        return True

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Work out an operator, and mark what it leaves in pinned memory, or makes of Python's values."""
        if func is record_stream:
            return None  # torch would run it, on real memory
        if func is add_product:  # of which torch has no shapes
            return (kwargs or {})["out"]
        mark = OF_VALUES if func is lift else PINNED if pins_output(func, args, kwargs) else None
        if func is pin:
            func, args, kwargs = _ATEN.clone.default, args[:1], {}
        output = super().dispatch(func, types, args, kwargs)
        for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(leaf, Tensor):
                if not self._has_fp64 and leaf.dtype is torch.float64 and on_accelerator(leaf):
                    raise TypeError(NO_FP64)
                self._made(leaf)
                if mark is not None:
                    setattr(leaf.untyped_storage(), mark, True)
        return output


record_stream = _ATEN.record_stream.default
add_product = _ATEN.addmm.dtype_out  # of fewer bits, to a tensor of more
pin = _ATEN._pin_memory.default
lift = _ATEN.lift_fresh.default
to_copy = _ATEN._to_copy.default
copy_into = _ATEN.copy_.default
copy_each_into = _ATEN._foreach_copy_.default
INDEXING = tuple(
    getattr(_ATEN, name)
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
WAITS_FOR_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CPU_NAMES = ("_for_cpu", "mkldnn", "onednn", "mkl_", "fbgemm", "xnnpack")


def pins_output(func: Any, args: Any, kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an operator's output is in pinned host memory."""
    kwargs = kwargs or {}
    if func is to_copy and kwargs.get("non_blocking"):  # torch pins what `.to("cpu", non_blocking=True)` makes
        target = kwargs.get("device")
        return target is not None and target.type == "cpu" and args[0].device.type != "cpu"
    return func is pin or bool(kwargs.get("pin_memory"))


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a fake tensor is in pinned host memory."""
    return hasattr(tensor.untyped_storage(), PINNED)


@contextmanager
def pinned_fakes() -> Iterator[None]:
    """Let fake tensors answer inside whether they are pinned, and be pinned: torch asks for the memory they lack."""

    def asked(tensor: Tensor, device: Any = None) -> bool:
        return is_pinned(tensor)

    def pinned(tensor: Tensor, device: Any = None) -> Tensor:
        return tensor if is_pinned(tensor) else pin(tensor)

    with mock.patch.object(FakeTensor, "is_pinned", asked), mock.patch.object(FakeTensor, "pin_memory", pinned):
        yield


def is_of_values(tensor: Tensor) -> bool:
    """Return whether a fake tensor is what `torch.tensor` has made of Python's values."""
    return hasattr(tensor.untyped_storage(), OF_VALUES)


def is_of_cpus(func: Any) -> bool:
    """Return whether only a CPU has this operator; a build for CPUs cannot say what others have, so by its name."""
    name = f"{func.namespace}::{func._opname}"
    return any(part in name for part in CPU_NAMES)


def written_arguments(func: Any) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    arguments = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(place for pair in arguments for place in pair)


def touches_values(func: Any) -> bool:
    """Return whether an operator reads or writes what is in memory; views and operators that ask for shapes do not."""
    name = func._opname
    return not (func.is_view or name.startswith(READS_NOTHING) or name.endswith("_like"))
