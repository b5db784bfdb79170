"""Checkpoints of version 2's scripts as Hugging Face directories: whole tensors out of shards and tensor parts.

A script's checkpoint is a directory of torch's distributed checkpoint (`sharded`, `async_sharded`), or of several such
for tensor ranks (`tp2-0`, `tp2-1`) or expert ranks (`ep2-0`) or both (`tp0_ep0` in SMP's documents), of one for each
shard (`async_local`: `tp0_ep0_fsdp1`), of a file for each rank (`local`, `use_pg_with_util`: `0.pt`), or has whole
weights and a config (`full`). Scripts keep the model's config in the first three. One process reads a directory's
tensors one at a time, and files for ranks whole.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.export import converted
from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.weight_files import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE
from shardwise.checkpoint.writing import HuggingFaceWriter
from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis, state_axes
from shardwise.model.discover import discover
from shardwise.model.experts import expert_stacks
from shardwise.parallel.layout import Layout
from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.parallel.transforms.expert import keep_own_experts
from shardwise.parallel.transforms.tensor import planned_splits
from shardwise.smp.model_config import CONFIG_FILE, CONFIG_KEY, MODEL_KEY, checkpoint_config
from shardwise.smp.options import make_job
from shardwise.smp.safe_reading import allowing, read_safely
from shardwise.smp.v2.checkpoint.utils import SORT_BY_LAST_INT, STEPS
from shardwise.smp.v2.distributed.checkpoint import torch_metadata
from shardwise.smp.v2.distributed.checkpoint.filesystem import DistributedFileSystemReader, first_failure
from shardwise.smp.v2.distributed.checkpoint.metadata import FILE
from shardwise.smp.v2.distributed.fsdp.checkpoint import EXPORT_KEY_IDENTITY
from shardwise.smp.v2.local_state import LocalFile
from shardwise.words import listed

# The keys of the model in a checkpoint: public scripts', and those of the adapter for NeMo.
MODEL_KEYS = (MODEL_KEY, "state_dict")
WEIGHTS = (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX)
PROBED = 64  # positions of the forward that is looked at
_TENSOR_PART = re.compile(r"tp(\d+)-(\d+)")
_EXPERT_PART = re.compile(r"ep(\d+)-(\d+)")
_SHARD = re.compile(r"tp(\d+)_ep(\d+)_fsdp(\d+)")
_DOCUMENTED = re.compile(r"tp(\d+)_ep(\d+)")


class _Shard(Protocol):
    """Tensors that one rank, or a group of them, has written."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the model's tensors."""

    def read(self, name: str) -> Tensor:
        """A tensor of the model as it is here."""

    def config(self) -> Any:
        """Return what the script has kept as the model's config; None where it has not."""


class _Directory:
    """A directory of torch's distributed checkpoint, whose metadata is read once."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, DistributedFileSystemReader(path)
        self.metadata: Metadata = self.reader.read_metadata()
        self.reader.read_metadata = self._kept  # type: ignore[method-assign]
        tensors = [key for key, value in self._values.items() if isinstance(value, TensorStorageMetadata)]
        self.keys = {
            key.partition(".")[2]: key for key in tensors if key.startswith(tuple(f"{top}." for top in MODEL_KEYS))
        }

    def _kept(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @property
    def names(self) -> list[str]:
        return list(self.keys)

    @property
    def _values(self) -> Mapping[str, Any]:
        return self.metadata.state_dict_metadata

    def read(self, name: str) -> Tensor:
        stored = self._values[self.keys[name]]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        self._load({self.keys[name]: tensor}, checkpoint.DefaultLoadPlanner())
        return tensor

    def config(self) -> Any:
        if not isinstance(self._values.get(CONFIG_KEY), BytesStorageMetadata):
            return None
        planner = _Plain()
        self._load({CONFIG_KEY: None}, planner)
        return planner.value

    def _load(self, wanted: dict[str, Any], planner: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group
                checkpoint.load(wanted, storage_reader=self.reader, planner=planner, no_dist=True)
        except checkpoint.CheckpointException as error:
            raise CheckpointError(f"{self.path} cannot be read: {first_failure(error)}") from error


class _Plain(checkpoint.DefaultLoadPlanner):
    """Reads one value that is no tensor, of what SMP's files may hold."""

    value: Any = None

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        with allowing(value):
            value.seek(0)
            self.value = torch.load(value, weights_only=True)


