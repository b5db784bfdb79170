"""Recipe files: YAML with OmegaConf's interpolations, read, overridden, resolved and told apart by kind.

Published recipes refer to values of their own (`${.name}`), to the launcher's (`${base_results_dir}`) and to
themselves under the name that the launcher gives them (`${recipes.trainer.max_steps}`). All three are resolved as
Amazon's launcher does, without a hub or a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.job.sources import parse_yaml
from shardwise.words import nearest_file

RecipeKind = Literal["smp", "llmft"]
SUFFIXES = (".yaml", ".yml")
ROOTS = ("recipes", "training")  # names under which a launcher has the recipe
LAUNCHER_DEFAULTS = {"base_results_dir": "results"}  # of Amazon's launcher, to which recipes refer
NOVA = "Amazon Nova's weights are with Amazon alone; use a recipe of an open model"
NOT_OURS = {  # run.model_type -> what such recipes are
    "verl": "reinforcement learning with VERL (GRPO of RLVR and RLAIF), which is not built; use a SFT or DPO recipe",
    "mtrl": "multi-turn reinforcement learning, which is not built; use a SFT or DPO recipe",
    "neuron": "for Trainium, and torch's CUDA and CPU devices are what runs here; use a GPU recipe",
}
LISTED_STEPS = "preprocessor_cfgs"  # a list of steps, each with a `type`


@dataclass(frozen=True)
class HyperPodRecipe:
    """A recipe with overrides and interpolations applied.

    Attributes:
        name: its file's name without the suffix.
        values: dotted key -> value. A step of preprocessing is `...preprocessor_cfgs.TYPE.KEY`.
    """

    name: str
    kind: RecipeKind
    values: Mapping[str, Any]


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> HyperPodRecipe:
    """Read a recipe file.

    Args:
        path: the YAML file.
        overrides: `key=value` by dotted key, under `recipes.` or bare; `base_results_dir=DIR` is the launcher's.

    Raises:
        ConfigError: no such file, no YAML, no recipe, an interpolation that leads nowhere, or a kind that is not ours.
    """
    file = Path(path).expanduser()
    where = f"recipe {str(path)!r}"
    data = _read(file, where)
    launcher = dict(LAUNCHER_DEFAULTS)
    for key, value in map(_override, overrides):
        if key in launcher:
            launcher[key] = value
        else:
            _set(data, key, value)
    kind = _kind(data, where)
    return HyperPodRecipe(file.stem, kind, dict(_leaves(_resolved(data, launcher, where))))


def _read(file: Path, where: str) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{where} does not exist.{nearest_file(file, *SUFFIXES)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; give a YAML file in UTF-8") from None
    data = parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ConfigError(f"{where} holds no keys; a recipe has the sections `run` and `trainer`")
    return data


def _override(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"override {word!r} must be key=value, e.g. trainer.num_nodes=2")
    key = key.lstrip("+")
    for root in ROOTS:
        key = key.removeprefix(f"{root}.")
    return key, parse_yaml(text, f"override {key}={text!r}")


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    inner: Any = data
    for name in path:
        inner = inner.setdefault(name, {})
        if inner is None or not isinstance(inner, dict):
            raise ConfigError(f"override {key}={value!r}: {name}={inner!r} has no keys; give it as a mapping")
    inner[last] = value


# ------------------------------------------------------------------------------------------------------------ kinds


def _kind(data: Mapping[str, Any], where: str) -> RecipeKind:
    run, training = _section(data, "run"), _section(data, "training_config")
    model_type = str(run.get("model_type", ""))
    if "nova" in model_type or "distillation_data" in training:
        raise ConfigError(f"{where}: run.model_type={model_type!r}: {NOVA}")
    if model_type in NOT_OURS:
        raise ConfigError(f"{where}: run.model_type={model_type!r} is {NOT_OURS[model_type]}")
    if "evaluation" in data and not training:
        raise ConfigError(f"{where} is an evaluation, and trains nothing; use a recipe with training_config")
    if model_type == "llm_finetuning_aws" and training:
        return "llmft"
    if model_type == "hf" or (not model_type and {"model", "trainer"} <= set(data)):
        return "smp"
    raise ConfigError(
        f"{where}: run.model_type={model_type!r} is of no kind that is read here: hf (recipes of branch v1, with and "
        "without SMP) and llm_finetuning_aws with training_config (SFT, DPO, LoRA)"
    )


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


# ---------------------------------------------------------------------------------------------------- interpolations


def _resolved(data: dict[str, Any], launcher: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `data` with every interpolation replaced; one that a null is written into becomes null."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    root = {**launcher, **data, **{name: data for name in ROOTS if name not in data}}
    try:
        with _arithmetic():
            resolved = OmegaConf.to_container(OmegaConf.create(root), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{where}: {error.full_key}: {reason}; set it, or what it refers to, with key=value"
        ) from None
    assert isinstance(resolved, dict)
    return {name: _without_nulls(resolved[name], data[name]) for name in data}


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Register the resolvers that Amazon's SDK gives recipes, as far as the program itself has none of their names."""
    from omegaconf import OmegaConf

    resolvers = {
        "add": lambda *numbers: sum(numbers),
        "multiply": lambda a, b: a * b,
        "divide_ceil": lambda a, b: -(-a // b),
        "divide_floor": lambda a, b: a // b,
    }
    added = [name for name in resolvers if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_resolver(name, resolvers[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def _without_nulls(resolved: Any, raw: Any) -> Any:
    """Replace text into which a null was written: `${exp_dir}/checkpoints` without an exp_dir is no path."""
    if isinstance(resolved, dict):
        return {
            name: _without_nulls(value, raw[name] if isinstance(raw, dict) else None)
            for name, value in resolved.items()
        }
    is_made = isinstance(resolved, str) and isinstance(raw, str) and "${" in raw
    return None if is_made and "None" in resolved and "None" not in raw else resolved


def _leaves(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        elif name == LISTED_STEPS and isinstance(value, list):
            yield from _steps(value, key)
        else:
            yield key, value


def _steps(steps: list[Any], key: str) -> Iterator[tuple[str, Any]]:
    for step in steps:
        if not isinstance(step, Mapping) or not isinstance(step.get("type"), str):
            raise ConfigError(f"{key} holds {step!r}; each of its steps is a mapping with a `type`")
        name = f"{key}.{step['type']}"
        yield f"{name}.type", step["type"]
        for option, value in step.items():
            if option != "type":
                yield f"{name}.{option}", value
