"""The import hook: Amazon's module names lead to `shardwise.smp`, where nothing else answers to them.

The finder of their roots stands last, so that a real `smdistributed`, `torch.sagemaker` or `apex` that is installed is
always found first. An aliased module is the module of ours itself, not a copy: classes are one, whichever name they
were imported by. Imports nothing heavy, because transformers asks for `smdistributed` while it is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSION = "1.15.0"  # of SMP; scripts and transformers' Trainer branch at 1.10 and 1.15
ROOT = "shardwise.smp"
VERSION_1 = f"{ROOT}.v1"
# Names that only lead to others, with what they hold.
NAMESPACES: dict[str, dict[str, Any]] = {
    "smdistributed": {},
    "smdistributed.modelparallel": {"__version__": VERSION},
    "smdistributed.modelparallel.backend": {},
    "smdistributed.modelparallel.test": {},
    "smdistributed.modelparallel.test.torch": {},
    "smdistributed.dataparallel": {},
    "smdistributed.dataparallel.torch": {},
}
# Their name -> ours.
ALIASES = {
    "smdistributed.modelparallel.torch": VERSION_1,
    "smdistributed.modelparallel.torch.exceptions": f"{ROOT}.exceptions",
    "smdistributed.modelparallel.backend.exceptions": f"{ROOT}.exceptions",
    "smdistributed.modelparallel.test.torch.utils": f"{VERSION_1}.test_utils",
    "smdistributed.dataparallel.torch.torch_smddp": f"{VERSION_1}.smddp",
    "smdistributed.dataparallel.torch.distributed": f"{VERSION_1}.data_parallel",
    "smdistributed.dataparallel.torch.parallel": f"{VERSION_1}.data_parallel",
    "smdistributed.dataparallel.torch.parallel.distributed": f"{VERSION_1}.data_parallel",
    "torch.sagemaker": f"{ROOT}.v2",
}
# What scripts import whatever they then do: thin modules of ours where the real ones are missing.
STAND_INS = {name: f"{ROOT}.doors.stubs.{name}" for name in ("transformer_engine", "flash_attn", "accelerate", "apex")}
STAND_INS |= dict.fromkeys(("amp_C", "apex_C"), f"{ROOT}.doors.stubs.apex.kernels")
STAND_INS["torch._six"] = f"{ROOT}.doors.stubs.torch_six"
# Modules of others that scripts find as they were, or whole: a function of ours completes each once it was run.
COMPLETED = {"transformers.trainer": (f"{ROOT}.doors.trainer_mode", "complete_trainer")}
FORMER_NAMES = (f"{ROOT}.doors.former_names", "add_former_names")
CHANGED = ("transformers", *(f"transformers.{name}" for name in ("modeling_utils", "training_args", "utils")))
COMPLETED |= dict.fromkeys((*CHANGED, "transformers.utils.import_utils", "datasets"), FORMER_NAMES)
WITH_CHILDREN = ("smdistributed.modelparallel.torch", "torch.sagemaker", *STAND_INS)


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds the names above, after every other finder has been asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMESPACES:
            return ModuleSpec(fullname, _Namespace(), is_package=True)
        ours = _ours(fullname)
        stands_in = fullname in STAND_INS or fullname.partition(".")[0] in STAND_INS
        if ours is None or not _exists(ours) or (stands_in and _is_question()):
            return None
        if fullname in STAND_INS and os.environ.get("RANK", "0") == "0":
            print(f"note: {fullname} is not installed: what the script imports of it is a stand-in.", file=sys.stderr)
        return ModuleSpec(fullname, _Alias(ours), is_package=True)


class ChildFinder(AliasFinder):
    """Finds children of a module of ours, before others do: they would make a second module of the same file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        ours = _ours(fullname)
        if ours is None or parent is None or ours.rpartition(".")[0] != parent.__name__ or not _exists(ours):
            return None
        return ModuleSpec(fullname, _Alias(ours), is_package=True)


class CompletingFinder(importlib.abc.MetaPathFinder):
    """Gives the modules in `COMPLETED` to the functions there, after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in COMPLETED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                _complete(fullname, module)

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


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


def install_import_hook() -> None:
    """Put the hook among the finders; a second call does nothing."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path[:] = [ChildFinder(), CompletingFinder(), *sys.meta_path, AliasFinder()]
        for name in COMPLETED.keys() & sys.modules.keys():
            _complete(name, sys.modules[name])


def remove_import_hook() -> None:
    """Take the hook and what it has led here out again, for tests."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, (AliasFinder, CompletingFinder))]
    for name in [name for name in sys.modules if name in NAMESPACES or _ours(name)]:
        del sys.modules[name]
    if "torch" in sys.modules:
        vars(sys.modules["torch"]).pop("sagemaker", None)


def _complete(fullname: str, module: ModuleType) -> None:
    path, function = COMPLETED[fullname]
    getattr(importlib.import_module(path), function)(module)


def _ours(fullname: str) -> str | None:
    """Return our name of an alias, or of what is below one of `WITH_CHILDREN`."""
    names = ALIASES | STAND_INS
    if fullname in names:
        return names[fullname]
    above = next((name for name in WITH_CHILDREN if fullname.startswith(f"{name}.")), None)
    return None if above is None else names[above] + fullname.removeprefix(above)


def _is_question() -> bool:
    """Tell if a library only asks for a package (`importlib.util.find_spec`): it is told the truth."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not importlib.util.find_spec.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _exists(name: str) -> bool:
    parent = name.rpartition(".")[0]
    try:  # not find_spec, by which the finder knows a question
        package = importlib.import_module(parent)
    except ModuleNotFoundError:
        return False
    paths = getattr(package, "__path__", None)
    return paths is not None and importlib.machinery.PathFinder.find_spec(name, paths) is not None
