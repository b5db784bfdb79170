"""The command `shardwise`, and `python -m shardwise` for launchers that start Python modules.

Ctrl-C ends the command with one line and exit code 130, whatever it meets: imports, what runs at exit, a second Ctrl-C.
What no error has a name for is a fault: its traceback, and the exit code that restart policies read as one.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback

from shardwise.errors.exit_codes import FAULT, INTERRUPTED

_interrupted = False


def run_process() -> int:
    """Run the command line of this process and return its exit code."""
    global _interrupted
    atexit.register(_leave)  # before all others, so that it is called after them
    try:
        from shardwise.commands.cli import main as run_command_line

        exit_code = run_command_line()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        exit_code = INTERRUPTED
    except Exception:
        from shardwise.sagemaker.failure import leave_failure

        traceback.print_exc()
        leave_failure(traceback.format_exc())
        exit_code = FAULT
    if exit_code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _interrupted = True
    return exit_code


def _leave() -> None:
    """End an interrupted process here: Python would raise SIGINT anew if the first one came inside of an `exec`."""
    if _interrupted:
        from shardwise.observe.standard_streams import flush_or_leave

        flush_or_leave("stdout")
        flush_or_leave("stderr")
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(run_process())
