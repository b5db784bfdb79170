"""Errors while a run's results are written: of the disk, by the directory's name, and of what may fail at its end."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import OutputError

if TYPE_CHECKING:
    from shardwise.observe.callback import ObservedSession

_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}  # of a disk


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses in the body into an error of the output directory `path`.

    Raises:
        OutputError: the disk is full, has failed or may no longer be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:  # a tracker's server, say
            raise
        raise OutputError(
            f"output={str(path)!r} cannot be written any more: {error.strerror}; once it can be, "
            "--checkpoint.resume auto goes on from the last checkpoint; or use --output NEW_DIRECTORY"
        ) from error


@contextmanager
def reported(session: ObservedSession, consequence: str) -> Iterator[None]:
    """Say what fails at the end of a run in place of raising it: the trained model is written by then.

    Raises:
        OutputError: of the disk, which has more to say.
    """
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        session.note(f"{consequence}: {type(error).__name__}: {error}")
