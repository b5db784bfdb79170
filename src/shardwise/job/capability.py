"""Answers to the question whether a model, a kernel or a machine can do something, with the reason where it cannot."""

from __future__ import annotations

from typing import NamedTuple


class Capability(NamedTuple):
    """An answer; `reason` says why `ok` is False, and is empty otherwise. It is as true as `ok`."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


SUPPORTED = Capability(True)


def refused(reason: str) -> Capability:
    """Return the answer no, for `reason`."""
    return Capability(False, reason)


def unless(reason: str) -> Capability:
    """Return the answer yes where `reason` is empty, else the answer no for it."""
    return Capability(not reason, reason)
