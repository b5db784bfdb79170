"""A model directory in Hugging Face's form, written tensor by tensor: safetensors shards, config, tokenizer.

Writing streams: a shard is written when it is full, and the directory appears under its name only when all of it is
there. Nothing here needs a process group; who gathers what is decided above, in export.py.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from shardwise.checkpoint.weight_files import INDEX, SINGLE
from shardwise.errors import OutputError

CHAT_TEMPLATE_FILE = "chat_template.jinja"  # as tokenizers of transformers read it
DEFAULT_SHARD_BYTES = 1 << 30
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "tokenization_*.py", "sentencepiece*", "additional_chat_templates/*.jinja",
)  # fmt: skip


class HuggingFaceWriter:
    """Writes a model directory that `from_pretrained` opens; a context manager that leaves nothing when it fails.

    `ties` are groups of names of one parameter: the first name that is added is stored, the others are skipped.
    An existing directory is replaced only with `overwrite`. A user's own module has no config; its weights are written
    alone. What transformers refuses to write does not cost the weights.

    Attributes:
        problems: what the directory lacks, or has in another form than transformers would write, and why.
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
        self.problems: list[str] = []
        if self.path.exists() and not overwrite and not _is_empty_directory(self.path):
            raise OutputError(f"{self.path} exists already; choose another directory")
        self._temporary = make_sibling(self.path)

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
            put_in_place(self._temporary, self.path)
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
            file.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner can read
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
        self._write_config(self.config, "config.json")
        if self.generation_config is not None:
            self._write_config(self.generation_config, "generation_config.json")
        source = Path(self.config.name_or_path or "")
        if getattr(self.config, "auto_map", None) and source.is_dir():
            for file in source.glob("*.py"):  # a model that brings its own code cannot be opened without it
                shutil.copy2(file, self._temporary / file.name)

    def _write_config(self, config: PreTrainedConfig | GenerationConfig, name: str) -> None:
        """Write a config as transformers does, or with its values as they are where it refuses them."""
        try:
            config.save_pretrained(self._temporary)
        except OSError:
            raise
        except Exception as error:  # transformers checks values by code of its own, and a config may have its own code
            reason = " ".join(str(error).split())
            text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=str)
            (self._temporary / name).write_text(text + "\n", encoding="utf-8")
            self.problems.append(
                f"{name} has values that transformers refuses to save, and was written as is: {reason}"
            )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a tokenizer out of `source`, which may hold a whole model."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                place = target / file.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copy2(file, place)


def copy_chat_template(template: str | None, directory: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Put the chat template of a job beside the tokenizer, under the name by which transformers reads it."""
    if template is None:
        return
    if Path(template).is_file():
        text = Path(template).read_text(encoding="utf-8-sig")  # transformers would render a byte order mark
        (directory / CHAT_TEMPLATE_FILE).write_text(text, encoding="utf-8")
    else:
        say(f"the chat template is not exported: {template} is not there any more")


def copy_processor(given: str | dict[str, Any] | None, model: str | None, directory: Path) -> None:
    """Put what makes tensors of images or sound beside the model: of a job's `data.processor`, or of its `model.path`.

    A model of text alone has none.
    """
    if isinstance(given, dict):
        (directory / PROCESSOR_FILES[0]).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
        return
    source = given or model
    for name in PROCESSOR_FILES if source is not None else ():
        file = Path(str(source)) / name
        if file.is_file():
            shutil.copyfile(file, directory / name)


def _shard_name(shard: int, shards: int) -> str:
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def _unfinished(path: Path) -> str:
    return f".{path.name}.unfinished-"


def remove_unfinished(path: Path) -> None:
    """Remove what writers of `path` left that were killed; for a caller who knows that no other writes there now."""
    if path.parent.is_dir():
        for entry in path.parent.iterdir():
            if entry.name.startswith(_unfinished(path)):
                shutil.rmtree(entry, ignore_errors=True)


def make_sibling(path: Path) -> Path:
    """Make a new directory beside `path`, on the same file system, so that a rename puts it in place at once.

    Raises:
        OutputError: it cannot be made there, or nothing can be renamed to `path`.
    """
    if os.path.ismount(path) or path.resolve() == Path.cwd():
        what = "where a file system is mounted" if os.path.ismount(path) else "the current directory"
        raise OutputError(
            f"{path} is {what}, and is not replaced; give a new directory in it, such as {path / 'model'}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_unfinished(path), dir=path.parent))
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be written: {error}") from error


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; what stood there is moved aside first and removed last."""
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
