"""A cluster's own client (`kubectl`, `sbatch`, `sky`, `ssh`) as a subprocess: a list of words, never a shell's line."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from shardwise.errors import LaunchError
from shardwise.launch.secrets import hide_secrets

SECONDS = 600  # after which a client is taken as hung
INSTALL = {
    "kubectl": "install it, and give it a context of the cluster",
    "sbatch": "run this on a login node of the cluster, where Slurm's commands are",
    "sky": "pip install 'skypilot[aws]', or for another cloud",
    "ssh": "install OpenSSH's client",
}


class HalfSubmittedError(LaunchError):
    """A submit of which something may be on the cluster; it is not done again until somebody has looked."""


def require_client(program: str) -> None:
    """Refuse to go on without a client.

    Raises:
        LaunchError: it is not on the PATH.
    """
    if shutil.which(program) is None:
        hint = INSTALL.get(program, "install it")
        raise LaunchError(f"{program} is not installed here, so nothing was submitted; {hint}")


def run_client(words: Sequence[str], given: str | None = None) -> str:
    """Run a client and return its stdout.

    Args:
        words: the program and its arguments.
        given: text for its stdin.

    Raises:
        LaunchError: it is not there, or failed; with its own words.
        HalfSubmittedError: it did not end.
    """
    require_client(words[0])
    try:
        ended = subprocess.run(  # logs may hold bytes that are no text
            words, input=given, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise HalfSubmittedError(
            f"`{' '.join(words[:3])}` has not ended after {SECONDS} s; look at the cluster what came of it"
        ) from None
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        reason = hide_secrets("; ".join(said[-3:])) or "without a word"
        raise LaunchError(f"`{' '.join(words[:3])}` failed with exit code {ended.returncode}: {reason}")
    return ended.stdout
