"""A model family is one file: found by its model type, and the only place that knows the type."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

import shardwise
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model import families
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.registry import family_of, known_families
from tests.pages import python_blocks
from tools.structure import nodes_of, read_tree

LATER = {"dots3_note", "dots3_note_text", "nemotron_h_omni"}  # than transformers 5.17
# transformers has no plan for BioGPT, and this package no file.
[BIOGPT] = [block for block in python_blocks("how-to/extend.md") if "FAMILY = " in block]
SOURCE = Path(shardwise.__file__).parent
# What names models for reasons of its own: Amazon's table of them, the planner's presets and published runs, the models
# that workers of tests import before they fork, and what else toys need.
NAMING_ROOMS = ("model/families", "smp", "planner/constants", "planner/published", "testing/world.py",
                "testing/toy_", "job/recipes/smp_keys.py")  # fmt: skip
OTHER_MEANINGS = {("kernels/liger.py", "llama")}  # Liger's name of a way to cast


@pytest.fixture
def extra_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose files are families too, until the test ends."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    known_families.cache_clear()
    yield tmp_path
    known_families.cache_clear()
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(f"{families.__name__}.{file.stem}", None)


def biogpt_facts() -> ModelFacts:
    config = {
        "model_type": "biogpt",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    job = Job.model_validate({"model": {"config": config}})
    return discover(build_model(job), job)


def test_the_family_of_the_page_is_added_by_one_file(extra_families: Path) -> None:
    assert biogpt_facts().heads_whole == "there is no plan for biogpt"
    (extra_families / "toy_biogpt.py").write_text(BIOGPT)
    known_families.cache_clear()
    facts = biogpt_facts()
    assert facts.supports(Axis.TENSOR).ok and facts.attention_kernels.ok
    assert facts.tensor_splits["biogpt.layers.1.fc1"].kind == "column"
    assert facts.tensor_splits["biogpt.layers.1.self_attn.out_proj"].kind == "row"


def test_an_unknown_model_type_has_an_empty_record() -> None:
    family = family_of("olmo")
    assert family.model_types == ("olmo",) and family.attention is None and family.tensor_splits is None


def test_a_file_without_a_record_is_an_error(extra_families: Path) -> None:
    (extra_families / "toy_empty.py").write_text("family = 3\n")
    known_families.cache_clear()
    with pytest.raises(TypeError, match=r"toy_empty\.py holds no FAMILY"):
        known_families()


def test_two_files_with_one_model_type_are_an_error(extra_families: Path) -> None:
    (extra_families / "toy_llama.py").write_text(BIOGPT.replace("biogpt", "llama"))
    known_families.cache_clear()
    with pytest.raises(TypeError, match=r"toy_llama\.py names the model type 'llama', which another family has"):
        known_families()


def test_model_types_are_those_of_transformers() -> None:
    """Of an older transformers all but a few, which came later."""
    unknown = set(known_families()) - set(CONFIG_MAPPING)
    assert unknown <= (LATER if Version(transformers.__version__) < Version("5.24") else set())


def test_no_other_file_knows_a_model_type() -> None:
    """A model type in a string is a decision by name, which belongs into the family's file."""
    known = set(known_families())
    named = {(file, text) for file, text in _strings() if text in known and not file.startswith(NAMING_ROOMS)}
    assert named == OTHER_MEANINGS


def _strings() -> Iterator[tuple[str, str]]:
    """Yield (file, string) for every string constant of the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in nodes_of(read_tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.relative_to(SOURCE).as_posix(), node.value


def test_no_other_file_imports_models_of_transformers() -> None:
    """Llama's modules are what Liger's kernels compute, so their source is a yardstick for every family."""
    importing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in nodes_of(read_tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.models.")
    }
    assert {file for file in importing if not file.startswith(("model/families", "smp"))} == {"model/fusible.py"}
