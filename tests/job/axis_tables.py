"""The tables of the package that are keyed by axis."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import shardwise

PACKAGE = Path(shardwise.__file__).parent


def axis_tables() -> dict[str, dict[Any, Any]]:
    """Return `module:name` -> table, for each dict of the package at the top of a module whose keys are axes."""
    tables = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "Axis." not in source:
            continue
        module = ".".join(["shardwise", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for name in _names_of_tables(ast.parse(source)):
            tables[f"{module}:{name}"] = getattr(import_module(module), name)
    return tables


def _names_of_tables(tree: ast.Module) -> list[str]:
    assignments = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    return [
        target.id
        for node in assignments
        if isinstance(node.value, ast.Dict)
        and any(isinstance(key, ast.Attribute) and ast.unparse(key.value) == "Axis" for key in node.value.keys)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
