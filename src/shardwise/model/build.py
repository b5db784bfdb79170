"""Builds the model of a job on the meta device: shapes and structure without a byte of weights.

Three sources: a Hugging Face directory or config (the embedded default among them), built by transformers itself, and
a user's own factory. Parameters are always on meta, so no rank ever holds a model it is going to shard. Buffers
of a Hugging Face model are on meta too: transformers' initializer fills them again, and `constructed_buffers` has the
values of those that it leaves out. Buffers of a user's module are real (`construct`). Nothing here contacts a hub.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import meta_device_safe_creation_ops

from shardwise.errors import ConfigError, MissingTokenError, ModelError, ShardwiseError
from shardwise.job.objects import in_parentheses, load_object, named_error, raised_at
from shardwise.job.schema import Job, ModelSection
from shardwise.job.tasks import TASKS
from shardwise.model.added_tokens import grow_vocabulary
from shardwise.model.construct import (
    ConstructedModule,
    NotAModule,
    check_tensors,
    construct,
    parameters_on_meta,
    uninitialized_is_nan,
)
from shardwise.model.default import default_config
from shardwise.model.experts import LOOPED
from shardwise.model.initializers import run_initializer
from shardwise.model.layer_configs import has_attribute
from shardwise.model.registry import family_of
from shardwise.model.replacements import fuse_activations, mend_batch_norms, replace_attention
from shardwise.model.routers import ADDS_LOSS
from shardwise.words import nearest

BUILT = ("eager", "sdpa")  # attention that transformers' models have themselves
START = "decoder_start_token_id"
OWN_WAY = (
    "for another task let model.factory name a function of yours that returns the model, model.loss one of "
    "(output, batch) and data.factory your samples"
)
DROPOUT_FIELD = re.compile(r"dropout|pdrop")
# Dropout of heads that language models do not have, and layer drop, which drops no elements.
OTHER_DROPOUT = re.compile(r"classif|summary|pooler|^cls|^qa|layerdrop|^drop_path")


def build_model(job: Job) -> nn.Module:
    """Return the model of `job` in train mode, parameters on the meta device (fp32), key-value cache off."""
    return prepare_for_training(
        construct_user_module(job).module if job.model.factory else _build_hugging_face(job, load_config(job))
    )


def prepare_for_training(model: nn.Module) -> nn.Module:
    """Put a model into train mode, with its activations fused and its key-value cache off; the same model."""
    fuse_activations(model)
    mend_batch_norms(model)
    model.train()
    for module in model.modules():  # an encoder-decoder's stacks have configs of their own
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config.use_cache = False
    return model


def load_config(job: Job, key: str = "model.config") -> PreTrainedConfig:
    """Return the config that the job names, with the job's dropout and added tokens; not for `model.factory`.

    `key` is what messages call the path of a config.
    """
    section = job.model
    if section.path is not None and isinstance(section.config, dict):
        config = _config_on_top(section, job)
    elif section.path is not None:
        config = _read_config(Path(section.path), "model.path", section, directory_only=True)
    elif isinstance(section.config, str):
        config = _read_config(Path(section.config), key, section)
    elif section.config is not None:
        config = _config_from_dict(copy.deepcopy(section.config), job)
    else:
        config = default_config(job)
    dropout = section.dropout
    if dropout is not None:
        _guarded(f"model.dropout={dropout}", lambda: _set_dropout(config, dropout))
    _check_layer_drop(config)
    if section.labels:
        config.id2label = dict(enumerate(section.labels))
        config.label2id = {label: number for number, label in enumerate(section.labels)}
    if TASKS[section.task].classifies:
        _check_classes(config)
    grow_vocabulary(config, job)
    if job.precision.compute == "fp64" and config._experts_implementation is None:
        config._experts_implementation = LOOPED  # transformers' own choice, grouped products, does not compute in it
    if section.task == "causal_lm" and type(config) in MODEL_FOR_MASKED_LM_MAPPING and hasattr(config, "is_decoder"):
        config.is_decoder = True  # an encoder such as BERT would see the labels: its attention is not causal otherwise
    return config


def _check_classes(config: PreTrainedConfig) -> None:
    """Refuse heads that are no classifier of one class among several: the cross-entropy of one class is always 0."""
    problem: Any = getattr(config, "problem_type", None)
    if problem not in (None, "single_label_classification"):
        raise ConfigError(
            f"problem_type={problem!r} of the model's config: model.task trains one class of each sample or token; "
            "leave it out, or bring the model as model.factory with a model.loss"
        )
    count: Any = config.num_labels
    if isinstance(count, int) and count < 2:
        raise ConfigError(
            f"num_labels={count} of the model's config: two classes at least are told apart; give their "
            "names as model.labels, or bring a model of one number as model.factory with a model.loss"
        )


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _read_config(path: Path, key: str, section: ModelSection, directory_only: bool = False) -> PreTrainedConfig:
    """Return the config of a directory or a json file; every way it can be missing or broken has its own message."""
    where = f"{key}={str(path)!r}"
    if not path.exists():
        raise ModelError(f"{where} does not exist (models are read from disk only, never from a hub)")
    if directory_only and not path.is_dir():
        raise ModelError(f"{where} is not a directory; give the directory that holds config.json and the weights")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ModelError(
            f"{where} holds no config.json; it is not a Hugging Face model directory, and `shardwise export` makes one "
            "of a checkpoint"
        )
    _check_config_file(file, where, section)
    source = path if path.is_dir() else file.parent if file.name == "config.json" else file
    return _guarded(
        where,
        lambda: AutoConfig.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=section.trust_remote_code
        ),
    )


def _check_config_file(file: Path, where: str, section: ModelSection) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {file} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{where}: {file} holds a {type(content).__name__}, not a JSON object")
    remote = _remote_code(content, TASKS[section.task].auto_class)
    if any("--" in reference for reference in remote):
        raise ModelError(
            f"{where}: its code ({', '.join(remote)}) lives on a hub; put the .py files into the directory"
        )
    if content.get("model_type") in CONFIG_MAPPING:
        return
    if remote and not section.trust_remote_code:
        raise ModelError(
            f"{where} brings its own code ({', '.join(remote)}) and model.trust_remote_code=False; read the code, then "
            "set model.trust_remote_code=True"
        )
    if not remote:
        _check_model_type(content.get("model_type"), where)


def _remote_code(content: dict[str, Any], auto_class: str) -> list[str]:
    auto_map = content.get("auto_map") or {}
    return [auto_map[name] for name in ("AutoConfig", auto_class) if isinstance(auto_map.get(name), str)]


def _check_model_type(model_type: object, where: str) -> None:
    if model_type is None:
        raise ModelError(f"{where} has no model_type, e.g. 'gpt_neox' or 'llama'")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{where}: transformers does not know model_type={model_type!r}; a model_type that it knows is needed, "
            f"with its sizes.{nearest(str(model_type), CONFIG_MAPPING)}"
        )


def _config_from_dict(values: dict[str, Any], job: Job) -> PreTrainedConfig:
    """Return a config of the user's own values: unknown keys refused, vocabulary and special tokens made to fit."""
    model_type = values.pop("model_type", None)
    _check_model_type(model_type, "model.config")
    config_class = CONFIG_MAPPING[model_type]
    where = f"model.config (model_type={model_type!r})"
    # Some have no defaults without the configs of their parts.
    parts = config_class.sub_configs if getattr(config_class, "has_no_defaults_at_init", False) else ()
    needed = {name: copy.deepcopy(values[name]) for name in parts if name in values}
    defaults = _guarded(where, lambda: config_class(**needed))
    if "vocab_size" not in values and _trains_tokenizer(job):
        values["vocab_size"] = job.data.vocabulary_size
    size = values.get("vocab_size", getattr(defaults, "vocab_size", None))
    for key in [key for key in vars(defaults) if key.endswith("_token_id") and key not in values]:
        token = getattr(defaults, key)
        if isinstance(token, int) and isinstance(size, int) and token >= size:
            values[key] = None  # the family's own tokenizer has this token, a smaller vocabulary does not
    config = _guarded(where, lambda: config_class(**values))
    check_head(config, job.model)  # first: who takes another kind of model needs its word more than a key's
    unknown = [
        key
        for key in values
        if has_attribute(config, key) and not has_attribute(defaults, key) and not _is_read(key, config)
    ]
    if unknown:
        names = {name for name in {*defaults.to_dict(), *defaults.attribute_map} if not name.startswith("_")}
        raise ConfigError(f"{where} has no {unknown[0]!r}.{nearest(unknown[0], names)}")
    return config


