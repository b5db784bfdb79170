"""Says in words of this project what torch says where a user's forward met a parameter that is sharded at the time.

The first forward shows what it reads. A later one may read more, by a counter or by the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import UserCodeError
from shardwise.job.objects import raised_at

# What torch's message has in it -> what the forward does.
WORDS = {
    "mixed torch.Tensor and DTensor": "reads a parameter while the module that owns it does not run",
    "FSDP does not support deepcopy": "copies a module whose parameters are sharded",
    "resize storage that is not resizable": "keeps a NumPy view of a parameter's memory",
    "nference tensor": "runs sharded modules in torch.inference_mode",
}


@contextmanager
def sharded_access_named(definition: str) -> Iterator[None]:
    """Raise UserCodeError in place of such an error of torch's inside.

    Args:
        definition: the user's module, with its file and line.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        action = next((words for marker, words in WORDS.items() if marker in str(error)), "")
        if not action:
            raise
        raise UserCodeError(
            f"the forward of {definition} {action} ({raised_at(error)}), and ranks hold parts of it then. Read a "
            "parameter in the forward of the module that owns it, use torch.no_grad, or train with one worker"
        ) from error
