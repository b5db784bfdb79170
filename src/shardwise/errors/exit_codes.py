"""The exit codes of the command line, and which of them are worth another try.

One table for every way in which a process of a job ends. Schedulers read it in different ways; `RESTARTED` and
`PERMANENT` are what their restart policies are written from. Kubeflow's `ExitCode` policy restarts pods from 128 on, so
the codes of what another try may mend lie there, beside those by which a shell reports signals (129 to 192).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

DONE = 0
DISAGREEMENT = 1
MISTAKE = 2
INTERRUPTED = 128 + signal.SIGINT
STOPPED = 128 + signal.SIGTERM
FAULT = 200


@dataclass(frozen=True)
class ExitCode:
    """A way to end: its number, its meaning, and whether the same command may do better when it is started again."""

    number: int
    name: str
    meaning: str
    is_restarted: bool


EXIT_CODES = (
    ExitCode(DONE, "done", "it worked; a callback that ends a run early has what it wants", False),
    ExitCode(DISAGREEMENT, "disagreement", "`verify` found other numbers, `checkpoint verify` damaged bytes", False),
    ExitCode(MISTAKE, "mistake", "a mistake in job, data or machine, which would repeat itself", False),
    ExitCode(INTERRUPTED, "interrupted", "Ctrl-C", True),
    ExitCode(STOPPED, "planned stop", "a signal ended the run after a step, and a checkpoint holds its state", True),
    ExitCode(FAULT, "fault", "a worker died or raised an error that is not the user's to mend", True),
)
RESTARTED = tuple(code.number for code in EXIT_CODES if code.is_restarted)
PERMANENT = tuple(code.number for code in EXIT_CODES if code.number and not code.is_restarted)

# How the restart policy of each target reads the codes: target, its setting, what it makes of them.
RESTART_POLICIES = (
    ("PyTorchJob", "`restartPolicy: ExitCode`", "1 to 127 fail the job, from 128 on the pod is started again"),
    ("JobSet, TrainJob, Job", "`podFailurePolicy`, `onExitCodes`", "`FailJob` for 1 and 2; the others count as faults"),
    ("HyperPodPyTorchJob", "`restartPolicy`", "any code but 0 is restarted, up to `maxFullJobRestarts`"),
    (
        "Slurm",
        "`scontrol requeue` behind the step",
        "a script requeues on 130, 143 and 200; Slurm itself after a dead node",
    ),
    (
        "SageMaker",
        "`RetryStrategy`",
        "retries its own faults; any code but 0 fails the job, with the failure text",
    ),
    ("SkyPilot", "`max_restarts_on_errors`", "a preempted node is replaced; any code but 0 counts as an error"),
    ("`shardwise train`", "`parallel.max_restarts`", "local workers are started again after a fault"),
)
