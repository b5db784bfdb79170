"""Weights on disk in Hugging Face's form: safetensors files beside a config.json.

Reading goes through the files' own index and maps them into memory: a rank that asks for a slice of a tensor reads that
slice. Writing streams: tensors arrive one by one, a shard is written when it is full, and the directory appears under
its name only when all of it is there. Nothing here needs a process group; who reads what is decided above.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from shardwise.errors import ModelError, OutputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DEFAULT_SHARD_BYTES = 1 << 30
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "tokenization_*.py", "sentencepiece*",
)  # fmt: skip


class HuggingFaceWeights:
    """The tensors of a Hugging Face model directory, read slice by slice."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = {file: _open(file) for file in _weight_files(self.path)}
        self._file_of = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        _check_index(self.path, self._file_of)

    @property
    def names(self) -> tuple[str, ...]:
        """Names as the files have them."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The tensor, or the part of it that `slices` (one for each leading dim) cut out; only that part is read."""
        tensor = self._slice(name)
        try:
            part = tensor[tuple(slices)] if slices else self._files[self._file_of[name]].get_tensor(name)
            return part.clone(memory_format=torch.contiguous_format)  # it may be a view of the mapped file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._file_of[name]}: {name!r} cannot be read ({error})") from error

    def resolve(
        self,
        model_names: Iterable[str],
        *,
        base_model_prefix: str = "",
        ties: Iterable[Sequence[str]] = (),
        model: nn.Module | None = None,
    ) -> dict[str, str]:
        """The file's name of each of the model's parameters.

        Files leave out tied names, and hold the base model with or without its prefix (GPT-2's `transformer.`, absent
        on the Hub). `model` gives transformers' own renamings (GPT-NeoX's head is `embed_out` on the Hub, BERT's norms
        have a `gamma`). What the files hold beyond the model, such as old attention masks, is left alone.
        """
        group_of = {name: group for group in ties for name in group}
        rename, converts = _renamings(model)
        renamed = {rename(name): name for name in sorted(self._file_of)}
        known = renamed | {name: name for name in self._file_of}
        found, missing = {}, []
        for name in model_names:
            candidates = [name, *group_of.get(name, ())]
            spellings = [spelling for candidate in candidates for spelling in _spellings(candidate, base_model_prefix)]
            match = next((known[spelling] for spelling in spellings if spelling in known), None)
            if match is None:
                missing.append(name)
            else:
                found[name] = match
        if missing:
            self._raise_missing(missing, set(self._file_of) - set(found.values()), converts)
        return found

    def check_shapes(self, resolved: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises where a tensor of the files has another shape than the model's parameter."""
        for name, file_name in resolved.items():
            if self.shape(file_name) != tuple(shapes[name]):
                raise ModelError(
                    f"{self._file_of[file_name]}: {file_name!r} has shape {list(self.shape(file_name))}, the model's "
                    f"{name!r} has {list(shapes[name])}; config.json and weights do not belong together"
                )

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"{self.path}: no tensor {name!r} in {_listed(file.name for file in self._files)}")
        return self._files[self._file_of[name]].get_slice(name)

    def _raise_missing(self, missing: list[str], unused: set[str], converts: bool) -> None:
        rest = f"; unused in the files: {_listed(sorted(unused))}" if unused else ""
        why = (
            "transformers converts tensors of this kind of model while it loads them, which is not supported here"
            if converts
            else "the directory must hold all weights of the model that its config.json describes"
        )
        count = f"{len(missing)} tensor{'s' if len(missing) > 1 else ''}"
        raise ModelError(f"{self.path}: the weights lack {count} of the model ({_listed(missing)}){rest}; {why}")


def _spellings(name: str, prefix: str) -> list[str]:
    """`name`, with and without the base model's prefix."""
    if not prefix:
        return [name]
    dotted = f"{prefix}."
    return [name, name.removeprefix(dotted) if name.startswith(dotted) else dotted + name]


def _renamings(model: nn.Module | None) -> tuple[Callable[[str], str], bool]:
    """The map from a name in the files to the model's, and whether transformers would also convert tensors."""
    if not isinstance(model, PreTrainedModel):
        return lambda name: name, False
    transforms = get_model_conversion_mapping(model)
    for architecture in model.config.architectures or ():  # FSDP2 renames the class, by which the rules are found
        transforms += get_checkpoint_conversion_mapping(architecture) or []
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return rename, len(renamings) < len(transforms)


