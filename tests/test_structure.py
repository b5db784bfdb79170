"""Names and files as far as they can be counted: no weak docstring opening, no unexplained double name, no cycle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
JUDGES = {"shardwise.testing.start_check"}  # beside the oracle's own modules
JUDGED = ("parallel", "kernels", "collectives", "training")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return structure.read_trees(SOURCE)


def explained_names() -> set[str]:
    """The names that the glossary says have two meanings, and why."""
    section = (ROOT / "docs" / "glossary.md").read_text().partition("## Names with two meanings")[2]
    return {name for cell in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE) for name in re.findall(r"\w+", cell)}


def test_names_with_two_meanings_are_explained(trees: dict[str, ast.Module]) -> None:
    doubles = structure.double_names(trees)
    explained = explained_names()
    assert doubles.keys() == explained


def test_docstrings_begin_with_a_verb_or_the_thing(trees: dict[str, ast.Module]) -> None:
    assert structure.weak_openings(trees) == []


def test_locals_have_the_noun_of_what_they_hold(trees: dict[str, ast.Module]) -> None:
    assert structure.vague_locals(trees) == []


def test_imports_make_no_cycles(trees: dict[str, ast.Module]) -> None:
    assert structure.import_cycles(structure.import_graph(trees)) == []


def test_the_oracle_reaches_nothing_of_what_it_judges(trees: dict[str, ast.Module]) -> None:
    """Neither it nor anything that it imports, at any remove."""
    graph = structure.import_graph(trees)
    pending = [name for name in trees if name.startswith("shardwise.testing.oracle") or name in JUDGES]
    reached: set[str] = set()
    while pending:
        module = pending.pop()
        reached.add(module)
        pending += graph[module] - reached
    assert "shardwise.job.schema" in reached and reached.issuperset(JUDGES)
    assert not [module for module in reached if structure.room(module) in JUDGED]


def test_a_cycle_is_found_whole() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert structure.import_cycles(graph) == [["a", "b", "c"]]


def test_deferred_and_type_only_imports_count() -> None:
    tree = ast.parse("def f():\n    from shardwise.a import b\nif TYPE_CHECKING:\n    import shardwise.c\n")
    assert structure.imported_modules(tree, {"shardwise.a", "shardwise.c"}) == {"shardwise.a", "shardwise.c"}
