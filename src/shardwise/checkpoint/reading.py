"""The weights of a Hugging Face model directory, as the model names them, read slice by slice.

A directory holds safetensors or what torch.save wrote, in one file or in several with an index; conversion.py knows
under which names. A rank that asks for a slice of a tensor reads that slice. Nothing here needs a process group; who
reads what is decided above.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.conversion import Recipe, match_names
from shardwise.checkpoint.new_rows import GrownTensor
from shardwise.checkpoint.weight_files import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE, open_weight_files
from shardwise.errors import ModelError
from shardwise.words import listed

_COMPARED_AT_ONCE = 1 << 24  # elements


class HuggingFaceWeights:
    """The tensors of a Hugging Face model directory, read slice by slice.

    Attributes:
        unread: tensors for which the resolved model has no place, but for what transformers knows to be idle.

    Raises:
        ModelError: there are no weights, or a file of them is absent, broken or holds something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files, index = _find_files(self.path)
        self._files = open_weight_files(files)
        self._file_of = {name: file for file, opened in self._files.items() for name in opened.names}
        self._made: dict[str, tuple[Recipe, tuple[int, ...]]] = {}  # of other tensors, by the model's name: how, shape
        self._grown: dict[str, GrownTensor] = {}
        self.unread: tuple[str, ...] = ()
        if index is not None:
            _check_index(index, self._file_of)

    @property
    def names(self) -> tuple[str, ...]:
        """Names as the files have them."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        if name in self._grown:
            return self._grown[name].shape
        return self._made[name][1] if name in self._made else self._files[self._file(name)].shape(name)

    def dtype(self, name: str) -> str:
        """Torch's name of the dtype of a tensor; of what is made of others, the first one's."""
        source = self._made[name][0].sources[0][1] if name in self._made else name
        return self._files[self._file(source)].dtype(source)

    def read(self, name: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The tensor, or the part of it that `slices` (one for each leading dim) cut out; only that part is read.

        What transformers makes of other tensors is made whole and then cut: one parameter's sources are in memory.
        """
        if name in self._grown:
            return self._grown[name].part(slices or ())
        return self._read_stored(name, slices or ())

    def _read_stored(self, name: str, slices: Sequence[slice]) -> Tensor:
        if name not in self._made:
            return self._files[self._file(name)].read(name, slices)
        whole = self._made[name][0].make(lambda source: self._files[self._file(source)].read(source))[name]
        return whole[tuple(slices)].clone(memory_format=torch.contiguous_format) if slices else whole

    def resolve(
        self,
        model_names: Iterable[str],
        *,
        optional: Iterable[str] = (),
        base_model_prefix: str = "",
        ties: Iterable[Sequence[str]] = (),
        model: nn.Module | None = None,
    ) -> dict[str, str]:
        """The name of each of the model's parameters, by which `shape` and `read` know it from here on.

        Files leave out tied names, and hold the base model with or without its prefix (GPT-2's `transformer.`, absent
        on the Hub). `model` gives transformers' own rules, also of what files may lack (Marian's positions, which its
        initializer computes). Of `optional`, its buffers, come those that are there. What the files hold beyond the
        model is left alone, and is in `unread`.
        """
        model_names, optional = list(model_names), list(optional)
        group_of = {name: group for group in ties for name in group}
        wanted = [*model_names, *group_of, *optional]
        direct, recipes = match_names(self._file_of, wanted, base_model_prefix, model)
        self._made = self._plan(recipes)
        known = direct | {name: name for name in self._made}
        there = {
            name: [known[tied] for tied in dict.fromkeys([name, *group_of.get(name, ())]) if tied in known]
            for name in model_names
        }
        may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        missing = [name for name, matches in there.items() if not matches and not _matches(may_lack, name)]
        sources = {name for recipe in recipes for _, name in recipe.sources}
        unread = self._file_of.keys() - direct.values() - sources
        if missing:
            self._raise_missing(missing, unread)
        idle = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"}
        self.unread = tuple(sorted(name for name in unread if not _matches(idle, name)))
        for twins in {tuple(sorted(set(matches))) for matches in there.values()}:
            self._check_equal(twins)
        buffers = {name: known[name] for name in optional if name in known}
        return {name: matches[0] for name, matches in there.items() if matches} | buffers

    def grow(self, resolved: Mapping[str, str], shapes: Mapping[str, Sequence[int]], rows: int, seed: int) -> None:
        """Give tensors of the model that have `rows` rows, and fewer in the files, rows of added tokens behind them."""
        for name, file_name in resolved.items():
            stored = self.shape(file_name)
            if stored and (rows, *stored[1:]) == tuple(shapes[name]) and stored[0] < rows:
                read = partial(self._read_stored, file_name)
                self._grown[file_name] = GrownTensor(read, stored, rows - stored[0], seed, name)

    def check_shapes(self, resolved: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises where a tensor of the files has another shape than the model's parameter."""
        for name, file_name in resolved.items():
            if self.shape(file_name) != tuple(shapes[name]):
                where = self._file_of.get(file_name, self.path)
                raise ModelError(
                    f"{where}: {file_name!r} has shape {list(self.shape(file_name))}, the model's {name!r} has "
                    f"{list(shapes[name])}; config.json and weights do not belong together"
                )

    def check_numbers(self, resolved: Mapping[str, str], names: Iterable[str]) -> None:
        """Raises where parameters `names`, numbers of the model, are codes in the files: their scales are not read."""
        for name in names:
            dtype = self.dtype(resolved[name])
            if not getattr(torch, dtype).is_floating_point or dtype.startswith("float8"):
                raise ModelError(
                    f"{self.path}: {resolved[name]!r} is stored as {dtype}, as quantized weights are, whose scales the "
                    "model has no place for; training needs the unquantized model"
                )

    def _file(self, name: str) -> Path:
        if name not in self._file_of:
            raise ModelError(f"{self.path}: no tensor {name!r} in {listed(file.name for file in self._files)}")
        return self._file_of[name]

    def _plan(self, recipes: Iterable[Recipe]) -> dict[str, tuple[Recipe, tuple[int, ...]]]:
        """Return what each recipe makes, found on the meta device: an expert too few shows before anything is read."""

        def blank(name: str) -> Tensor:
            return torch.empty(self._files[self._file(name)].shape(name), device="meta")

        try:
            return {
                name: (recipe, tuple(made.shape)) for recipe in recipes for name, made in recipe.make(blank).items()
            }
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}; config.json and weights do not belong together") from error

    def _check_equal(self, twins: Sequence[str]) -> None:
        """Names of one parameter that the files hold several times, as `.bin` files do, must agree."""
        for other in twins[1:]:
            if not self._equal(twins[0], other):
                raise ModelError(
                    f"{self.path}: {twins[0]!r} and {other!r} have different values, and the model of config.json has "
                    "one parameter for both; set tie_word_embeddings to false in config.json, or leave one out"
                )

    def _equal(self, one: str, other: str) -> bool:
        shape = self.shape(one)
        if shape != self.shape(other):
            return False
        length = shape[0] if shape else 1
        rows = max(1, _COMPARED_AT_ONCE // max(1, math.prod(shape[1:])))
        parts = [[slice(start, min(start + rows, length))] if shape else [] for start in range(0, length, rows)]
        return all(torch.equal(self.read(one, part), self.read(other, part)) for part in parts)

    def _raise_missing(self, missing: list[str], unused: Iterable[str]) -> None:
        rest = f"; unused in the files: {listed(sorted(unused))}" if unused else ""
        count = f"{len(missing)} tensor{'s' if len(missing) > 1 else ''}"
        raise ModelError(
            f"{self.path}: the weights lack {count} of the model ({listed(missing)}){rest}; the directory must hold "
            "all weights of the model that its config.json describes"
        )


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _find_files(path: Path) -> tuple[list[Path], Path | None]:
    """The files with the weights, and the index that names them where one does; in transformers' order of preference.

    Safetensors win where a directory has both. Files that no name gives away come last: they may be adapters.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if (path / single).exists():
            return [path / single], None
        if (path / index).exists():
            return _indexed_files(path / index), path / index
    loose = sorted(path.glob("*.safetensors"))
    if not loose:
        raise ModelError(
            f"{path} holds no weights: none of {SINGLE}, {INDEX}, {TORCH_SINGLE}, {TORCH_INDEX}; use model.config to "
            "start from none"
        )
    return loose, None


def _indexed_files(index: Path) -> list[Path]:
    files = [index.parent / name for name in sorted(set(_read_index(index).values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ModelError(
            f"{index.parent}: {index.name} names files that are not there: {listed(absent)}; copy or download them"
        )
    return files


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name or name in ("", "..") for name in files.values()):
            raise ValueError("a file name in it leads out of the directory")
        if not files:
            raise ValueError("it names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is corrupt ({type(error).__name__}: {error}); download it again") from error
    return files


def _check_index(index: Path, file_of: Mapping[str, Path]) -> None:
    wrong = [name for name, file in _read_index(index).items() if file_of.get(name, Path()).name != file]
    if wrong:
        raise ModelError(f"{index} places tensors in files that do not hold them: {listed(wrong)}")