def _config_on_top(section: ModelSection, job: Job) -> PreTrainedConfig:
    """Return the config of `model.path` with the fields of `model.config` on top; these alone without a directory."""
    path, fields = Path(str(section.path)), copy.deepcopy(section.config)
    assert isinstance(fields, dict)
    if not path.exists():
        return _config_from_dict(fields, job)
    own = _read_config(path, "model.path", section, directory_only=True)
    if fields.get("model_type", own.model_type) != own.model_type:
        own = own.get_text_config()  # of a model of text and pictures
    model_type = fields.pop("model_type", own.model_type)
    if model_type != own.model_type:
        raise ConfigError(
            f"model.config model_type={model_type!r}: model.path={section.path!r} holds a "
            f"{own.model_type!r} model; leave model.config out, or use another directory"
        )
    values = own.to_dict()
    for name, value in fields.items():
        inner = values.get(name)
        values[name] = inner | value if isinstance(inner, dict) and isinstance(value, dict) else value
    unknown = [name for name in fields if not has_attribute(own, name) and not _is_read(name, own)]
    if unknown:
        raise ConfigError(
            f"model.config (model_type={own.model_type!r}) has no {unknown[0]!r}.{nearest(unknown[0], own.to_dict())}"
        )
    return _guarded(f"model.config beside model.path={section.path!r}", lambda: type(own).from_dict(values))


