"""`shardwise recipe`: what became of each key, the job, its plan on the recipe's nodes, and a new file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.commands.cli import main
from shardwise.commands.recipe import recipe_cluster, recipe_plan
from shardwise.errors import ConfigError
from shardwise.job.axes import Axis
from shardwise.job.recipes.recipe_file import read_recipe
from shardwise.job.recipes.translation import RecipeTranslation, translate_recipe
from shardwise.job.sources import load_job
from tests.job.recipes.test_translation import SAMPLES, SMP

RECIPE = str(SAMPLES / f"{SMP}.yaml")


def translated(*overrides: str) -> RecipeTranslation:
    return translate_recipe(read_recipe(RECIPE, overrides))


def test_every_key_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", RECIPE, "trainer.num_nodes=1"]) == 0
    printed = capsys.readouterr()
    assert all(key in printed.out for key in translated().recipe.values)
    assert " keys: " in printed.out and "0 are refused" in printed.out
    assert "data.path=data/train: the recipe leaves the corpus open" in printed.err


def test_the_job_that_is_printed_and_written_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "job.yaml"
    words = ["recipe", RECIPE, "--print", "--output", str(target), "--training.steps", "7", "--data.path", "rows"]
    assert main(words) == 0
    assert target.read_text() in capsys.readouterr().out
    assert load_job(target) == translate_recipe(read_recipe(RECIPE), {"training.steps": 7, "data.path": "rows"}).job()
    assert main(words) == 2 and "is there already" in capsys.readouterr().err


def test_a_plan_is_of_the_nodes_that_the_recipe_names() -> None:
    plan = recipe_plan(translated("model.fp8=false"))  # its layers are too small to gain
    assert (plan.world.size, plan.world.hosts, plan.world.accelerator) == (16, 2, "H100 SXM")
    assert (plan.degrees[Axis.TENSOR], plan.degrees[Axis.SHARD], plan.degrees[Axis.REPLICA]) == (2, 4, 2)
    assert plan.sequences_per_step == 8 and plan.balancing_coefficient == 0.001


def test_the_instance_type_is_asked_for_stated_or_in_the_name() -> None:
    result = translated()
    assert recipe_cluster(result).name == "p5.48xlarge"
    result.launch["instance_types"] = ["ml.p4de.24xlarge", "ml.p5.48xlarge"]
    assert recipe_cluster(result).name == "p4de.24xlarge"
    result.launch["instance_types"] = ["ml.p5.4xlarge", "ml.p5.48xlarge"]
    assert recipe_cluster(result).name == "p5.48xlarge", "the first that has eight devices"
    assert recipe_cluster(result, "ml.p5en.48xlarge").name == "p5en.48xlarge"
    with pytest.raises(ConfigError, match="Did you mean 'p5"):
        recipe_cluster(result, "p5.49xlarge")
    with pytest.raises(ConfigError, match=r"use trainer\.devices=1"):
        recipe_cluster(result, "p5.4xlarge")


def test_what_is_refused_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", RECIPE, "model.hidden_sise=3"]) == 2
    assert "model.hidden_sise=3: unknown key. Did you mean 'model.hidden_size'?" in capsys.readouterr().err
