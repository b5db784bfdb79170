"""Says in words of this project what torch says where a user's forward met a parameter that is sharded at the time.

The first forward shows what it reads. A later one may read more, by a counter or by the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

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


def sharded_classes(modules: Iterable[nn.Module]) -> dict[type, frozenset[str]]:
    """Return the classes that FSDP2 made of those of `modules`, and the names that they have; some bases give them."""
    return {type(module): frozenset(vars(type(module))) for module in modules if isinstance(module, FSDPModule)}


@contextmanager
def class_writes_refused(definition: str, classes: Mapping[type, Collection[str]]) -> Iterator[None]:
    """Raise UserCodeError where a forward inside sets an attribute of `type(self)` on one of FSDP2's classes.

    The user's own class, from which others read it, would not have it.

    Args:
        definition: the user's module, with its file and line.
        classes: of `sharded_classes`.
    """
    yield
    for sharded, earlier in classes.items():
        for name in [name for name in vars(sharded).keys() - set(earlier) if not name.startswith("_")]:  # torch's
            delattr(sharded, name)  # the class serves later jobs of this process too
            own = next(base for base in sharded.__mro__ if not issubclass(base, FSDPModule))
            raise UserCodeError(
                f"the forward of {definition} sets {name} on type(self), which is another class where modules are "
                f"sharded. Set {own.__name__}.{name}, or train with one worker"
            )
