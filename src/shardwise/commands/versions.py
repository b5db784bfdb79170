"""Versions of the packages that training stands on, and those that are newer than what the tests have run on.

`pyproject.toml` has the lowest versions and no highest: a newer one is noted, not refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.version import InvalidVersion, Version

NEWEST_TESTED = {"torch": "2.14", "transformers": "5.24"}  # see `tools/versions.py`


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untested_versions() -> Iterator[str]:
    """Yield a note for each package that is newer than the newest that the tests have run on."""
    for package, newest in NEWEST_TESTED.items():
        version = installed_version(package)
        if version is not None and is_newer(version, newest):
            yield f"{package} {version} is newer than {newest}, the newest that shardwise's tests have run on."


def is_newer(version: str, newest: str) -> bool:
    """Return True where `version` is above all of `newest`'s own: 2.15.0 and 3.0 are above 2.14, 2.14.1 is not.

    A version that is no version is above none.
    """
    try:
        release = Version(version).release
    except InvalidVersion:
        return False
    bound = Version(newest).release
    return release[: len(bound)] > bound
