"""`adapter_config.json`, peft's file: read into the keys of a job, and written from them.

What of it changes numbers and is not built here is refused by its name there, never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, ModelError
from shardwise.job.schema import AdapterSection, Job
from shardwise.job.tasks import TASKS
from shardwise.model.adapters import adapted_parameter
from shardwise.model.facts import LayerAdapter
from shardwise.words import nearest_file

CONFIG = "adapter_config.json"
# Key of the job -> key of peft's file.
KEYS = {
    "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora",
    "target_modules": "target_modules", "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save", "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern",
}  # fmt: skip
# Keys of the file that change no number of a trained adapter, or follow from the layers.
IDLE = {
    "peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping",
    "fan_in_fan_out", "use_dora", "layers_pattern", "megatron_core", "ensure_weight_tying", "runtime_config",
    "ephemeral_gpu_offload", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    *KEYS.values(),
}  # fmt: skip
PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


def adapter_settings(section: AdapterSection) -> AdapterSection:
    """Return the adapter that a job asks for, with the keys of the directory that it starts from, if there is one.

    Raises:
        ConfigError: a key of the job says otherwise than the directory's file.
        ModelError: the file is missing, or asks for what is not built.
    """
    if section.path is None:
        return section
    stored = read_adapter_config(section.path)
    given = section.model_fields_set
    fields = AdapterSection.model_fields
    for key in given.intersection(KEYS.keys() | {"kind"}) - {"dropout"}:
        value, own = stored.get(key, fields[key].get_default()), getattr(section, key)
        if _in_order(own) != _in_order(value):
            raise ConfigError(
                f"adapter.{key}={own!r}: the adapter in adapter.path={section.path!r} has {value!r}; leave "
                f"adapter.{key} out, or leave adapter.path out and train a new one"
            )
    if "dropout" in given:
        stored["dropout"] = section.dropout
    return AdapterSection.model_validate({**stored, "path": section.path, "base": section.base})


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def with_adapter(job: Job) -> Job:
    """Return the job with the keys of the adapter from which it starts, so that its records say what runs."""
    if job.adapter.path is None:
        return job
    return job.model_copy(update={"adapter": adapter_settings(job.adapter)})


def read_adapter_config(path: str | Path) -> dict[str, Any]:
    """Return the keys of a job's section `adapter` that the file in directory `path` gives.

    Raises:
        ModelError: it is missing, no LoRA, or asks for what is not built.
    """
    file = Path(path) / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).{nearest_file(Path(path))}") from error
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); copy the adapter again") from error
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        kind = content.get("peft_type") if isinstance(content, dict) else type(content).__name__
        raise ModelError(f"{file}: peft_type={kind!r} is not built; adapters of peft_type 'LORA' are")
    _refuse_unbuilt(content, file)
    targets = content.get("target_modules")
    return {
        "kind": "dora" if content.get("use_dora") else "lora",
        **{key: content[name] for key, name in KEYS.items() if content.get(name) is not None},
        "target_modules": sorted(targets) if isinstance(targets, list) else targets or [],
    }


def _refuse_unbuilt(content: Mapping[str, Any], file: Path) -> None:
    for key, value in content.items():
        if key in PLAIN and value in PLAIN[key]:
            continue
        if key not in IDLE and value not in (None, False, [], {}):
            raise ModelError(f"{file}: {key}={value!r} is not built; merge the adapter with peft and train a new one")
    if not content.get("target_modules") and not content.get("target_parameters"):
        raise ModelError(f"{file}: target_modules={content.get('target_modules')!r} names no layer")


def adapter_config(job: Job, settings: AdapterSection, adapters: Mapping[str, LayerAdapter]) -> dict[str, Any]:
    """Return the content of peft's file for the adapters of a job, whose layers and stacks it names one by one."""
    linears = sorted(layer for layer, adapter in adapters.items() if not adapter.experts)
    stacks = sorted(adapted_parameter(layer, adapter) for layer, adapter in adapters.items() if adapter.experts)
    return {
        "peft_type": "LORA",
        "task_type": TASKS[job.model.task].peft or None,
        "base_model_name_or_path": job.model.path,
        "inference_mode": True,
        "bias": "none",
        "init_lora_weights": True,
        "fan_in_fan_out": bool(linears) and all(adapters[layer].transposed for layer in linears),
        "use_dora": settings.kind == "dora",
        **{name: getattr(settings, key) for key, name in KEYS.items()},
        "target_modules": linears,
        "target_parameters": stacks or None,
        "modules_to_save": settings.modules_to_save or None,
    }
