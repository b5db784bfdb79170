"""initialize(): the same weights on every layout, drawn or read, without a full copy of the model anywhere.

Each owner of parameters has a generator seeded by (seed, qualified name); its whole tensors are drawn on the compute
device, this rank's slice is kept. Owners are handled a unit at a time - a block, or a module outside of the blocks - so
that a module whose initializer reaches into its children (GPT-2 rescales c_proj) finds them whole, and one block is the
most that exists unsharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.modules import persistent_buffers
from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.weight_files import WeightFile, open_weight_files
from shardwise.errors import ConfigError, ModelError, require_type
from shardwise.job.objects import user_code
from shardwise.job.schema import Job
from shardwise.kernels.adapters import AdapterWeight
from shardwise.model.build import constructed_buffers, constructed_parameters
from shardwise.model.facts import ModelFacts
from shardwise.model.initializers import run_initializer
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.parallel.transforms.materialize import is_blank
from shardwise.training.adapter_start import start_adapters
from shardwise.words import nearest


def initialize(model: ParallelModel, seed: int, given: Collection[str] = ()) -> None:
    """Fill every parameter and buffer: drawn from `seed`, or read from the job's `model.path`.

    Args:
        given: names of parameters and buffers that get their values afterwards.

    Raises:
        ConfigError: `model` is no ParallelModel.
        ModelError: a parameter has no values, or the directory's weights do not fit the model.
    """
    require_type(model, ParallelModel, "model", "shardwise.parallelize makes it of a module")
    with torch.no_grad():
        constructed = _constructed(model, seed, given)
        for part in model.parts:
            for names in _units(part, model.facts):
                _draw(model, part.module, names, seed, given, constructed)
        if model.plan.job.model.path is not None:
            read_hugging_face(model)
        if model.facts.has_config:
            _fill_blank_buffers(model, seed, given)
    start_adapters(model)


def _constructed(model: ParallelModel, seed: int, given: Collection[str]) -> dict[str, Tensor]:
    """Return the parameters that only transformers' constructors fill, whole and equal on all ranks.

    Each rank holds all of them until it has its slices. With a directory they are those that its files may lack.
    """
    section = model.plan.job.model
    if section.config is None and section.path is None:  # a model that the caller has built
        return {}
    names = [name for name in model.facts.constructed if name not in given]
    if section.path is not None:
        prefix = getattr(model.module, "base_model_prefix", "")
        names = [name for name in names if _is_of_head(name, prefix, model.facts)]
    if not names:
        return {}
    with seeded(seed, "constructed", torch.device("cpu")):
        return constructed_parameters(model.plan.job, names)


def draw_adapters(model: ParallelModel, seed: int) -> None:
    """Fill the adapters of a model whose other parameters have their values."""
    with torch.no_grad():
        for part in model.parts:
            for owner, module in part.module.named_modules():
                if isinstance(module, AdapterWeight):
                    _draw(model, part.module, [owner], seed, (), {})
    start_adapters(model)


def _fill_blank_buffers(model: ParallelModel, seed: int, given: Collection[str] = ()) -> None:
    """Give buffers that no initializer has filled the values of their constructors.

    Raises:
        ModelError: a constructor leaves one without values too.
    """
    buffers = [(name, buffer) for part in model.parts for name, buffer in part.module.named_buffers()]
    blanks = {name: buffer for name, buffer in buffers if name not in given and is_blank(buffer)}
    if not blanks:
        return
    with seeded(seed, "buffers", model.device):
        constructed = constructed_buffers(model.plan.job, _of_other_stages(model, blanks))
    for name, buffer in blanks.items():
        value = constructed.get(name)
        if value is not None and not value.is_meta and value.shape == buffer.shape:
            buffer.copy_(value)
        if is_blank(buffer):
            raise ModelError(
                f"buffer {name!r} has no values: neither its module's constructor nor its initializer gives it any; "
                "fill it in _init_weights() of the model's code, or register it with its values"
            )


def _of_other_stages(model: ParallelModel, buffers: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtypes of those buffers whose modules have no parameters here, so that no initializer has run."""
    absent = {name for part in model.parts if part.boundary is not None for name in part.boundary.absent}
    return {name: buffer.dtype for name, buffer in buffers.items() if name.rpartition(".")[0] in absent}


def match_weights(module: nn.Module, facts: ModelFacts, job: Job) -> tuple[HuggingFaceWeights, dict[str, str]]:
    """Return the files of the job's `model.path`, and the names in them of parameters and of the buffers they hold.

    Embeddings that the job's added tokens need have rows behind those of the files. Reads no tensor, but for names of
    one parameter that are stored several times.

    Raises:
        ModelError: the directory, one of its files, a tensor or a shape is missing or wrong.
        ConfigError: a head that no file holds would be drawn, and stay so.
    """
    weights = HuggingFaceWeights(str(job.model.path))
    prefix = getattr(module, "base_model_prefix", "")
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
    heads = {name: shape for name, shape in facts.base_shapes.items() if _is_of_head(name, prefix, facts)}
    names = weights.resolve(
        [name for name in facts.base_shapes if name not in heads],
        optional=buffers | heads,
        base_model_prefix=prefix,
        ties=facts.ties,
        model=module,
    )
    _check_heads(heads.keys() - names.keys(), facts, job)
    if job.data.added_tokens:
        weights.grow(names, facts.base_shapes | buffers, facts.vocabulary_size, job.training.seed)
    weights.check_shapes(names, facts.base_shapes | buffers)
    numbers = (name for name, parameter in module.named_parameters() if parameter.is_floating_point())
    weights.check_numbers(names, (name for name in numbers if name in names))
    return weights, names


