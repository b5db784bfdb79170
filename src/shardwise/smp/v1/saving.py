"""`smp.save`, `load`, `save_checkpoint` and `resume_from_checkpoint`, with SMP's file names.

Partial files are a rank's own: `<f>_<pp>_<tp>`, and `<f>_<pp>_<tp>_<rdp>` where ranks of one stage differ. A checkpoint
is `<path>/<tag>_partial/` (`model_*.pt`, `optimizer_*.pt`, `fp16_states_*.pt`, `user_content.pt`, `partition.pt`) or,
full, the file `<path>/<tag>` with `<path>/user_content_<tag>`; the text file `<path>/newest` names the last one. Of
tensor ranks there are `cuts_*.pt` too, by which parts are put together without the model. Under sharded data
parallelism there are `model_0.pt` and an `optimizer_<i>.pt` for each shard, whose `fp32_flat_groups` hold
ceil(numel/degree) elements of every parameter in turn. `safe_reading` says what is read.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis
from shardwise.smp.safe_reading import read_safely
from shardwise.smp.v1.messages import barrier
from shardwise.smp.v1.model import DistributedModel
from shardwise.smp.v1.optimizer_binding import OptimizerBinding
from shardwise.smp.v1.own_optimizer import OwnOptimizer, ParameterNumbers
from shardwise.smp.v1.replacement import translate_in, translate_out
from shardwise.smp.v1.safetensors_files import load_safetensors
from shardwise.smp.v1.session import state
from shardwise.smp.v1.sharded_data_parallel_checkpoint import whole_of_parts
from shardwise.smp.v1.weights import PARTIAL, marked_partial

NEWEST, SUFFIX, USER = "newest", "_partial", "user_content"
PARTITION, CUTS = "partition.pt", "cuts"
STEPS = "steps"  # by whose number dropout goes on


def save(
    obj: Any, f: str, partial: bool = True, pickle_module: Any = None, pickle_protocol: int = 2, v3: bool = False
) -> None:
    """`torch.save` to a name of this rank's own (`partial`), or once for all.

    Args:
        obj: what to save; tensors keep their devices.
        f: path, to which ranks are appended if `partial`.
        partial: whether each rank of the model saves its own.
        pickle_module: accepted; torch's own is used.
        pickle_protocol: as `torch.save`.
        v3: append the reduced data rank too.
    """
    if partial:
        torch.save(obj, f"{f}{_ranks(v3)}", pickle_protocol=pickle_protocol)
    elif state.layout.smp("world")[0] == 0:
        torch.save(obj, f, pickle_protocol=pickle_protocol)


def load(
    f: str, map_location: Any = None, pickle_module: Any = None, partial: bool = True, back_compat: bool = False,
    **pickle_load_args: Any,
) -> Any:  # fmt: skip
    """Load what `save` wrote: this rank's own file if `partial`, of whichever of SMP's names is there.

    Raises:
        CheckpointError: there is no such file, or it holds more than tensors and plain values.
    """
    if not partial:
        return read_safely(Path(f), map_location)
    names = [f"{f}{_ranks(True)}", f"{f}{_ranks(False)}", f"{f}_{state.layout.smp('mp')[0]}"]
    name = next((name for name in names if os.path.exists(name)), None)
    if name is None:
        raise CheckpointError(f"smp.load: none of {', '.join(names)} is there; it was saved at other degrees, or whole")
    return read_safely(Path(name), map_location)


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Write model, optimizer and what the user adds. Collective: every rank calls it.

    Args:
        path: directory of all checkpoints.
        tag: name of this one.
        partial: each rank its part, to go on at the same degrees; else the whole model, for any.
        model, optimizer: the distributed ones; left out, the script's.
        user_content: plain values and tensors.
        translate_if_full: write a replaced Hugging Face model under its own names.
        num_kept_partial_checkpoints: remove older partial ones.

    Raises:
        CheckpointError: the optimizer is not distributed, or an object of the script's own that does not save what it
            keeps.
    """
    directory, model, bound = Path(path), model or state.model, _binding(optimizer)
    if partial and bound is not None and isinstance(bound.public, OwnOptimizer):
        bound.public.check_keeps_state()
    directory.mkdir(parents=True, exist_ok=True)
    content = _user_content(user_content, bound)
    if partial:
        folder = directory / f"{tag}{SUFFIX}"
        folder.mkdir(exist_ok=True)
        _save_parts(folder, model, bound)
        if _leads():
            torch.save(content, folder / f"{USER}.pt")
        name = folder.name
    else:
        weights: Mapping[str, Any] = model._smp.weights.whole("smp.save_checkpoint")
        weights = translate_out(model.get_module(), weights) if translate_if_full else weights
        if _leads():
            torch.save(dict(weights), directory / tag)
            torch.save(content, directory / f"{USER}_{tag}")
        name = tag
    barrier()
    if _leads():
        (directory / NEWEST).write_text(name)
        if partial and num_kept_partial_checkpoints:
            _prune(directory, num_kept_partial_checkpoints, name)
    barrier()


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
) -> Any:
    """Load the script's model, and with `partial` its optimizer; before the first step they wait for it.

    Args:
        path: directory of all checkpoints.
        tag: which one; left out, the newest.
        partial: whether it is one of parts; a full one restores the model alone.
        strict: names have to be the model's.
        load_optimizer: of a partial one.
        load_sharded_optimizer_state: of a partial one whose optimizer state is sharded.
        translate_function: applied to a full one's weights.

    Returns:
        What the user added, as it was; an empty dict where there is nothing.

    Raises:
        CheckpointError: it is not there, of other degrees, or of another model.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; give the one that save_checkpoint wrote to")
    tag = tag or _newest(directory)
    model = state.model
    if not isinstance(model, DistributedModel):
        raise CheckpointError("smp.resume_from_checkpoint needs the model; make smp.DistributedModel first")
    if partial:
        folder = directory / (tag if tag.endswith(SUFFIX) else f"{tag}{SUFFIX}")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not there; give the tag of a partial checkpoint, or partial=False")
        is_sharded = state.layout.size(Axis.SHARD) > 1
        _load_parts(folder, strict, load_optimizer and (load_sharded_optimizer_state or not is_sharded))
        file = folder / f"{USER}.pt"
    else:
        if tag.endswith(SUFFIX) and (directory / tag).is_dir():
            raise CheckpointError(f"{directory / tag} is a partial checkpoint; pass partial=True, or a full one's tag")
        tied_once = load_safetensors(directory, tag)
        whole: Any = tied_once or read_safely(directory / tag)
        weights = whole.get("model", whole) if isinstance(whole, Mapping) else whole
        weights = translate_function(weights) if translate_function else translate_in(model.get_module(), weights)
        weights = model._smp.weights.with_ties(weights) if tied_once else weights
        model.load_state_dict({**weights, PARTIAL: False}, strict=strict)
        file = directory / f"{USER}_{tag}"
    content = read_safely(file) if file.exists() else {}
    return {} if content is None else content


# ---- parts


def _save_parts(folder: Path, model: DistributedModel, bound: OptimizerBinding | None) -> None:
    degree = state.layout.size(Axis.SHARD)
    first = state.layout.index(Axis.REPLICA) == 0
    if degree > 1:
        _save_shards(folder, model, bound, first)
    elif first:
        torch.save(marked_partial(model._smp.weights.local()), folder / f"model{_ranks(False)}.pt")
        if state.layout.size(Axis.TENSOR) > 1:
            torch.save(model._smp.weights.cuts(), folder / f"{CUTS}{_ranks(False)}.pt")
        if bound is not None:
            optimizer_state = bound.part()
            torch.save(optimizer_state, folder / f"optimizer{_ranks(False)}.pt")
            if bound.scaler is not None:
                torch.save({"scaler": optimizer_state["scaler"]}, folder / f"fp16_states{_ranks(False)}.pt")
    if _leads():
        torch.save({**_degrees(), STEPS: state.step_count}, folder / PARTITION)


def _save_shards(folder: Path, model: DistributedModel, bound: OptimizerBinding | None, first: bool) -> None:
    """SMP's files of sharded data parallelism, each shard's exact state beside its flat groups."""
    degree, index = state.layout.size(Axis.SHARD), state.layout.index(Axis.SHARD)
    weights = model._smp.weights.whole("smp.save_checkpoint")
    suffix = _split_suffix()
    if first and index == 0:
        torch.save({"module": weights}, folder / f"model_0{suffix}.pt")
    if not first:
        return
    shard: dict[str, Any] = {"partition_count": degree, "weights": marked_partial(model._smp.weights.local())}
    if bound is not None:
        shard["fp32_flat_groups"] = _flat_groups(bound, weights, degree, index)
        shard["optimizer"] = bound.part()
    torch.save(shard, folder / f"optimizer_{index}{suffix}.pt")


def _flat_groups(bound: OptimizerBinding, weights: Mapping[str, Tensor], degree: int, index: int) -> list[Tensor]:
    return [torch.cat([_slice(weights[name], degree, index) for name in names]) for names in _names_of_groups(bound)]


def _names_of_groups(bound: OptimizerBinding) -> Iterator[Sequence[str]]:
    first = 0
    for count in bound.parameters.group_sizes:
        yield bound.parameters.order[first : first + count]
        first += count


def _slice(whole: Tensor, degree: int, index: int) -> Tensor:
    """Elements index*c to (index+1)*c of the flat tensor, c = ceil(numel/degree), zeros behind its end."""
    size = math.ceil(whole.numel() / degree)
    flat = whole.flatten().float()[index * size : (index + 1) * size]
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _load_parts(folder: Path, strict: bool, with_optimizer: bool) -> None:
    model, bound = state.model, _binding(None)
    assert isinstance(model, DistributedModel)
    if not (folder / PARTITION).is_file():  # which Amazon's library does not write
        weights = model._smp.weights.with_ties(whole_of_parts(folder))
        model.load_state_dict({**weights, PARTIAL: False}, strict=strict)
        if _leads():
            print(f"note: {folder} is not of this library: its weights are loaded, and the optimizer starts anew.",
                  file=sys.stderr)  # fmt: skip
        return
    saved = read_safely(folder / PARTITION)
    steps = saved.pop(STEPS, state.step_count)
    if saved != _degrees():
        changed = ", ".join(f"{key} {saved.get(key)} there and {value} here" for key, value in _degrees().items()
                            if saved.get(key) != value)  # fmt: skip
        raise CheckpointError(f"{folder} is of other degrees: {changed}; use the same, or a full checkpoint")
    state.step_count = steps
    if state.layout.size(Axis.SHARD) > 1:
        shard = read_safely(folder / f"optimizer_{state.layout.index(Axis.SHARD)}{_split_suffix()}.pt")
        weights, optimizer = shard["weights"], shard.get("optimizer")
    else:
        weights = read_safely(folder / f"model{_ranks(False)}.pt")
        file = folder / f"optimizer{_ranks(False)}.pt"
        optimizer = read_safely(file) if file.exists() else None
    model.load_state_dict(weights, strict=strict)
    if with_optimizer and optimizer is not None:
        if bound is not None:
            bound.load(optimizer)
        elif _leads():
            print(f"note: {folder} holds an optimizer's state, which is not loaded: the script has made no "
                  "smp.DistributedOptimizer yet. Make it before this call, or pass load_optimizer=False.",
                  file=sys.stderr)  # fmt: skip


def _degrees() -> dict[str, int]:
    """Return the degrees at which a partial checkpoint can be loaded."""
    layout = state.layout
    return {str(axis): layout.size(axis) for axis in (Axis.PIPELINE, Axis.TENSOR, Axis.SHARD)}


def _binding(optimizer: Any) -> OptimizerBinding | None:
    if isinstance(optimizer, ParameterNumbers):
        return optimizer._smp
    if isinstance(state.optimizer, OptimizerBinding):
        return state.optimizer
    if optimizer is not None:
        raise CheckpointError(
            f"smp.save_checkpoint got {type(optimizer).__name__}, of which no smp.DistributedOptimizer was made: its "
            "state would be lost; wrap it before the first step"
        )
    return None


def _user_content(content: Any, bound: OptimizerBinding | None) -> Any:
    """With the names and shapes that scripts of sharded data parallelism look for, in the order of the flat groups."""
    model = state.model
    is_plain = content is None or isinstance(content, dict)
    if state.layout.size(Axis.SHARD) == 1 or not isinstance(model, DistributedModel) or not is_plain:
        return {} if content is None else content
    parallel = model._smp.weights.parallel
    shapes = dict(parallel.facts.parameter_shapes) if parallel is not None else {}
    of_groups = [shapes] if bound is None else [_chosen(shapes, names) for names in _names_of_groups(bound)]
    added = {"buffer_names": [name for name, _ in model.get_module().named_buffers()], "param_shapes": of_groups}
    return added | (content or {})


def _chosen(shapes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: shapes[name] for name in names}


# ---- names


def _ranks(with_data: bool) -> str:
    ranks = [state.layout.smp(letters)[0] for letters in ("pp", "tp", *(("rdp",) if with_data else ()))]
    return "".join(f"_{rank}" for rank in ranks)


def _split_suffix() -> str:
    """Return the suffix of shard files: nothing, the tensor rank, or stage and tensor rank (beside sharded state)."""
    if state.layout.size(Axis.PIPELINE) > 1:
        return _ranks(False)
    return "" if state.layout.size(Axis.TENSOR) == 1 else f"_{state.layout.index(Axis.TENSOR)}"


def _leads() -> bool:
    return state.layout.rank == 0


def _newest(directory: Path) -> str:
    file = directory / NEWEST
    if not file.is_file():
        raise CheckpointError(f"{directory} has no file {NEWEST!r}; give a tag")
    return file.read_text().strip()


def _prune(directory: Path, kept: int, newest: str) -> None:
    """Remove all but `kept` partial checkpoints; one that is written again is as new as its last file."""

    def written(folder: Path) -> tuple[bool, int]:
        return folder.name == newest, max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)

    for folder in sorted(directory.glob(f"*{SUFFIX}"), key=written)[:-kept]:
        shutil.rmtree(folder)
