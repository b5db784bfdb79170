"""Versions that no test has run on are noted; the tested ones are those of `tools/versions.py`."""

from __future__ import annotations

import pytest

from shardwise.commands import versions
from shardwise.commands.versions import NEWEST_TESTED, installed_version, is_newer, untested_versions


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0.dev20261101+cpu", "3.0"])
def test_a_later_version_is_newer(version: str) -> None:
    assert is_newer(version, "2.14")


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.14", "2.9.1", "2.11.0", "no version"])
def test_a_patch_and_an_earlier_version_are_not_newer(version: str) -> None:
    assert not is_newer(version, "2.14")


def test_only_what_is_newer_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", {"torch": "2.99.0", "transformers": "5.17.0"}.get)
    assert list(untested_versions()) == [
        f"torch 2.99.0 is newer than {NEWEST_TESTED['torch']}, the newest that shardwise's tests have run on."
    ]


def test_a_package_that_is_not_there_has_no_version_and_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_version("no-such-package") is None
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    assert list(untested_versions()) == []