def _check_heads(drawn: Set[str], facts: ModelFacts, job: Job) -> None:
    """Refuse to train a model with a head that has drawn weights and keeps them."""
    frozen = sorted(drawn & facts.frozen)
    if frozen and job.adapter.kind != "none":
        modules = sorted({name.rpartition(".")[0] for name in frozen})
        raise ConfigError(
            f"adapter.modules_to_save={job.adapter.modules_to_save}: {frozen[0]} is drawn anew, since {job.model.path} "
            f"lacks it, and adapters alone are trained; set it to {[*job.adapter.modules_to_save, *modules]}"
        )


def _is_of_head(name: str, prefix: str, facts: ModelFacts) -> bool:
    """Return whether a parameter is of a head that a language model lacks: it is drawn where no file holds it."""
    return facts.classifies and (not name.startswith(f"{prefix}.") or ".pooler." in name)


def read_hugging_face(model: ParallelModel) -> None:
    """Read this rank's slices of the weights in the job's `model.path`, and the buffers whole."""
    weights, names = match_weights(model.module, model.facts, model.plan.job)
    for entry in [entry for entry in model.tensor_map if entry.name in names and entry.name in model.facts.base_shapes]:
        entry.fill(partial(weights.read, names[entry.name]))
    for name, buffer in persistent_buffers(model.module):  # such as DeepSeek's routing bias
        if name in names:
            buffer.copy_(weights.read(names[name]))


def match_weight_file(path: str, module: nn.Module, facts: ModelFacts) -> WeightFile:
    """Return the file of a job's `model.weights`, whose tensors are some of the module's, by its own names.

    Raises:
        ModelError: the file is absent or broken, or a tensor is not the module's, or not numbers of its kind.
    """
    file = next(iter(open_weight_files([Path(path)]).values()))
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers()))
    for name in file.names:
        if name not in own:
            raise ModelError(f"model.weights={path!r}: {facts.family} has no {name!r}.{nearest(name, list(own))}")
        if file.shape(name) != tuple(own[name].shape):
            raise ModelError(
                f"model.weights={path!r}: {name!r} has shape {list(file.shape(name))}, that of {facts.family} "
                f"{list(own[name].shape)}"
            )
        if _kind(getattr(torch, file.dtype(name))) != _kind(own[name].dtype):
            raise ModelError(
                f"model.weights={path!r}: {name!r} is stored as {file.dtype(name)}, that of {facts.family} is "
                f"{str(own[name].dtype).removeprefix('torch.')}; save numbers, not codes of a quantized model"
            )
    return file


def _kind(dtype: torch.dtype) -> str:
    """Return what the values of a dtype are; float8 stands for codes, whose scales are elsewhere."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return "real"
    return "complex" if dtype.is_complex else "float8" if dtype.is_floating_point else "whole"


def read_weight_file(model: ParallelModel, file: WeightFile) -> None:
    """Read this rank's slices of the parameters that are in a file, and the buffers whole."""
    for name in file.names:
        if name in model.tensor_map.names:
            model.tensor_map[name].fill(partial(file.read, name))
    for part in model.parts:
        for name, buffer in part.module.named_buffers():
            if name in file.names:
                buffer.copy_(file.read(name))


def _units(part: ModelPart, facts: ModelFacts) -> list[list[str]]:
    """Return the modules that are initialized together, in module order: those of a block, others by themselves.

    A module with parametrizations is whole too: what fills it is its own initializer. One whose initializer fills
    parameters of others goes with these.
    """
    modules = [name for name, _ in part.module.named_modules()]
    whole = {block.name for block in facts.blocks}
    whole |= {name for name, module in part.module.named_modules() if name and is_parametrized(module)}
    unit_of = {name: _unit_of(name, whole) for name in modules}
    for parent, filled in facts.parent_initialized.items():
        merged = {unit_of[name] for name in (parent, *(name.rpartition(".")[0] for name in filled)) if name in unit_of}
        unit_of = {name: min(merged) if unit in merged else unit for name, unit in unit_of.items()}
    absent = part.boundary.absent if part.boundary is not None else ()
    units: dict[str, list[str]] = {}
    for name in modules:
        units.setdefault(unit_of[name], []).append(name)
    return [names for names in units.values() if any(name not in absent for name in names)]


