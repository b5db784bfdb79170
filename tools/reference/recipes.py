"""Rows of the reference page about recipes: what becomes of each key of HyperPod's, from the tables that read them."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.job.public_models import public_models
from shardwise.job.recipes.recipe_key import ANY, MAPPED, NODES, RecipeKey
from shardwise.job.recipes.translation import TABLES

RECIPE_HEAD = ("key", "type or words", "becomes", "how, or why it has no effect")
TITLES = {
    "smp": "Recipes of branch v1, with and without SMP (`run.model_type: hf`)",
    "llmft": "LLMFT recipes: SFT, DPO, LoRA (`run.model_type: llm_finetuning_aws`)",
}


def recipe_tables() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the title and the rows of each kind of recipe."""
    for kind, table in TABLES.items():
        yield TITLES[kind], [_row(key) for key in table]


def model_names() -> str:
    """Return the names of the public models whose dimensions are known."""
    return ", ".join(f"`{name}`" for name in sorted(public_models(), key=str.lower))


def _row(key: RecipeKey) -> tuple[str, ...]:
    left_out = "" if key.default is None else f"; left out: {key.default}"
    says = "the same" if key.says == MAPPED else key.says
    return f"`{key.name}`", _accepts(key), _becomes(key), f"{says}{left_out}"


def _accepts(key: RecipeKey) -> str:
    if isinstance(key.accepts, tuple):
        return ", ".join(f"`{word}`" for word in key.accepts)
    return "anything" if key.accepts is ANY else key.accepts.__name__


def _becomes(key: RecipeKey) -> str:
    if key.becomes.startswith(NODES):
        return "`launch.cluster`"
    return f"`{key.becomes}`" if key.becomes else "nothing, or refused" if not key.never_acts else "nothing"