def _is_read(key: str, config: PreTrainedConfig) -> bool:
    """Tell whether the model's source mentions `key`; transformers keeps unknown keys and never looks at them."""
    mappings = [task.types() for task in TASKS.values()]
    models = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    heads = chain.from_iterable(model if isinstance(model, tuple) else (model,) for model in models)
    sources = {inspect.getsource(sys.modules[source_class.__module__]) for source_class in (type(config), *heads)}
    return any(re.search(rf"\b{re.escape(key)}\b", source) for source in sources)


def _trains_tokenizer(job: Job) -> bool:
    reads_text = TASKS[job.model.task].samples == "text" and job.data.factory is None
    return reads_text and job.data.tokenizer is None and job.data.format not in ("tokens", "factory")


def _set_dropout(config: PreTrainedConfig, probability: float) -> None:
    if not _assign_dropout(config, probability) and probability > 0:
        raise ConfigError(
            f"model.dropout={probability}: the config of {config.model_type!r} has no dropout probability; leave "
            "model.dropout unset"
        )


def _assign_dropout(config: PreTrainedConfig, probability: float) -> list[str]:
    """Set every dropout probability of `config` and of the configs inside it; return their names."""
    fields = list(_dropout_fields(config))
    for part, name, value in fields:
        setattr(part, name, 0 if probability == 0 and isinstance(value, int) else probability)
    return [name for _, name, _ in fields]


def has_dropout(config: PreTrainedConfig) -> bool:
    """Return whether a dropout probability of `config`, or of a config inside it, is not 0."""
    return any(value for _, _, value in _dropout_fields(config))


def _dropout_fields(config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str, float]]:
    """Yield (config, name, value) of every dropout probability of `config` and of the configs inside it."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _dropout_fields(value)
        elif DROPOUT_FIELD.search(name) and not OTHER_DROPOUT.search(name) and _is_number(value):
            yield config, name, value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_layer_drop(config: PreTrainedConfig) -> None:
    for name, value in vars(config).items():
        if name.endswith("layerdrop") and _is_number(value) and value > 0:
            raise ModelError(
                f"{name}={value} in the config of {config.model_type!r} skips layers at random, and each rank would "
                "skip others; set it to 0"
            )


def _build_hugging_face(job: Job, config: PreTrainedConfig) -> PreTrainedModel:
    section = job.model
    check_head(config, section)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"model.path={section.path!r} holds quantized weights; training needs the unquantized model")
    adds_loss = getattr(config, "output_router_logits", False)
    if adds_loss:  # the loss is taken here, over the whole step; the model's own would be of one microbatch
        config.output_router_logits = False
    model = _from_config(config, section, _on_meta)
    if TASKS[section.task].labels == "decoder":
        _check_shift(model)
    setattr(model, ADDS_LOSS, bool(adds_loss))
    replace_attention(model)
    if settle := family_of(config.model_type).settle:
        settle(model, job.data.sequence_length)
    model.config.architectures = [type(model).__name__]
    path = section.path
    if path is not None and model.can_generate() and (Path(path) / "generation_config.json").exists():
        model.generation_config = _guarded(
            f"model.path={path!r}: generation_config.json",
            lambda: GenerationConfig.from_pretrained(path, local_files_only=True),
        )
    return model


def _check_shift(model: Any) -> None:
    """Refuse a model that cannot make its decoder's inputs of labels, most often since its config has no padding."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    try:
        if shift is not None:
            shift(torch.tensor([[0, 1]]))
    except Exception as error:  # transformers: each type has its own rule
        reason = " ".join(str(error).split())
        raise MissingTokenError(
            f"a {model.config.model_type!r} model cannot make its decoder's inputs of labels: {reason}; set "
            "pad_token_id in its config"
        ) from error


