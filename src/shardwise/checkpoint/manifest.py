"""The manifest: one JSON file that says all of a checkpoint that is not a tensor, and where every tensor's slices are.

It is written last, so a directory that holds one is complete. Its first key is the hash of all that follows. Nothing in
it is trusted: names of files lead nowhere else, slices make up their tensors and lie inside of their files, and a newer
format is refused by its number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwise.errors import CheckpointError, DamagedError
from shardwise.model.facts import LayerAdapter
from shardwise.model.stored_dtypes import TORCH_DTYPES
from shardwise.words import listed

FILE = "manifest.json"
OWNER = "owner"  # a file beside the checkpoints: the run that writes here
FORMAT: Literal["shardwise-checkpoint"] = "shardwise-checkpoint"
# 3 lacks averages of weights, the sources of a mixture and a stream's position, 2 what `evaluation.metric` has come to
# too, 1 `adapter` as well.
VERSION = 4
BLOCK_BYTES = 1 << 22  # files are hashed in blocks of this size, so that a slice can be checked without its whole file
OLDER = "; use an older checkpoint"
ITEM_BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

AVERAGE = "ema/"  # what the names of averaged weights begin with

SEAL_BYTES = len(b'{"hash":"",') + 32

PYTHON_NUMBERS: dict[str, type[float]] = {"number": float, "int": int, "bool": bool}  # "dtypes" of plain numbers
SECTIONS = {"model", "parallel", "memory", "precision", "training", "optimizer", "world", "degrees", "dtypes"}  # read

Size = Annotated[int, Field(ge=0, lt=1 << 63)]  # what torch takes as a size


class NewerError(CheckpointError):
    """A whole checkpoint of a version to come: it may be neither passed over, which would lose steps, nor replaced."""


def _plain_name(name: str) -> str:
    if not name or name.startswith(".") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"file name {name!r} leads out of the checkpoint's directory")
    return name


def _dtype_of_a_number(name: str) -> str:
    if name not in PYTHON_NUMBERS and name not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {name!r}")
    return name


def _with_sections(content: dict[str, Any]) -> dict[str, Any]:
    for key in SECTIONS & content.keys():
        if not isinstance(content[key], dict):
            raise ValueError(f"{key} is no object")
    return content


class _Part(BaseModel):
    # Configs and optimizer state may hold infinity; null, the default for it, would not be read back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class FileRecord(_Part):
    """One safetensors file: its size, and the XXH3-128 hash of each of its blocks in hexadecimal."""

    bytes: Size
    hashes: list[str]

    @model_validator(mode="after")
    def _whole(self) -> FileRecord:
        if len(self.hashes) != -(-self.bytes // BLOCK_BYTES):
            raise ValueError(f"{len(self.hashes)} hashes for {self.bytes} bytes")
        return self


class Slice(_Part):
    """A box of a logical tensor, stored row by row from byte `start` of `file`."""

    offset: list[Size]
    shape: list[Size]
    file: Annotated[str, AfterValidator(_plain_name)]
    start: Size


class TensorRecord(_Part):
    """A logical tensor: dtype as safetensors names it, global shape, and the slices that make it up."""

    dtype: str
    shape: list[Size]
    slices: list[Slice]

    @model_validator(mode="after")
    def _inside(self) -> TensorRecord:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        for part in self.slices:
            if len(part.offset) != len(self.shape) or len(part.shape) != len(self.shape):
                raise ValueError(f"a slice of shape {part.shape} at {part.offset} in a tensor of shape {self.shape}")
            if any(o + n > size for o, n, size in zip(part.offset, part.shape, self.shape, strict=True)):
                raise ValueError(f"a slice of shape {part.shape} at {part.offset} lies outside of {self.shape}")
        if sum(math.prod(part.shape) for part in self.slices) != math.prod(self.shape) or _overlap(self.slices):
            raise ValueError(f"slices do not make up the shape {self.shape}")
        return self

    def slice_bytes(self, part: Slice) -> int:
        return math.prod(part.shape) * ITEM_BYTES[self.dtype]


def _overlap(slices: list[Slice]) -> bool:
    """Return whether an element is in two slices: without this check their sizes could add up and leave a hole."""
    boxes = sorted([(o, o + n) for o, n in zip(part.offset, part.shape, strict=True)] for part in slices)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # nor do those that begin later in the first dim
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
    return False


class Progress(_Part):
    """The progress of a run. `samples` is the state of the data, and `sources` are those of a mixture by name.

    `data_hash` is that of the samples so far.
    """

    step: Size = 0
    samples: Size = 0
    sources: dict[str, Size] = {}
    position: dict[str, Size] = {}  # in a stream, from which its next samples are read: a shard, a row, tokens before
    tokens: Size = 0
    skipped: Size = 0
    skipped_in_a_row: Size = 0
    data_hash: str = "0" * 16
    validation_loss: float | None = None  # of this very step
    judged_by: str = ""  # `evaluation.metric`, where something follows from it; the rest is of that one
    metric: float | None = None  # of this very step
    best_metric: float | None = None  # of all evaluations so far
    best_step: Size = 0  # of that one
    evaluations_since_best: Size = 0


JUDGEMENT = {"judged_by", "metric", "best_metric", "best_step", "evaluations_since_best"}


class Scaler(_Part):
    """State of the loss scaler."""

    scale: float = 1.0
    good_steps: Size = 0
    hysteresis: int = 1


class AdapterRecord(_Part):
    """Adapters of the model.

    Attributes:
        config: of peft's file, as it is written beside them.
        layers: name -> its adapter.
        base: directory of the model under them, whose frozen parameters the checkpoint leaves out; "" where it holds
            them itself.
        base_hash: hash of that directory's weights.
        packed: weights that were trained on in 4 or 8 bits -> their form.
    """

    config: dict[str, Any]
    layers: dict[str, LayerAdapter]
    base: str = ""
    base_hash: str = ""
    packed: dict[str, str] = {}


def written_version(progress: Progress, adapter: AdapterRecord | None, tensors: Iterable[str]) -> int:
    """Return the lowest version that says all of a checkpoint, so that an older shardwise may read it."""
    if progress.sources or progress.position or any(name.startswith(AVERAGE) for name in tensors):
        return VERSION
    return 3 if progress.judged_by else 1 if adapter is None else 2


class Manifest(_Part):
    """Everything about a checkpoint.

    Attributes:
        tensors: `model/NAME`, `ema/NAME`, `buffer/NAME`, `optimizer/KEY/NAME` and `random/DEVICE/RANK`, where NAME is
            the model's.
        ties: name -> other names of the same parameter; it is stored under the first.
        optimizer_scalars: NAME -> KEY -> (number, dtype), for state that is one number a parameter.
        config: the Hugging Face config, for export; None for a module of the user's own.
        generation: the generation config, where the model has one.
        adapter: the adapters, where there are some.
    """

    format: Literal["shardwise-checkpoint"] = FORMAT
    version: int = 1
    progress: Progress
    scaler: Scaler = Scaler()
    optimizer: str
    optimizer_scalars: dict[str, dict[str, tuple[float, Annotated[str, AfterValidator(_dtype_of_a_number)]]]] = {}
    tensors: dict[str, TensorRecord]
    ties: dict[str, list[str]] = {}
    files: dict[Annotated[str, AfterValidator(_plain_name)], FileRecord]
    job: Annotated[dict[str, Any], AfterValidator(_with_sections)]
    plan: Annotated[dict[str, Any], AfterValidator(_with_sections)]
    data: dict[str, Any]
    config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None
    adapter: AdapterRecord | None = None
    versions: dict[str, str]
    written: str

    @model_validator(mode="after")
    def _stored(self) -> Manifest:
        ends: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for part in tensor.slices:
                if part.file not in ends:
                    raise ValueError(f"{name} is in {part.file}, which the manifest does not list")
                ends[part.file].append((part.start, part.start + tensor.slice_bytes(part)))
        for file, spans in ends.items():
            spans.sort()
            if spans and spans[-1][1] > self.files[file].bytes:
                raise ValueError(f"a slice ends behind the end of {file}")
            if any(end > start for (_, end), (start, _) in pairwise(spans)):
                raise ValueError(f"slices of {file} overlap")
        return self

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.files.values())

    def tensor_bytes(self, name: str) -> int:
        """Size of a tensor."""
        tensor = self.tensors[name]
        return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]

    def to_json(self) -> bytes:
        parts = {"sources", "position"}
        of_progress = {name for name in parts if not getattr(self.progress, name)}  # as version 3 is written
        of_progress |= set() if self.progress.judged_by else JUDGEMENT  # as version 2
        left_out: dict[str, Any] = {"progress": of_progress} if of_progress else {}
        left_out |= {"adapter": True} if self.adapter is None else {}  # as version 1
        return seal(self.model_dump_json(indent=None, exclude=left_out).encode())

    def held(self, file: str, start: int, stop: int) -> str:
        """The first of `tensors_at`, in words."""
        return listed(self.tensors_at(file, start, stop)) or "no tensor, but its header"

    def tensors_at(self, file: str, start: int, stop: int) -> list[str]:
        """Names of the tensors with bytes in `start` ... `stop` of `file`."""
        return [
            name
            for name, tensor in self.tensors.items()
            if any(
                part.file == file and part.start < stop and part.start + tensor.slice_bytes(part) > start
                for part in tensor.slices
            )
        ]


def seal(text: bytes) -> bytes:
    """A JSON object with its own hash as the first key."""
    return b'{"hash":"%s",%s' % (xxhash.xxh3_128_hexdigest(text).encode(), text[1:])


def parse(text: bytes, where: str) -> Manifest:
    """The manifest in `text`.

    Raises:
        DamagedError: it is not as it was written; `where` names it.
        NewerError: it is of a newer version.
        CheckpointError: it is of another format.
    """
    try:
        data = json.loads(text)
        if isinstance(data, dict) and "hash" in data:
            _check_seal(text, where)  # before its words are believed
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a shardwise checkpoint")
        version = data.get("version")
        if not isinstance(version, int):
            raise CheckpointError(f"{where} has version {version}, which is no number")
        if version > VERSION:
            raise NewerError(
                f"{where} has version {version}, this shardwise reads up to {VERSION}; upgrade shardwise, or name an "
                "older checkpoint"
            )
        _check_seal(text, where)
        return Manifest.model_validate({key: value for key, value in data.items() if key != "hash"})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "[key]")
        why = first["msg"].removeprefix("Value error, ")
        raise DamagedError(f"{where} is damaged: {place}: {why}{OLDER}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged ({error}){OLDER}") from None


def _check_seal(text: bytes, where: str) -> None:
    if seal(b"{" + text[SEAL_BYTES:]) != text:
        raise DamagedError(f"{where} is damaged: its bytes are not those that were written{OLDER}")
