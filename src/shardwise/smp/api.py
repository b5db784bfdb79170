"""The list of SMP's API, `api.yaml`, as plain data: what acts, what is accepted without effect, what is refused.

The coverage test finds every entry; the reference page is made from it.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import yaml


class ApiName(NamedTuple):
    """One name of the API. `signature` is "" for what is not called; `reason` says why it does not act, or how far."""

    owner: str
    name: str
    signature: str
    status: str
    reason: str


def _data() -> dict[str, Any]:
    text = resources.files("shardwise.smp").joinpath("api.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def api_names() -> list[ApiName]:
    """List every name of the API that exists here."""
    listed = []
    for owner, names in _data()["modules"].items():
        for text, status in names.items():
            name, _, signature = text.partition("(")
            status, reason = status if isinstance(status, list) else (status, "")
            listed.append(ApiName(owner, name, f"({signature}" if signature else "", status, reason))
    return listed


def missing_names() -> dict[str, str]:
    """Return names of SMP's that do not exist here -> what to do."""
    return dict(_data()["missing"])


def api_page() -> list[str]:
    """Return lines of the reference page in Markdown."""
    lines = [
        "# SMP's Python API",
        "",
        "Generated from `shardwise/smp/api.yaml`. *acts*: as in SMP. *accepted*: no error and no effect. *refused*: an "
        "error says why. Under `shardwise run` `shardwise.smp` is `smdistributed.modelparallel.torch`, "
        "`shardwise.smp.v2` is `torch.sagemaker`, `shardwise.smp.v1.data_parallel` SMDDP's first API, and what is "
        "below `stubs` has that name where it is missing.",
    ]
    owner = ""
    for entry in api_names():
        if entry.owner != owner:
            owner = entry.owner
            lines += ["", f"## `{owner}`", "", "| name | status | |", "| --- | --- | --- |"]
        called = (entry.name + entry.signature).replace("self, ", "").replace("(self)", "()").replace("|", "\\|")
        lines.append(f"| `{called}` | {entry.status} | {entry.reason} |")
    lines += ["", "## Missing", "", "| name | instead |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in missing_names().items()]
    return lines