def _unit_of(name: str, whole: Collection[str]) -> str:
    """Return the outermost of the modules `whole` that `name` is or lies in, or itself."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in whole), name)


def _draw(
    model: ParallelModel,
    root: nn.Module,
    names: Sequence[str],
    seed: int,
    given: Collection[str],
    constructed: Mapping[str, Tensor],
) -> None:
    owners = [(name, root.get_submodule(name)) for name in names]
    owned = _owned(model, root, names)
    if not owned and not any(True for _, module in owners for _ in module.buffers(recurse=False)):
        return  # an initializer that fills nothing may still reach for modules that are on other stages
    with _whole_parameters(model, owned) as wholes:
        for name, module in reversed(owners):  # children first: a parent's initializer overrides theirs
            with seeded(seed, name, model.device):
                if isinstance(module, AdapterWeight):
                    module.reset_parameters()  # the model knows nothing of it
                else:
                    with _users_initializer(model, module):
                        run_initializer(root, name)
        for key, whole in wholes.items():
            # A constructor may have swapped the parameter that was to have values for another one.
            if key in constructed and not constructed[key].is_meta:
                whole.copy_(constructed[key])
            is_given = key in given or model.plan.job.model.path is not None  # else in the directory's files
            if _has_unset(whole) and not is_given:
                owner, _ = owned[model.facts.tie_sources.get(key, key)]
                raise ModelError(
                    f"parameter {key!r} of {type(owner).__name__} has no values: its module's constructor "
                    "leaves it uninitialized; fill it there, or in a reset_parameters() method of the module"
                )
            if key in model.tensor_map.names:
                model.tensor_map[key].store(whole)


def _users_initializer(model: ParallelModel, module: nn.Module) -> AbstractContextManager[None]:
    """Name an error of an initializer of the user's with its file and line."""
    return nullcontext() if model.facts.has_config else user_code(f"the initializer of {type(module).__name__}")


def _owned(model: ParallelModel, root: nn.Module, names: Sequence[str]) -> dict[str, tuple[nn.Module, str]]:
    """Return the parameters of modules, as module and attribute by name, with those that other stages hold.

    What several modules fill has to be drawn whole on each stage, so that all draw the same.
    """
    owned = {}
    aliases = {alias for group in model.facts.ties for alias in group}
    known = [*model.facts.parameter_shapes, *aliases.difference(model.facts.parameter_shapes)]
    of_module: dict[str, list[str]] = {}
    for key in known:
        owner, _, leaf = key.rpartition(".")
        of_module.setdefault(owner, []).append(leaf)
    for name in names:
        module = root.get_submodule(name)
        own = {leaf for leaf, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
        for leaf in of_module.get(name, ()):
            if leaf in own or len(names) > 1:
                owned[f"{name}.{leaf}".lstrip(".")] = (module, leaf)
    return owned


@contextmanager
def _whole_parameters(
    model: ParallelModel, owned: dict[str, tuple[nn.Module, str]]
) -> Iterator[dict[str, nn.Parameter]]:
    """Put whole tensors, filled with NaN, in the place of `owned`; yield them by the first name of each.

    Of a tied one all names but that which counts stay on meta: transformers ties when all are drawn. A user's module
    is tied before: its names are one tensor where the first is among them.
    """
    local = {key: getattr(module, leaf, None) for key, (module, leaf) in owned.items()}
    first = {name: group[0] for group in model.facts.ties for name in group}
    drawn = {key: first.get(key, key) for key in owned if _is_drawn(model.facts, key, first.get(key, key), owned)}
    wholes = {name: _blank(model, name, model.device) for name in dict.fromkeys(drawn.values())}
    try:
        for key, (module, leaf) in owned.items():
            whole = wholes[drawn[key]] if key in drawn else _blank(model, first.get(key, key), torch.device("meta"))
            module.register_parameter(leaf, whole)
        yield wholes
    finally:
        for key, (module, leaf) in owned.items():
            module.register_parameter(leaf, local[key])


def _is_drawn(facts: ModelFacts, key: str, name: str, owned: Collection[str]) -> bool:
    """Return whether what fills the parameter `key`, whose first name is `name`, fills the tensor of its tie."""
    source = facts.tie_sources.get(name, name)
    return source in owned and (key == source or not facts.has_config)


def _blank(model: ParallelModel, name: str, device: torch.device) -> nn.Parameter:
    is_held = name in model.tensor_map.names and name not in model.facts.packed
    dtype = model.tensor_map[name].parameter.dtype if is_held else model.parameter_dtype(name)
    whole = torch.full(model.facts.parameter_shapes[name], _unset_value(dtype), dtype=dtype, device=device)
    return nn.Parameter(whole, requires_grad=dtype.is_floating_point or dtype.is_complex)


def _has_unset(whole: Tensor) -> bool:
    is_marked = whole.isnan() if whole.is_floating_point() or whole.is_complex() else whole == _unset_value(whole.dtype)
    return bool(is_marked.any()) and whole.dtype != torch.bool


def _unset_value(dtype: torch.dtype) -> float:
    """Return the value that marks what nobody has filled."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed the default generators by (seed, name) inside; they are as before outside."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # torch.manual_seed also formats the stack, for each kind of device that has not started; a model has many owners.
    manual_seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    with accelerator.generators_kept(device):
        manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def fingerprint(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Hash of names and bytes, to compare weights bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