def constructed_buffers(job: Job, initialized: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the buffers of a Hugging Face model as its constructors make them, on the CPU.

    There are none of a `model.factory`, whose own buffers are real. Memory that a constructor leaves
    uninitialized holds NaN.

    Args:
        initialized: names and dtypes of buffers that the model's initializer is to fill besides. What a constructor
            makes is rounded to its own dtype.

    Raises:
        ModelError: a constructor needs values of parameters.
    """
    if job.model.factory:
        return {}
    model = _from_config(load_config(job), job.model, _with_real_buffers)
    for name, dtype in initialized.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_buffer(name).to(dtype))
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in initialized):
        run_initializer(model, owner)
    return dict(model.named_buffers())


def constructed_parameters(job: Job, names: Collection[str]) -> dict[str, Tensor]:
    """Return parameters of a Hugging Face model as transformers makes them, whole, on the CPU, in fp32.

    All others stay without memory. Memory that a constructor leaves uninitialized holds NaN.

    Args:
        names: of the parameters; those of ties by their first name.
    """
    order: dict[int, tuple[int, nn.Parameter]] = {}  # by id: its number, and itself, or another could have its id
    config, section = load_config(job), job.model
    known = _from_config(config, section, partial(_with_real_buffers, registered=partial(_note_order, order)))
    wanted = {id(parameter) for name, parameter in known.named_parameters() if name in names}
    if any(".parametrizations." in name for name in names):  # computed from parameters that modules had before
        wanted |= order.keys() - {id(parameter) for parameter in known.parameters()}
    numbers = {order[parameter][0] for parameter in wanted}
    model = _from_config(config, section, partial(_with_real_buffers, real=numbers))
    return {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}


def _note_order(order: dict[int, tuple[int, nn.Parameter]], given: Tensor, parameter: nn.Parameter) -> None:
    order.setdefault(id(parameter), (len(order), parameter))


@contextmanager
def _on_meta() -> Iterator[None]:
    with torch.device("meta"), meta_device_safe_creation_ops():
        yield


@contextmanager
def _with_real_buffers(**parameters: Any) -> Iterator[None]:
    """Inside, constructors make values of buffers alone; torch fills uninitialized memory with NaN.

    Args:
        parameters: as of `parameters_on_meta`.
    """
    with uninitialized_is_nan(), parameters_on_meta(**parameters):
        yield


def check_head(config: PreTrainedConfig, section: ModelSection) -> None:
    """Refuse a config whose type has no head for the task, or lacks what the head needs.

    Raises:
        ModelError: it is refused.
        MissingTokenError: it lacks a token.
    """
    task = TASKS[section.task]
    if refusal := family_of(str(config.model_type)).refusal:
        raise ModelError(f"model_type {config.model_type!r} {refusal}; use a model of another type")
    if type(config) in task.types() or task.auto_class in (getattr(config, "auto_map", None) or {}):
        if task.labels == "decoder":
            _check_decoder(config, section)
        if task.samples == "images":
            _check_images(config, section)
        is_decoder = type(config) not in MODEL_FOR_MASKED_LM_MAPPING
        padding = getattr(_text_config(config, section), "pad_token_id", None)
        if section.task == "sequence_classification" and is_decoder and padding is None:
            raise MissingTokenError(
                f"the config of {config.model_type!r} has no pad_token_id, by which the last token of a sample is "
                "found; set it to the token with which the samples are padded"
            )
        return
    tasks = tasks_of(config)
    fix = (
        f"use model.task={' or '.join(map(repr, tasks))}"
        if tasks
        else f"it has none of those that there are ({', '.join(TASKS)}); {OWN_WAY}"
    )
    raise ModelError(f"model.task={section.task!r}: model_type {config.model_type!r} has no such head; {fix}")


def _text_config(config: PreTrainedConfig, section: ModelSection) -> PreTrainedConfig:
    try:
        return config.get_text_config()
    except ValueError as error:  # of MusicGen's, which writes sound
        raise ModelError(
            f"model.task={section.task!r}: model_type {config.model_type!r} has several configs of text, and is no "
            f"language model; {OWN_WAY}"
        ) from error


def _check_images(config: PreTrainedConfig, section: ModelSection) -> None:
    """Refuse a model that takes other things than images, or more."""
    arguments = TASKS[section.task].arguments(config)
    if arguments and ("pixel_values" not in arguments or "input_ids" in arguments):
        raise ModelError(
            f"model.task={section.task!r}: model_type {config.model_type!r} takes input_ids, which are not made of "
            f"images here; {OWN_WAY}"
        )


def _check_decoder(config: PreTrainedConfig, section: ModelSection) -> None:
    """Refuse a model whose labels no decoder reads one later; transformers has such under its heads for that too."""
    where = f"model.task={section.task!r}: model_type {config.model_type!r}"
    if not config.is_encoder_decoder:
        raise ModelError(
            f"{where} is no encoder-decoder (is_encoder_decoder of its config is false), and sound among tokens is not "
            f"read here; {OWN_WAY}"
        )
    if getattr(config, START, None) is not None:
        return
    if not has_attribute(config, START) and not _is_read(START, config):
        raise ModelError(f"{where} has a decoder that begins in a way of its own; {OWN_WAY}")
    raise MissingTokenError(
        f"the config of {config.model_type!r} has no {START}, with which the decoder begins; set it (T5's is its "
        "pad_token_id)"
    )


def tasks_of(config: PreTrainedConfig) -> list[str]:
    """Return the tasks for which transformers has a head on models of a config."""
    return [name for name, task in TASKS.items() if type(config) in task.types()]


def _from_config(
    config: PreTrainedConfig, section: ModelSection, allocation: Callable[[], AbstractContextManager[None]]
) -> PreTrainedModel:
    """Return transformers' model of a config; `allocation` says what of it has values."""
    family_attention = family_of(str(config.model_type)).attention
    is_built = section.attention in BUILT and not (family_attention is not None and family_attention.eager_only)
    attention = section.attention if is_built else None

    def build(kernel: str | None) -> PreTrainedModel:
        chosen = {} if kernel is None else {"attn_implementation": kernel}
        with allocation():
            return (
                TASKS[section.task]
                .model_class()
                .from_config(
                    copy.deepcopy(config), trust_remote_code=section.trust_remote_code, dtype=torch.float32, **chosen
                )
            )

    where = f"a {config.model_type!r} model"
    try:
        return _guarded(where, lambda: build(attention))
    except ModelError as error:
        if attention is None:
            raise
        available = [kernel for kernel in BUILT if kernel != attention and _succeeds(partial(build, kernel))]
        if not available:
            raise
        raise ModelError(
            f"model.attention={attention!r}: model_type {config.model_type!r} has {', '.join(available)} only; "
            f"use {available[0]!r} or 'auto'"
        ) from error


def _succeeds(build: Callable[[], object]) -> bool:
    try:
        build()
    except Exception:
        return False
    return True


def _guarded(where: str, call: Callable[[], Any]) -> Any:
    """Return `call()`; whatever transformers raises for a user's values becomes a ModelError that names them."""
    try:
        return call()
    except ShardwiseError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{where}: transformers refuses it: {reason}") from error


# --- a user's own module ---------------------------------------------------------------------------------------------


def user_factory(job: Job) -> Callable[[], nn.Module]:
    """Return what makes the module of `model.factory`, with its arguments.

    Raises:
        ConfigError: the factory is no function.
    """
    section = job.model
    factory = load_object(str(section.factory), "model.factory")
    if not callable(factory):
        raise ConfigError(f"model.factory={section.factory!r} is a {type(factory).__name__}, not a function or class")
    return lambda: factory(**copy.deepcopy(section.factory_arguments))


def construct_user_module(job: Job) -> ConstructedModule:
    """Return the module of `model.factory` on the meta device, with what its constructor computed.

    Raises:
        ConfigError: the factory is no function.
        ModelError: it raises, or returns something that cannot be trained.
    """
    where = f"model.factory={job.model.factory!r}"
    factory = user_factory(job)
    try:
        constructed = construct(factory, job.training.seed)
    except NotAModule as error:
        raise ModelError(f"{where} {error}") from error
    except Exception as error:
        raise ModelError(f"{where} raised {named_error(error)}{in_parentheses(raised_at(error))}") from error
    check_tensors(constructed.module, where)
    return constructed
