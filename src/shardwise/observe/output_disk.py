"""Errors of the disk under an output directory, by the directory's name."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import OutputError

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
