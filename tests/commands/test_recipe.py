"""`shardwise recipe`: what became of each key, the job, its plan on the recipe's nodes, and a new file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.commands.cli import main
from shardwise.commands.recipe import recipe_plan, settle_cluster
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
    job = load_job(target)
    assert (job.training.steps, job.data.path, job.launch.cluster) == (7, "rows", "p5.48xlarge:2")
    assert main(words) == 2 and "is there already" in capsys.readouterr().err


def test_a_plan_is_of_the_nodes_that_the_recipe_names() -> None:
    result = translated("model.fp8=false")  # its layers are too small to gain
    settle_cluster(result)
    plan = recipe_plan(result)
    assert (plan.world.size, plan.world.hosts, plan.world.accelerator) == (16, 2, "H100 SXM")
    assert (plan.degrees[Axis.TENSOR], plan.degrees[Axis.SHARD], plan.degrees[Axis.REPLICA]) == (2, 4, 2)
    assert plan.sequences_per_step == 8 and plan.balancing_coefficient == 0.001


@pytest.mark.parametrize(
    ("stated", "asked", "cluster"),
    [
        ([], None, "p5.48xlarge:2"),
        (["ml.p4de.24xlarge", "ml.p5.48xlarge"], None, "p4de.24xlarge:2"),
        (["ml.p5.4xlarge", "ml.p5.48xlarge"], None, "p5.48xlarge:2"),  # the first that has eight devices
        (["ml.p5.48xlarge"], "ml.p5en.48xlarge", "p5en.48xlarge:2"),
    ],
)
def test_the_instance_type_is_asked_for_or_stated(stated: list[str], asked: str | None, cluster: str) -> None:
    result = translated()
    result.nodes["instance_types"] = stated
    settle_cluster(result, asked)
    assert result.job().launch.cluster == cluster


def test_wrong_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--instance-type", "p5.49xlarge"], "Did you mean 'p5"),
        (["--instance-type", "p5.4xlarge"], "use trainer.devices=1"),
        (["--instance-type", "p5.48xlarge", "--launch.cluster", "h100:8"], "keep one"),
        (["--submit"], "does nothing without --to"),
    ):
        assert main(["recipe", RECIPE, *words]) == 2
        assert says in capsys.readouterr().err


def test_a_recipe_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", RECIPE, "model.fp8=false", "--to", "slurm"]) == 0
    assert load_job("mixture-slurm/job.yaml").output == "results/mixture"
    script = Path("mixture-slurm/job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script
    printed = capsys.readouterr().out
    assert "launch.cluster p5.48xlarge:2" in printed and "mixture-slurm/job.yaml" in printed


def test_what_is_refused_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", RECIPE, "model.hidden_sise=3"]) == 2
    assert "model.hidden_sise=3: unknown key. Did you mean 'model.hidden_size'?" in capsys.readouterr().err
