"""The metadata of torch's own checkpoint writer, which is a pickle, read without unpickling it.

The opcodes are walked, and what they would make of classes becomes records of a name and its contents: nothing that
the file names is looked up or called. Which records make a checkpoint's metadata is known here.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise._torch_compat.fsdp1 import StorageInfo

FILE = ".metadata"
_EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = ("PROTO", "FRAME", "STOP")
_WITH_ARGUMENT = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")


@dataclass(eq=False)
class _Record:
    """The makings of an object: the name of its class or function, arguments, and state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


class _Walk:
    """The stack of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, code: str, argument: Any) -> None:
        """Do what the opcode says, with records in the place of objects. Raises ValueError for opcodes unknown here."""
        stack = self.stack
        if code in _WITH_ARGUMENT or code in _VALUES:
            stack.append(_VALUES.get(code, argument))
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == "MARK":
            self.marks.append(len(stack))
        elif code in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "TUPLE" or code in _SHORT_TUPLES:
            stack.append(tuple(self._above() if code == "TUPLE" else self._last(_SHORT_TUPLES[code])))
        elif code not in _IGNORED:
            self._combine(code, argument)

    def _combine(self, code: str, argument: Any) -> None:
        stack = self.stack
        if code in ("APPEND", "APPENDS"):
            added = self._above() if code == "APPENDS" else self._last(1)
            stack[-1].extend(added)
        elif code in ("SETITEM", "SETITEMS"):
            added = self._above() if code == "SETITEMS" else self._last(2)
            stack[-1].update(zip(added[::2], added[1::2], strict=True))
        elif code == "GLOBAL":
            stack.append(_Record(argument.replace(" ", ".")))
        elif code == "STACK_GLOBAL":
            stack.append(_Record(".".join(self._last(2))))
        elif code in ("NEWOBJ", "REDUCE"):
            maker, arguments = self._last(2)
            stack.append(_Record(maker.name, tuple(arguments)))
        elif code == "BUILD":
            (state,) = self._last(1)
            stack[-1].state = state
        else:
            raise ValueError(f"opcode {code} has no place in a checkpoint's metadata")

    def _last(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _above(self) -> list[Any]:
        return self._last(len(self.stack) - mark) if len(self.stack) > (mark := self.marks.pop()) else []


def from_pickle(content: bytes, load_id: str | None) -> Metadata:
    """The metadata of a file `.metadata`. Raises ValueError or another error of Python's for anything else."""
    walk = _Walk()
    for opcode, argument, _ in pickletools.genops(content):
        walk.step(opcode.name, argument)
    state = _state(walk.stack[-1], "Metadata")
    return Metadata(
        state_dict_metadata={name: _value(value) for name, value in state["state_dict_metadata"].items()},
        planner_data={name: tuple(path) for name, path in (state["planner_data"] or {}).items()},
        storage_data={_index(index): _place(place) for index, place in state["storage_data"].items()},
        storage_meta=StorageMeta(load_id=load_id),
    )


def _state(record: Any, class_name: str) -> Any:
    if not isinstance(record, _Record) or record.name.rpartition(".")[2] != class_name:
        raise ValueError(f"{getattr(record, 'name', type(record).__name__)} stands where a {class_name} has to be")
    return {} if record.state is None else record.state


def _value(record: _Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if record.name.endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    dtype = getattr(torch, _state(state["properties"], "TensorProperties")[0].name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    chunks_of = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(place["offsets"]), _size(place["sizes"])) for place in chunks_of]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(state["size"]), chunks)


def _size(record: Any) -> torch.Size:
    if not isinstance(record, _Record) or record.name != "torch.Size":
        raise ValueError(f"{record!r} is no torch.Size")
    return torch.Size(*record.arguments)


def _index(record: Any) -> MetadataIndex:
    state = _state(record, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(state["fqn"], None if offset is None else _size(offset), state.get("index"))


def _place(record: Any) -> StorageInfo:
    state = _state(record, "_StorageInfo")
    if state.get("transform_descriptors"):
        raise ValueError("its files went through transforms, such as compression, which are not read here")
    return StorageInfo(state["relative_path"], state["offset"], state["length"])
