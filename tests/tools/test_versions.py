"""The runner over versions: which environments it makes, and its table. No environment is made here."""

from __future__ import annotations

from pathlib import Path

from tools.versions import Outcome, lowest_pins, markdown_table, pin_sets


def test_environments_are_the_ends_of_what_is_allowed(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\ndependencies = ["numpy>=1.26", "torch>=2.11", "transformers>=5.17,<6"]\n')
    assert lowest_pins(pyproject) == {"torch": "torch==2.11.*", "transformers": "transformers==5.17.*"}
    both, torch, transformers, none = pin_sets(pyproject)
    assert both == ["torch==2.11.*", "transformers==5.17.*"] and none == []
    assert (torch, transformers) == (["torch==2.11.*"], ["transformers==5.17.*"])
    assert len(pin_sets()) == 4


def test_the_table_has_a_row_for_each_environment() -> None:
    table = markdown_table(
        [Outcome(("2.11.0", "5.17.0"), True, "3 passed"), Outcome(("2.13.0", "5.24.0"), False, "1 failed")]
    )
    assert table.splitlines()[2:] == ["| 2.11.0 | 5.17.0 | yes | 3 passed |", "| 2.13.0 | 5.24.0 | no | 1 failed |"]
