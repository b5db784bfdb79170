"""Objects of the user's own code, named in a job as `package.module:name`.

Used for `model.factory`, `model.loss` and `data.factory`. The working directory is importable, as with `python -m`.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError
from shardwise.words import nearest


def load_object(reference: str, key: str = "reference") -> Any:
    """The object that `package.module:name` names; `key` is the job's key, for the error message."""
    module_name, colon, path = reference.partition(":")
    if not (colon and module_name and path):
        raise ConfigError(f"{key}={reference!r} is not of the form 'package.module:name'")
    found: Any = _load_module(module_name, f"{key}={reference!r}")
    for name in path.split("."):
        if not hasattr(found, name):
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(f"{key}={reference!r}: {module_name} has no {name!r}.{nearest(name, public)}")
        found = getattr(found, name)
    return found


def _load_module(name: str, what: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: the working directory cannot shadow an installed module
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{what}: module {name!r} cannot be imported ({error}); it must be installed, on PYTHONPATH, or in {here}"
        ) from error
    except Exception as error:  # a module's own code may raise anything while it is imported
        raise ConfigError(f"{what}: importing {name!r} raised {type(error).__name__}: {error}") from error
