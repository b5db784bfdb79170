"""Recipe files: interpolations, overrides and kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.job.recipes.recipe_file import read_recipe
from tests.job.recipes.test_translation import SAMPLES

HEAD = "run: {name: x, model_type: hf}\ntrainer: {max_steps: 5, num_nodes: 3}\nmodel: {hidden_size: 64}\n"


def written(directory: Path, text: str) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(text)
    return path


def test_interpolations_lead_to_the_recipe_and_to_its_launcher(tmp_path: Path) -> None:
    own = "a: ${recipes.trainer.max_steps}\nb: ${training.trainer.max_steps}\nc: ${multiply:${trainer.num_nodes},8}\n"
    own += "d: ${divide_ceil:7,2}\ne: {f: 1, g: '${.f}'}\nh: null\ni: ${h}/x\nj: ${base_results_dir}/${run.name}\n"
    values = read_recipe(
        written(tmp_path, HEAD + own), ["base_results_dir=/runs", "recipes.trainer.max_steps=7"]
    ).values
    assert [values[key] for key in ("a", "b", "c", "d", "e.g", "i", "j")] == [7, 7, 24, 4, 1, None, "/runs/x"]


def test_resolvers_of_recipes_are_gone_afterwards(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    read_recipe(written(tmp_path, HEAD))
    assert not OmegaConf.has_resolver("divide_ceil")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "a: ${nowhere.at_all}\n", "a: Interpolation key 'nowhere.at_all' not found"),
        ("", "holds no keys"),
        ("a: [", "is not YAML at line 1"),
        ("run: {model_type: verl}", "GRPO"),
        ("run: {model_type: amazon.nova-lite}", "Amazon Nova"),
        ("run: {model_type: neuron}", "Trainium"),
        ("run: {model_type: hfx}", "of no kind that is read here"),
        ("evaluation: {task: mmlu}", "is an evaluation"),
    ],
)
def test_what_is_no_recipe_of_ours_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="recipe") as error:
        read_recipe(written(tmp_path, text))
    assert says in str(error.value)


def test_a_missing_file_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean .*llmft_sft\.yaml"):
        read_recipe(SAMPLES / "llmft_sfd.yaml")


@pytest.mark.parametrize(("word", "says"), [("trainer", "must be key=value"), ("run.name.x=1", "has no keys")])
def test_wrong_overrides_are_refused(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_recipe(SAMPLES / "llmft_sft.yaml", [word])
