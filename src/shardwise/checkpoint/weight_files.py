"""The two formats of weight files behind one small interface: safetensors, and what `torch.save` wrote (`.bin`).

Both are mapped into memory, so that a slice costs its own pages only. A `.bin` is a pickle: it goes through torch's
`weights_only=True` alone, which builds tensors and looks up nothing beyond torch's own list, so that a planted file
runs no code. Which files a directory consists of is decided above, in reading.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.model.stored_dtypes import TORCH_DTYPES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
_ZIP = b"PK\x03\x04"


class WeightFile(Protocol):
    """One open file of tensors by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def dtype(self, name: str) -> str:
        """Torch's name of the tensor's dtype."""

    def read(self, name: str, slices: Sequence[slice] = ()) -> Tensor:
        """The tensor, or what `slices` (one for each leading dim) cut out of it, in memory of its own."""


def open_weight_files(files: Iterable[Path]) -> dict[Path, WeightFile]:
    """Opens files of either format; those whose name does not end in `.safetensors` are torch's.

    Raises:
        ModelError: a file is absent, broken, or holds something other than tensors by name.
    """
    old: dict[Path, dict[str, Tensor]] = {}
    return {file: SafetensorsFile(file) if file.suffix == ".safetensors" else TorchFile(file, old) for file in files}


class SafetensorsFile:
    """A safetensors file, mapped by its own library."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._handle: Any = safe_open(str(file), framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise ModelError(f"{file} is missing; copy or download it again") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is truncated or not a safetensors file ({error}); copy or download it again"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in it."""
        return tuple(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._handle.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Torch's name of the tensor's dtype."""
        stored = self._handle.get_slice(name).get_dtype()
        if stored not in TORCH_DTYPES:
            raise ModelError(f"{self._file}: {name!r} is stored as {stored}; training needs the unquantized model")
        return str(TORCH_DTYPES[stored]).removeprefix("torch.")

    def read(self, name: str, slices: Sequence[slice] = ()) -> Tensor:
        """The tensor or a part of it, in memory of its own."""
        try:
            part = self._handle.get_slice(name)[tuple(slices)] if slices else self._handle.get_tensor(name)
            return part.clone(memory_format=torch.contiguous_format)  # it may be a view of the mapped file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._file}: {name!r} cannot be read ({error})") from error


class TorchFile:
    """A file of `torch.save`, mapped; one from before torch 1.6 (no zip archive) cannot be mapped and is read whole.

    `old` is shared by a directory's files and holds the tensors of the last old one that was read: parameters are
    asked for in about the order of the files, and one file is the most that lies in memory.
    """

    def __init__(self, file: Path, old: dict[Path, dict[str, Tensor]]) -> None:
        self._file = file
        self._mapped = _is_zip(file)
        self._held: dict[Path, dict[str, Tensor]] = {} if self._mapped else old
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in it."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """Torch's name of the tensor's dtype."""
        return str(self._tensors()[name].dtype).removeprefix("torch.")

    def read(self, name: str, slices: Sequence[slice] = ()) -> Tensor:
        """The tensor or a part of it, in memory of its own."""
        return self._tensors()[name][tuple(slices)].clone(memory_format=torch.contiguous_format)

    def _tensors(self) -> dict[str, Tensor]:
        if self._file not in self._held:
            self._held.clear()  # before the next is read, not after
            self._held[self._file] = _tensors_of(_load(self._file, self._mapped), self._file)
        return self._held[self._file]


def _is_zip(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error})") from error


def _load(file: Path, mapped: bool) -> object:
    """Return what torch's restricted unpickler makes of `file`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript, which is refused below
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # broken bytes make the unpickler raise anything: EOFError, KeyError, struct.error, ...
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        if unknown:
            raise ModelError(
                f"{file} asks for {unknown[1]!r}, which no tensor needs; code out of weight files is never run. Use "
                "the model's safetensors files, or a file of its state_dict() alone"
            ) from error
        raise ModelError(
            f"{file} is truncated or not a file of tensors that torch.save wrote ({_reason(error)}); copy or download "
            "it again"
        ) from error


def _reason(error: Exception) -> str:
    """The first sentence; torch's goes on with advice to load the file without protection."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    return re.split(r"\.\s|\n", text)[0] or type(error).__name__


def _tensors_of(content: object, file: Path) -> dict[str, Tensor]:
    """The tensors by name that `content` must be; what else it holds, such as a step count, is left alone."""
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, not tensors by name; save model.state_dict()")
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        kinds = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in list(content.items())[:4]) or "nothing"
        raise ModelError(f"{file} holds {kinds}, no tensors by name; save model.state_dict() itself")
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not _is_plain(tensor):
            raise ModelError(f"{file}: {key!r} is no dense tensor with values under a name; save model.state_dict()")
    return {key: tensor.detach() for key, tensor in tensors.items()}


def _is_plain(tensor: Tensor) -> bool:
    """Return whether every element is a number in the file: not sparse, quantized, on meta, or repeated at will."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
