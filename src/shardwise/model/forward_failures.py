"""Says in words why a forward cannot run without values, on fake tensors, or why torch cannot trace it."""

from __future__ import annotations

from shardwise._torch_compat.tracing import asks_for_values
from shardwise.job.objects import in_parentheses, named_error, raised_at


class UntraceableError(RuntimeError):
    """Raised where a trace would not be what the forward does; its message is a clause about the forward."""


def failure_reason(error: BaseException) -> str:
    """Return a clause about a forward that raised `error`, with the user's line; torch's own text is left out."""
    cause = error.__cause__ or error
    if isinstance(cause, UntraceableError):
        return str(cause)
    line = raised_at(cause) or raised_at(error)
    place = in_parentheses(line)
    if asks_for_values(cause):
        return f"it reads values of tensors{place}, which are known in a step alone"
    if "cannot pickle" in str(cause) or "deepcopy" in str(cause):
        return f"it copies modules or tensors{place}"
    if type(cause).__name__ == "FakeTensorDeviceMismatchError":
        return f"it mixes tensors of several devices{place}"
    if not line:
        return f"torch cannot follow it ({type(cause).__name__})"
    return f"it raises {named_error(cause).splitlines()[0]}{place}"
