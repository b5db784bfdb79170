"""initialize(): the same weights on every layout, drawn or read, without a full copy of the model anywhere.

Each owner of parameters has a generator seeded by (seed, qualified name); its whole tensors are drawn on the compute
device, this rank's slice is kept. Owners are handled a unit at a time - a block, or a module outside of the blocks - so
that a module whose initializer reaches into its children (GPT-2 rescales c_proj) finds them whole, and one block is the
most that exists unsharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.state import persistent_buffers
from shardwise.errors import ModelError, require_type
from shardwise.kernels.adapters import AdapterWeight
from shardwise.model.build import constructed_buffers
from shardwise.model.facts import ModelFacts
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.parallel.transforms.materialize import is_blank
from shardwise.training.adapter_start import start_adapters

_BUFFERS_ONLY = "buffers"


def initialize(model: ParallelModel, seed: int) -> None:
    """Fill every parameter and buffer: drawn from `seed`, or read from the job's `model.path`.

    Raises:
        ConfigError: `model` is no ParallelModel.
        ModelError: a parameter has no initializer, or the directory's weights do not fit the model.
    """
    require_type(model, ParallelModel, "model", "shardwise.parallelize makes it of a module")
    with torch.no_grad():
        for part in model.parts:
            for unit in _units(part, model.facts):
                _draw(model, part.module, unit, seed)
        path = model.plan.job.model.path
        if path is not None:
            read_hugging_face(model, path)
        if model.facts.has_config:
            _fill_blank_buffers(model, seed)
    start_adapters(model)


def draw_adapters(model: ParallelModel, seed: int) -> None:
    """Fill the adapters of a model whose other parameters have their values."""
    with torch.no_grad():
        for part in model.parts:
            for owner, module in part.module.named_modules():
                if isinstance(module, AdapterWeight):
                    _draw(model, part.module, (owner, False), seed)
    start_adapters(model)


def _fill_blank_buffers(model: ParallelModel, seed: int) -> None:
    """Give buffers that no initializer has filled the values of their constructors.

    Raises:
        ModelError: a constructor leaves one without values too.
    """
    buffers = [(name, buffer) for part in model.parts for name, buffer in part.module.named_buffers()]
    blanks = {name: buffer for name, buffer in buffers if is_blank(buffer)}
    if not blanks:
        return
    with seeded(seed, "buffers", model.device):
        constructed = constructed_buffers(model.plan.job)
    for name, buffer in blanks.items():
        value = constructed.get(name)
        if value is not None and not value.is_meta and value.shape == buffer.shape:
            buffer.copy_(value)
        if is_blank(buffer):
            raise ModelError(
                f"buffer {name!r} has no values: neither its module's constructor nor its initializer gives it any; "
                "fill it in _init_weights() of the model's code, or register it with its values"
            )


def match_weights(module: nn.Module, facts: ModelFacts, path: str) -> tuple[HuggingFaceWeights, dict[str, str]]:
    """Return the files of a Hugging Face directory, and the names in them of parameters and of the buffers they hold.

    Reads no tensor, but for names of one parameter that are stored several times.

    Raises:
        ModelError: the directory, one of its files, a tensor or a shape is missing or wrong.
    """
    weights = HuggingFaceWeights(path)
    prefix = getattr(module, "base_model_prefix", "")
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
    names = weights.resolve(
        facts.base_shapes, optional=buffers, base_model_prefix=prefix, ties=facts.ties, model=module
    )
    weights.check_shapes(names, facts.base_shapes | buffers)
    return weights, names


def read_hugging_face(model: ParallelModel, path: str) -> None:
    """Read this rank's slices of a Hugging Face directory's weights, and the buffers whole."""
    weights, names = match_weights(model.module, model.facts, path)
    for entry in [entry for entry in model.tensor_map if entry.name in model.facts.base_shapes]:
        for region in entry.regions:
            if entry.local[region.local].numel():
                entry.local[region.local].copy_(weights.read(names[entry.name], region.logical))
    for name, buffer in persistent_buffers(model.module):  # such as DeepSeek's routing bias
        if name in names:
            buffer.copy_(weights.read(names[name]))


def _units(part: ModelPart, facts: ModelFacts) -> Iterator[tuple[str, bool]]:
    """Yield (qualified name, whole subtree?) of what is initialized together: blocks whole, others by themselves.

    A module with parametrizations is whole too: what fills it is its own initializer.
    """
    blocks = {block.name for block in facts.blocks}
    blocks |= {name for name, module in part.module.named_modules() if name and is_parametrized(module)}
    inside = tuple(f"{name}." for name in blocks)
    absent = part.boundary.absent if part.boundary is not None else ()
    for name, _ in part.module.named_modules():
        if name in absent:
            continue
        if name in blocks and not name.startswith(inside):
            yield name, True
        elif not name.startswith(inside) or not inside:
            yield name, False


def _draw(model: ParallelModel, root: nn.Module, unit: tuple[str, bool], seed: int) -> None:
    name, subtree = unit
    module = root.get_submodule(name)
    owners = list(module.named_modules(prefix=name)) if subtree else [(name, module)]
    owned = {
        f"{owner}.{leaf}".lstrip("."): (part, leaf)
        for owner, part in owners
        for leaf, _ in part.named_parameters(recurse=False, remove_duplicate=False)
    }
    if not owned and not any(True for _ in module.buffers(recurse=False)):
        return  # T5's own initializer reaches for embeddings, which come by themselves and may be on other stages
    with _whole_parameters(model, owned) as wholes:
        unset = {key: whole for key, whole in wholes.items() if not whole.is_meta}
        for owner, part in reversed(owners):  # children first: a parent's initializer overrides theirs
            with seeded(seed, owner, model.device):
                run_initializer(root, part)
        for key, whole in unset.items():
            if torch.isnan(whole).any() and model.plan.job.model.path is None:  # else it is in the directory's files
                raise ModelError(
                    f"parameter {key!r} of {type(owned[key][0]).__name__} has no initializer; give its module a "
                    "reset_parameters() method that fills it"
                )
            model.tensor_map[key].store(whole)


@contextmanager
def _whole_parameters(
    model: ParallelModel, owned: dict[str, tuple[nn.Module, str]]
) -> Iterator[dict[str, nn.Parameter]]:
    """Put whole tensors, filled with NaN, in the place of `owned`; the second name of a tied one stays on meta."""
    local = {key: module.get_parameter(leaf) for key, (module, leaf) in owned.items()}
    wholes = {key: _blank(model.tensor_map[key], key, model.device) for key in owned}
    try:
        for key, (module, leaf) in owned.items():
            module.register_parameter(leaf, wholes[key])
        yield wholes
    finally:
        for key, (module, leaf) in owned.items():
            module.register_parameter(leaf, local[key])


def _blank(entry: ParameterEntry, key: str, device: torch.device) -> nn.Parameter:
    on = device if key == entry.name else torch.device("meta")
    return nn.Parameter(torch.full(entry.shape, float("nan"), dtype=entry.parameter.dtype, device=on))


def run_initializer(model: nn.Module, module: nn.Module) -> None:
    """Run the model's own `_init_weights` (transformers' convention), else the module's `reset_parameters`.

    `_reset_parameters` is what torch calls it in `nn.MultiheadAttention` and `nn.Transformer`. Of adapters the model
    knows nothing.
    """
    init_weights = getattr(model, "_init_weights", None)
    if callable(init_weights) and not isinstance(module, AdapterWeight):
        init_weights(module)
        return
    names = ("reset_parameters", "_reset_parameters")
    reset = next((method for name in names if callable(method := getattr(module, name, None))), None)
    if reset is not None and is_parametrized(module):
        _reset_parametrized(module, reset)
    elif reset is not None:
        reset()


def _reset_parametrized(module: nn.Module, reset: Callable[[], None]) -> None:
    """Call `reset`, which fills the tensors that parametrizations compute, and give these to the parametrizations.

    One without `right_inverse` takes them as its original, as when it is registered on a module that has values.
    """
    lists: Any = module.parametrizations
    with cached():
        reset()
        values = {name: getattr(module, name) for name in lists}
    for name, value in values.items():
        if all(hasattr(parametrization, "right_inverse") for parametrization in lists[name]):
            setattr(module, name, value)
        else:
            lists[name].original.copy_(value)


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed the default generators by (seed, name) inside; they are as before outside."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    devices = [device] if device.type == "cuda" else []
    # torch.manual_seed also formats the stack, for each kind of device that has not started; a model has many owners.
    manual_seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    with torch.random.fork_rng(devices=devices):
        manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def fingerprint(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Hash of names and bytes, to compare weights bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
