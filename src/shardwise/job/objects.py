"""Objects of the user's own code, named in a job as `package.module:name`, and the errors that they raise.

Used for `model.factory`, `model.loss`, `data.factory`, `optimizer.name`, `optimizer.schedule` and `training.callbacks`.
The working directory is importable, as with `python -m`. Whatever goes wrong in such code is a `UserCodeError` that
says where: the file and the line.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, ShardwiseError, UserCodeError
from shardwise.words import nearest

PACKAGE_DIRECTORY = str(Path(__file__).parents[1])
STANDARD_LIBRARY = str(Path(inspect.__file__).parent)
OUT_OF_MEMORY = ("OutOfMemoryError", "DefaultCPUAllocator")  # a device's and the CPU's: not the code's mistake


def load_object(reference: str, key: str = "reference") -> Any:
    """Return the object that `package.module:name` names; `key` is the job's key, for the error message.

    Raises:
        ConfigError: the reference has another form, or names what is not there.
        UserCodeError: importing the module raised an error.
    """
    module_name, colon, path = reference.partition(":")
    if not (colon and module_name and path):
        raise ConfigError(f"{key}={reference!r} is not of the form 'package.module:name'")
    owner: Any = _load_module(module_name, f"{key}={reference!r}")
    for name in path.split("."):
        if not hasattr(owner, name):
            public = [known for known in dir(owner) if not known.startswith("_")]
            raise ConfigError(f"{key}={reference!r}: {module_name} has no {name!r}.{nearest(name, public)}")
        owner = getattr(owner, name)
    return owner


def is_reference(name: str) -> bool:
    """Return whether a value names an object of the user's own, rather than one that is known here."""
    return ":" in name


def check_arguments(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Refuse a function that cannot be called with these positional arguments.

    Raises:
        UserCodeError: it is no function, or with its own signature, file and line.
    """
    if not callable(function):
        raise UserCodeError(f"{what} is a {type(function).__name__}, not a function or class")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin says nothing about its arguments
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        own = ", ".join(signature.parameters)
        place = in_parentheses(defined_at(function))
        raise UserCodeError(f"{what} takes ({own}) and is called with ({', '.join(arguments)}){place}") from None


@contextmanager
def user_code(what: str, passes: Callable[[Exception], bool] | None = None) -> Iterator[None]:
    """Turn an error that the user's code raises inside into a UserCodeError that names `what`, file and line.

    Named errors, a lack of memory, and errors of which no frame is the user's pass as they are.

    Args:
        passes: says which errors are no mistake of the code, though it stands on the way to them.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        place = raised_at(error)
        if not place or any(word in f"{type(error).__name__} {error}" for word in OUT_OF_MEMORY):
            raise
        if passes is not None and passes(error):
            raise
        raise UserCodeError(f"{what} raised {named_error(error)}{in_parentheses(place)}") from error


def named_error(error: BaseException) -> str:
    """Return an error's class and its message, where it has one."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def raised_at(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is the user's; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def defined_at(definition: Any) -> str:
    """Return `file:line` of a function's or a class's definition; empty where it has no source."""
    try:
        return f"{inspect.getsourcefile(definition)}:{inspect.getsourcelines(definition)[1]}"
    except (OSError, TypeError):
        return ""


def in_parentheses(place: str) -> str:
    """Return a place as the end of a message; nothing where it is not known."""
    return f" ({place})" if place else ""


def is_users_file(file: str) -> bool:
    """Return whether a frame's file is the user's: not of this package, of torch, or of Python's standard library."""
    torch = sys.modules.get("torch")
    directories = [PACKAGE_DIRECTORY, "<frozen"]
    directories += [str(Path(torch.__file__).parent)] if torch is not None and torch.__file__ else []
    is_standard = file.startswith(STANDARD_LIBRARY) and "-packages" not in file
    return not is_standard and not file.startswith(tuple(directories))


def _load_module(name: str, what: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)  # last: the working directory cannot shadow an installed module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        place = raised_at(error)
        raise ConfigError(
            f"{what}: module {name!r} cannot be imported ({error}); it must be installed, on PYTHONPATH, or in "
            f"{directory}" + in_parentheses(place)
        ) from error
    except Exception as error:  # a module's own code may raise anything while it is imported
        raise UserCodeError(
            f"{what}: importing {name!r} raised {type(error).__name__}: {error}{in_parentheses(raised_at(error))}"
        ) from error
