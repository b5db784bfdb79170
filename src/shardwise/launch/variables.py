"""Reading of a launcher's variables: what is missing or no number is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import MachineError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 12_000  # below Linux's ephemeral ports, which start at 32768


def set_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty: an empty one is one that is not set."""
    return {name: value for name, value in variables.items() if value.strip()}


def text_of(variables: Mapping[str, str], key: str, default: str | None = None) -> str:
    value = variables.get(key) or default
    if value is None:
        others = ", ".join(sorted(k for k in variables if k.endswith(("RANK", "WORLD_SIZE", "PROCID"))))
        raise MachineError(
            f"{key} is not set although this process is one of several ranks ({others} are set); "
            f"set it on every rank, or unset the others to start local workers"
        )
    return value


def whole_number_of(variables: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = text_of(variables, key, None if default is None else str(default))
    if not text.isdecimal():
        raise MachineError(f"{key}={text!r} is not a whole number of 0 or more; the launcher must set it on every rank")
    return int(text)


def check_port(port: int) -> None:
    """Refuse what is no TCP port. Raises MachineError."""
    if not 0 < port < 65536:
        raise MachineError(f"MASTER_PORT={port} is no TCP port; use one of 1 to 65535")