def _listed(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory; those that the index names, where there is one."""
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    if (path / INDEX).exists():
        files = [path / name for name in sorted(set(_read_index(path).values()))]
    else:
        files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ModelError(f"{path}: {INDEX} names files that are not there: {_listed(absent)}")
    if files:
        return files
    if any((path / name).exists() for name in PICKLED):
        raise ModelError(
            f"{path} holds pickled weights only (pytorch_model.bin); loading them could run code. Convert them once: "
            "AutoModel...from_pretrained(directory).save_pretrained(other_directory) writes safetensors"
        )
    raise ModelError(f"{path} holds no weights: neither {SINGLE} nor {INDEX}; use model.config to start from none")


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name for name in files.values()):
            raise ValueError("a file name in it leads out of the directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / INDEX} is corrupt ({type(error).__name__}: {error})") from error
    return files


def _check_index(path: Path, file_of: Mapping[str, Path]) -> None:
    if not (path / INDEX).exists():
        return
    wrong = [name for name, file in _read_index(path).items() if file_of.get(name, Path()).name != file]
    if wrong:
        raise ModelError(f"{path / INDEX} places tensors in files that do not hold them: {_listed(wrong)}")


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is truncated or not a safetensors file ({error}); copy or download it again"
        ) from error


class HuggingFaceWriter:
    """Writes a model directory that `from_pretrained` opens; a context manager that leaves nothing when it fails.

    `ties` are groups of names of one parameter: the first name that is added is stored, the others are skipped.
    An existing directory is replaced only with `overwrite`. A user's own module has no config; its weights are written
    alone.
    """

    def __init__(
        self,
        path: str | Path,
        config: PreTrainedConfig | None,
        tokenizer_directory: str | Path | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        ties: Iterable[Sequence[str]] = (),
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.config = copy.deepcopy(config)
        self.generation_config = generation_config
        self.tokenizer_directory = Path(tokenizer_directory) if tokenizer_directory is not None else None
        self.max_shard_bytes = max_shard_bytes
        self._group_of = {name: frozenset(group) for group in ties for name in group}
        self._file_of: dict[str, int] = {}  # name -> number of its shard
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards = 0
        self._has_dtype = False
        if self.path.exists() and not overwrite and not _is_empty_directory(self.path):
            raise OutputError(f"{self.path} exists already; choose another directory")
        self._temporary = _make_sibling(self.path)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one whole tensor; it is on disk once its shard is full or `finish` is called."""
        if name in self._file_of:
            raise ValueError(f"{name!r} was added before")
        if self._group_of.get(name, frozenset()) & self._file_of.keys():
            return
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._write_shard()
        # A copy of a view would take its whole storage along, and two views of one storage are refused by safetensors.
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending_bytes += size
        self._total_bytes += size
        self._file_of[name] = self._shards
        if self.config is not None and tensor.is_floating_point() and not self._has_dtype:
            self.config.dtype, self._has_dtype = tensor.dtype, True

    def finish(self) -> Path:
        """Writes what is left, config, generation config and tokenizer, and puts the directory in its place."""
        try:
            if self._pending:
                self._write_shard()
            self._name_shards()
            self._write_configs()
            if self.tokenizer_directory is not None:
                copy_tokenizer(self.tokenizer_directory, self._temporary)
            _put_in_place(self._temporary, self.path)
        except OSError as error:
            self.abort()
            raise OutputError(f"{self.path} cannot be written: {error}") from error
        return self.path

    def abort(self) -> None:
        """Removes what was written so far."""
        self._pending.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> HuggingFaceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()

    def _write_shard(self) -> None:
        file = self._temporary / _shard_name(self._shards, 0)
        try:
            save_file(self._pending, str(file), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            self.abort()
            raise OutputError(f"{self.path} cannot be written: {error}") from error
        self._pending, self._pending_bytes = {}, 0
        self._shards += 1

    def _name_shards(self) -> None:
        """Gives the shards their final names, which hold their number, and writes the index if there are several."""
        names = [_shard_name(shard, self._shards) for shard in range(self._shards)] if self._shards > 1 else [SINGLE]
        for shard in range(self._shards):
            os.replace(self._temporary / _shard_name(shard, 0), self._temporary / names[shard])
        if self._shards > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": {name: names[shard] for name, shard in sorted(self._file_of.items())},
            }
            (self._temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_configs(self) -> None:
        if self.config is None:
            return
        if getattr(self.config, "use_cache", True) is False:
            self.config.use_cache = True  # off while training; whoever opens the model generates with it
        self.config.save_pretrained(self._temporary)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(self._temporary)
        source = Path(self.config.name_or_path or "")
        if getattr(self.config, "auto_map", None) and source.is_dir():
            for file in source.glob("*.py"):  # a model that brings its own code cannot be opened without it
                shutil.copy2(file, self._temporary / file.name)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a tokenizer out of `source`, which may hold a whole model."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)


def _shard_name(shard: int, shards: int) -> str:
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def _make_sibling(path: Path) -> Path:
    """A new directory beside `path`, on the same file system, so that a rename puts it in place at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be written: {error}") from error


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _put_in_place(temporary: Path, path: Path) -> None:
    """Renames `temporary` to `path`; what stood there is moved aside first and removed last."""
    temporary.chmod(0o777 & ~_umask())  # mkdtemp makes directories that only their owner can read
    aside = None
    if path.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        os.replace(path, aside / path.name)
    os.replace(temporary, path)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
