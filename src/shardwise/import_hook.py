"""The import hook: Amazon's module names lead to `shardwise.smp`, where nothing else answers to them.

The finder stands last, so that a real `smdistributed`, `torch.sagemaker`, `transformer_engine` or `flash_attn` that is
installed is always found first. An aliased module is the module of ours itself, not a copy: classes are one, whichever
name they were imported by. Imports nothing heavy, because transformers asks for `smdistributed` while it is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSION = "1.15.0"  # of SMP; scripts and transformers' Trainer branch at 1.10 and 1.15
ROOT = "shardwise.smp"
# Names that only lead to others, with what they hold.
NAMESPACES: dict[str, dict[str, Any]] = {
    "smdistributed": {},
    "smdistributed.modelparallel": {"__version__": VERSION},
    "smdistributed.modelparallel.backend": {},
    "smdistributed.dataparallel": {},
    "smdistributed.dataparallel.torch": {},
}
# Their name -> ours; what is below the first of them follows it.
ALIASES = {
    "smdistributed.modelparallel.torch": ROOT,
    "smdistributed.modelparallel.backend.exceptions": f"{ROOT}.exceptions",
    "smdistributed.dataparallel.torch.torch_smddp": f"{ROOT}.smddp",
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the names above, after every other finder has been asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMESPACES:
            return ModuleSpec(fullname, _Namespace(), is_package=True)
        ours = _ours(fullname)
        if ours is None or not _exists(ours):
            return None
        return ModuleSpec(fullname, _Alias(ours), is_package=True)


class _Namespace(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(NAMESPACES[module.__name__])


class _Alias(importlib.abc.Loader):
    def __init__(self, ours: str) -> None:
        self.ours = ours
        self.spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.ours)
        self.spec = module.__spec__  # the import machinery puts its own in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def install() -> None:
    """Put the hook last among the finders; a second call does nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def uninstall() -> None:
    """Take the hook and what it has led here out again, for tests."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name in NAMESPACES or _ours(name)]:
        del sys.modules[name]


def _ours(fullname: str) -> str | None:
    """Our name of an alias, or of what is below the root's."""
    if fullname in ALIASES:
        return ALIASES[fullname]
    for name, ours in ALIASES.items():
        if ours == ROOT and fullname.startswith(f"{name}."):
            return ours + fullname.removeprefix(name)
    return None


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # of a parent that is no package, or a module without a spec
        return name in sys.modules
