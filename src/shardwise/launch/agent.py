"""Torch's elastic agent for the workers of one host, with a judgement of its own on what a failure means.

Elastic restarts after any failure. Here a restart is made only where it can help: not for a user's mistake, which would
repeat itself, and not after somebody asked the run to stop. Workers that take SIGTERM as a request (see
`shardwise.launch.interrupt`) would keep elastic waiting for half a minute when it ends them with that signal, so they
are ended with SIGKILL as soon as one of them is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from shardwise.launch import descendants
from shardwise.launch.diagnosis import diagnose_failure, reports_of
from shardwise.launch.failure import announced
from shardwise.launch.interrupt import SIGNALS, interrupts_held_back
from shardwise.launch.rendezvous import HostRendezvous
from shardwise.launch.results import results_over_pipes
from shardwise.launch.signals import Forwarding

SHOW_CURSOR = "\x1b[?25h"


class Agent(LocalElasticAgent):
    """Overrides what torch documents as an agent's own: how workers are watched and how they are stopped.

    Args:
        spec: of the workers; `max_restarts` counts attempts after the first.
        logs: where output goes.
        directory: of this run, private; holds the workers' reports by attempt.
        signals: what to pass on to the workers; None: they are ended by SIGTERM, as torch does it.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, directory: Path, signals: Forwarding | None, **settings: Any
    ) -> None:
        super().__init__(spec, logs, start_method="spawn", **settings)
        self._directory, self._signals, self._hosts = directory, signals, spec.rdzv_handler
        self._restarts = 0

    def reports(self) -> Path:
        """Return the directory in which the workers of the present attempt leave their reports."""
        return reports_of(self._directory, self._restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with interrupts_held_back(), results_over_pipes():
            pids = super()._start_workers(worker_group)
        for process in multiprocessing.active_children():
            if process.pid in pids.values():  # torch terminates the others where it is the first to see a failure
                descendants.end_with(process)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Raises the run's error, or SignalException, where there is to be no other attempt."""
        if self._signals is not None:
            self._signals.send([worker.id for worker in worker_group.workers])
        codes = {worker.global_rank: exit_code(worker.id) for worker in worker_group.workers}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if not ended:
            if isinstance(self._hosts, HostRendezvous):
                self._hosts.raise_others_failure()
            result = super()._monitor_workers(worker_group)
            if not result.is_failed():
                return result
            ended = {rank: failure.exitcode for rank, failure in result.failures.items()}
        else:
            others = [worker.id for worker in worker_group.workers if worker.global_rank not in ended]
            with descendants.ended_too(others):
                for pid in others:
                    os.kill(pid, signal.SIGKILL)
        self._judge(ended)
        return RunResult(state=WorkerState.FAILED)  # elastic restarts all

    def _judge(self, ended: dict[int, int]) -> None:
        restore_cursor()
        asked_to_stop = self._signals is not None and bool(self._signals.received)
        if asked_to_stop:
            for number in SIGNALS:
                if -number in ended.values():  # no handler: the worker was not, or no longer, at its steps
                    raise SignalException(f"a worker died of {number.name}", number)
        spec = self._worker_group.spec
        first = self._worker_group.workers[0]
        diagnosis = diagnose_failure(self._directory, self._restarts, first.world_size, ended, first.global_rank)
        if asked_to_stop or diagnosis.repeats or self._restarts == spec.max_restarts:
            error = diagnosis.after(self._restarts)
            if isinstance(self._hosts, HostRendezvous):
                self._hosts.tell_failure(error)
            raise error
        self._restarts += 1
        print(f"restart {self._restarts} of {spec.max_restarts}: {diagnosis.summary}", file=sys.stderr, flush=True)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *rest: Any, **settings: Any) -> None:
        if death_sig == signal.SIGTERM and self._signals is not None:
            death_sig = signal.SIGKILL
        if death_sig == signal.SIGINT:
            self._end_starting()
        with descendants.ended_too(worker.id for worker in self._worker_group.workers if worker.id is not None):
            super()._shutdown(death_sig, *rest, **settings)

    def _end_starting(self) -> None:
        """Kill workers that hold Ctrl-C back, since they are still importing what they are to run."""
        started = announced(self.reports())
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            if pid not in started:
                os.kill(pid, signal.SIGKILL)


def exit_code(pid: int) -> int | None:
    """Return a child's exit code (minus the signal that killed it), or None while it runs. Torch can still wait for it.

    None too where torch is left to find it: without `waitid` (macOS before Python 3.13), and for a child that ended
    while others were started, since multiprocessing has waited for it by then.
    """
    if not hasattr(os, "waitid"):
        return None
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def restore_cursor() -> None:
    """A live display that was killed leaves the terminal without a cursor."""
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
