"""The model of a recipe: fields of its config, and the directory of its weights.

Recipes of branch v1 state the architecture; LLMFT's and some others name a model on the hub or leave it to the run's
name. No hub is asked: dimensions of public models stand in `shardwise.job.public_models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.job.public_models import PublicModel, find_mentioned, find_model
from shardwise.job.recipes.recipe_file import HyperPodRecipe

NAMED_BY = ("training_config.model_config.model_name_or_path", "model.hf_model_name_or_path")


def name_model(recipe: HyperPodRecipe, keys: dict[str, Any], fields: Mapping[str, Any]) -> Iterator[str]:
    """Put where the model comes from into `keys`; yields what the user has to bring.

    Args:
        recipe: as read.
        keys: dotted keys of the job, the name of its launch among them.
        fields: of the model's config, as the recipe states them.
    """
    model = _public_model(recipe, fields)
    if model is not None and fields.get("model_type", model.config["model_type"]) == model.config["model_type"]:
        fields = {**model.config, **fields}
    if "hidden_size" in fields and "model.factory" not in keys:
        keys.setdefault("model.config", dict(fields))
    if not _fine_tunes(recipe):
        if "model.config" not in keys and "model.path" not in keys:
            yield "the recipe states no architecture that is known here; set --model.config or --model.path"
        return
    path = keys.setdefault("model.path", model.name if model else f"models/{keys.get('launch.name', recipe.name)}")
    if not Path(path).expanduser().is_dir():
        download = f"; hf download {path} --local-dir {path}" if find_model(path) else ""
        yield f"model.path={path}: this directory of the model has to be there when the job starts{download}"


def _public_model(recipe: HyperPodRecipe, fields: Mapping[str, Any]) -> PublicModel | None:
    """Return the public model that the recipe names, else that its run's or file's name mentions; None if unknown."""
    named = next((recipe.values[key] for key in NAMED_BY if recipe.values.get(key)), None)
    if named is not None:
        return find_model(str(named))
    if "hidden_size" in fields:
        return None  # the recipe states the architecture itself
    return find_mentioned(str(recipe.values.get("run.name") or "")) or find_mentioned(recipe.name)


def _fine_tunes(recipe: HyperPodRecipe) -> bool:
    return recipe.kind == "llmft" or bool(recipe.values.get("model.do_finetune", True))