class _RankFile:
    """A rank's tensors by name: what `save_model_checkpoint` has written, or local state taken apart."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    @property
    def names(self) -> list[str]:
        return list(self.content[MODEL_KEY])

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.content[MODEL_KEY][name]
        return tensor

    def config(self) -> Any:
        return self.content.get(CONFIG_KEY)


class _Whole(HuggingFaceWeights):
    """Whole weights that a script has written, with the config beside them."""

    def config(self) -> Any:
        return None


Shards = Sequence[_Shard | LocalFile]
Parts = Sequence[Sequence[Shards]]  # by tensor rank, then by expert rank


def is_v2_checkpoint(path: str | Path) -> bool:
    """Tell if a checkpoint of version 2's scripts, or a directory of them, is there."""
    folder = Path(path)
    return "://" not in str(path) and folder.is_dir() and (_is_one(folder) or _newest(folder) is not None)


def export_v2_checkpoint(
    source: str | Path, path: str | Path, dtype: str | None = None, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Write the model of a checkpoint of version 2's scripts to the new directory `path`, in one process.

    Args:
        source: the directory of one checkpoint, or of several: then the one with the highest number of steps.
        dtype: of the parameters in the files, as of `shardwise export`.
        say: told which checkpoint is taken.

    Raises:
        CheckpointError: it is incomplete, of a kind that one process cannot put together, or of another model.
        OutputError: `path` is there already or cannot be written.
    """
    folder = Path(source)
    newest = None if _is_one(folder) else _newest(folder)
    if newest is not None:
        say(f"the newest checkpoint of {source} is {newest.name}")
        folder = newest
    parts = _parts(folder)
    config = checkpoint_config(folder, parts[0][0][0].config())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = _Tensors(folder, model, parts)
    with HuggingFaceWriter(path, config) as writer:
        for name in tensors.shapes:
            writer.add(name, converted(f"{MODEL_KEY}/{name}", tensors.read(name), dtype))
        return writer.finish()


class _Tensors:
    """The model's tensors, each out of all its parts.

    Raises:
        CheckpointError: parts lack tensors of the model.
    """

    def __init__(self, folder: Path, model: nn.Module, parts: Parts) -> None:
        self.folder = folder
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.parts = [[[_by_name(shard, self.shapes) for shard in shards] for shards in experts] for experts in parts]
        self.cuts = _cuts(model, len(parts), len(parts[0]))
        there = set(self.parts[0][0][0].names)
        missing = [name for name in self.shapes if name not in there]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {listed(missing)} of {type(model).__name__}, and holds "
                f"{listed(sorted(there - set(self.shapes))) or 'nothing else'}; flat parameters in a directory and "
                "Transformer Engine's cannot be taken apart here: load it with the script and save a `full` checkpoint"
            )

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        cut = self.cuts.get(name)
        if cut is None:
            return self._part(name, (0, 0), self.shapes[name])
        first = self._part(name, (0, 0), cut.local_shape(0))
        whole = first.new_empty(cut.shape)
        for index in range(cut.degree):
            rank = (0, index) if cut.axis is Axis.EXPERT else (index * cut.copies, 0)
            part = first if index == 0 else self._part(name, rank, cut.local_shape(index))
            for region in cut.regions(index):
                whole[region.logical] = part[region.local]
        return whole

    def _part(self, name: str, rank: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
        """The part of a tensor and expert rank; shards are runs of its elements, one behind the other."""
        tensor, expert = rank
        shards = [shard.read(name) for shard in self.parts[tensor][expert]]
        elements = shards[0] if len(shards) == 1 else torch.cat([shard.flatten() for shard in shards])
        if elements.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"{self.folder}: {name} has {elements.numel()} elements, and the model's shape is {list(shape)}; "
                "config and checkpoint do not belong together"
            )
        return elements.view(shape)


def _by_name(shard: _Shard | LocalFile, shapes: Mapping[str, tuple[int, ...]]) -> _Shard:
    return _RankFile({MODEL_KEY: shard.by_name(shapes)}) if isinstance(shard, LocalFile) else shard


def _cuts(model: Any, tensor: int, expert: int) -> Mapping[str, ParameterSplit]:
    """Return how so many tensor and expert ranks split the parameters; the stacks of `model` are narrowed."""
    cuts: dict[str, ParameterSplit] = {}
    if tensor > 1:
        length = min(PROBED, getattr(model.config, "max_position_embeddings", PROBED))
        facts = discover(model, make_job({"data.sequence_length": length}))
        cuts |= planned_splits(model, facts, Layout({Axis.TENSOR: tensor, Axis.EXPERT: expert}))
    if expert > 1:
        for name, number in expert_stacks(model).items():
            cuts |= keep_own_experts(model.get_submodule(name), name, number, expert, 0)
    return cuts


# ---- which directories and files there are


def _is_one(folder: Path) -> bool:
    whole = (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in WEIGHTS)
    return whole or _has_metadata(folder) or (folder / "0.pt").is_file() or bool(_by_rank(folder))


def _newest(folder: Path) -> Path | None:
    """The checkpoint with the highest number among those in `folder`."""
    children = [child for child in folder.iterdir() if child.is_dir() and re.fullmatch(STEPS, child.name)]
    return max((child for child in children if _is_one(child)), key=SORT_BY_LAST_INT, default=None)


def _has_metadata(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / torch_metadata.FILE).is_file()


def _parts(folder: Path) -> Parts:
    """List what each rank has written.

    Raises:
        CheckpointError: directories or files of some ranks are missing, or they are of a kind that is not read here.
    """
    if _has_metadata(folder):
        return [[[_Directory(folder)]]]
    if (folder / "0.pt").is_file():
        return _of_files(folder)
    by_rank = _by_rank(folder)
    if not by_rank:
        return [[[_Whole(folder)]]]
    lost = [path for experts in by_rank for shards in experts for path in shards if not _has_metadata(path)]
    if lost:
        raise CheckpointError(
            f"{listed(map(str, lost))} is not there, or its save has not finished; all ranks' directories are needed"
        )
    return [[[_Directory(path) for path in shards] for shards in experts] for experts in by_rank]


def _by_rank(folder: Path) -> list[list[list[Path]]]:
    """List the directories of each tensor rank and expert rank, by the names of those that are there."""
    names = [child.name for child in folder.iterdir() if child.is_dir()]
    if tensor_parts := _numbers(names, _TENSOR_PART):
        degree = max(tensor_parts)[0]
        return [[[folder / f"tp{degree}-{rank}"]] for rank in range(degree)]
    if expert_parts := _numbers(names, _EXPERT_PART):
        degree = max(expert_parts)[0]
        return [[[folder / f"ep{degree}-{rank}"] for rank in range(degree)]]
    if ranks := _numbers(names, _DOCUMENTED):
        tensor, expert = _counts(ranks)
        return [[[folder / f"tp{row}_ep{column}"] for column in range(expert)] for row in range(tensor)]
    if shards := _numbers(names, _SHARD):
        tensor, expert, count = _counts(shards)
        return [
            [[folder / f"tp{row}_ep{column}_fsdp{shard}" for shard in range(count)] for column in range(expert)]
            for row in range(tensor)
        ]
    return []


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> list[tuple[int, ...]]:
    """Return the numbers in those of `names` that are of `pattern`."""
    return [tuple(map(int, match.groups())) for name in names if (match := pattern.fullmatch(name))]


def _counts(ranks: Iterable[tuple[int, ...]]) -> list[int]:
    """Return how many ranks there are along each axis."""
    return [max(numbers) + 1 for numbers in zip(*ranks, strict=True)]


def _of_files(folder: Path) -> Parts:
    """List the files of each tensor rank; local state has shard ranks alone, the innermost."""
    first = LocalFile(folder / "0.pt")
    degrees = first.content.get(EXPORT_KEY_IDENTITY)
    if not isinstance(degrees, Mapping):
        return [[[first, *(LocalFile(folder / f"{rank}.pt") for rank in range(1, first.ranks))]]]
    layout = Layout({Axis(axis): degree for axis, degree in degrees.items() if isinstance(degree, int)})
    ranks = [layout.ranks(*state_axes(), of=tensor) for tensor in range(layout.size(Axis.TENSOR))]
    files = {rank: read_safely(folder / f"{rank}.pt") if rank else first.content for part in ranks for rank in part}
    return [[[_RankFile(files[rank]) for rank in part]] for part in ranks]
