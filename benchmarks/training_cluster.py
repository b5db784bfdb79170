"""Seconds of a training step on four hosts of two CPU ranks, links of 1 Gbit/s: shardwise beside its peers.

    python -m benchmarks.training_cluster --json result.json          # as root; several minutes

The hosts are network namespaces (`benchmarks.cluster`). All train the GPT-2 of `training_cpu` on one sequence a rank,
one thread a rank, gathered parameters freed between forward and backward. Sharded over all ranks: FSDP2, DeepSpeed
ZeRO-3 and shardwise; over every two: FSDP2 on two dimensions, DeepSpeed MiCS where the installed version has it, and
shardwise.
The peers talk over Gloo, shardwise over its own backend. A contender takes its turn while the others wait; the order
rotates from round to round. `alone` is the same forward, backward and update without anything sent. A step's compute
is that of `alone` in the same round, and what a contender takes longer is its communication, as far as it is not
hidden behind compute.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import cluster
from benchmarks.contenders.shardwise_contender import AT_2, ON_ENGINE
from benchmarks.harness import Contender, Series, Step, agree, build_step, redirect_output, summarize, take_turn
from benchmarks.peers import DEEPSPEED, DEEPSPEED_MICS, FSDP2, FSDP2_AT_2
from benchmarks.record import header, write_json
from benchmarks.workload import Workload, load_model, save_model, token_ids
from shardwise.collectives import engine, registration

ALONE = Contender("alone", "benchmarks.training_cluster:alone", "torch", "nothing is sent; updates its share of P")
CONTENDERS = {
    "alone": ALONE,
    "fsdp2": FSDP2,
    "deepspeed": DEEPSPEED,
    "fsdp2_at_2": FSDP2_AT_2,
    "mics": DEEPSPEED_MICS,
    "shardwise": ON_ENGINE,
    "shardwise2": AT_2,
}
RIVALS = ((ON_ENGINE, (FSDP2, DEEPSPEED)), (AT_2, (FSDP2_AT_2, DEEPSPEED_MICS)))  # of equal degree
LOSS_TOLERANCE = 1e-4
PORTS = {"gloo": cluster.PORT, registration.BACKEND: cluster.PORT + 1}
PACKAGES = ("torch", "transformers", "deepspeed", "shardwise")


def alone(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """What a rank computes where nobody has to be asked for anything."""
    model, ids = load_model(directory), token_ids(workload, rank)
    share = torch.zeros(-(-sum(p.numel() for p in model.parameters()) // world), requires_grad=True)
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share], lr=workload.learning_rate, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where losses disagree, 2 where no cluster can be made."""
    options = _parse(arguments)
    if options.rank:
        return _rank(options)
    problem = cluster.obstacle()
    if problem:
        print(f"no cluster here: {problem}")
        return 2
    engine.build()
    series = measure(options)
    summary = summarize_run(series, options.steps)
    Console(width=None if sys.stdout.isatty() else 130).print(render(summary))
    problems = check(series)
    for text in problems:
        print(text)
    if options.json:
        content = {"workload": workload_of(options).to_dict(), "rows": summary, "problems": problems}
        write_json(options.json, header(PACKAGES) | content)
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each gives every contender one turn")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each contender before the first round")
    parser.add_argument("--hosts", type=int, default=cluster.HOSTS)
    parser.add_argument("--local-ranks", type=int, default=cluster.LOCAL_RANKS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    shape = Workload(batch=1)
    for name in ("layers", "width", "heads", "vocabulary", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name), help="default %(default)s")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # this is one, of the world with this backend
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    shape = (options.layers, options.width, options.heads, options.vocabulary, options.sequence, options.batch)
    return Workload(*shape, reshard=True)


# --- here


@dataclass
class World:
    """The ranks of one backend, which hold all of its contenders."""

    connections: list[Connection]

    def ask(self, *words: Any, timeout: float = 600) -> list[Any]:
        """Tell every rank the same and return what each answers.

        Raises:
            ClusterError: one raised, went away or says nothing.
        """
        for connection in self.connections:
            connection.send(words)
        answers: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(answers) < len(self.connections):
            open_ = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            ready = wait(list(open_), max(0.0, until - time.monotonic()))
            if not ready:
                raise cluster.ClusterError(f"{words[:2]}: ranks {sorted(open_.values())} say nothing")
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[open_[connection]] = self._answer(connection, words)
        return [answers[rank] for rank in range(len(self.connections))]

    def _answer(self, connection: Connection, words: tuple[Any, ...]) -> Any:
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            raise cluster.ClusterError(f"{words[:2]}: a rank died") from None
        if kind == "error":
            raise cluster.ClusterError(f"{words[:2]}: a rank raised\n{value}")
        return value


def measure(options: argparse.Namespace) -> list[Series]:
    """All rounds; also writes on the terminal how far they are."""
    series = [Series(CONTENDERS[name], skipped=CONTENDERS[name].missing()) for name in options.contenders]
    entries = [entry for entry in series if not entry.skipped]
    backends = sorted({entry.contender.backend for entry in entries})
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as directory, cluster.cluster(options.hosts) as made:
        save_model(workload_of(options), Path(directory))
        worlds = _start(made, options, Path(directory), backends)
        for entry in entries:
            print(f"building {entry.contender.name}", flush=True)
            worlds[entry.contender.backend].ask("build", entry.contender)
            _take(worlds, entry, options.warmup, timed=False)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            shift = number % len(entries)
            for entry in entries[shift:] + entries[:shift]:
                _take(worlds, entry, options.steps, timed=True)
    return series


def _start(
    made: cluster.Cluster, options: argparse.Namespace, directory: Path, backends: Sequence[str]
) -> dict[str, World]:
    """The worlds. Namespaces share the file system, so their ranks reach us through a socket in it."""
    key = secrets.token_hex(16)
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    shape = [f"--{name}={value}" for name, value in workload_of(options).to_dict().items() if hasattr(options, name)]
    command = [sys.executable, "-m", "benchmarks.training_cluster", f"--directory={directory}", *shape]
    with Listener(str(directory / "socket"), "AF_UNIX", backlog=64, authkey=key.encode()) as listener:
        for backend in backends:
            more = {"PYTHONPATH": path, "MASTER_PORT": str(PORTS[backend]), "SHARDWISE_BENCH_KEY": key}
            more["DS_ACCELERATOR"] = "cpu"
            ranks = made.start_ranks([*command, f"--rank={backend}"], more, options.local_ranks)
        size = options.hosts * options.local_ranks
        found: dict[str, dict[int, Connection]] = {backend: {} for backend in backends}
        for _ in range(size * len(backends)):
            connection = listener.accept()
            backend, rank = connection.recv()
            found[backend][rank] = connection
        del ranks
    return {backend: World([of[rank] for rank in range(size)]) for backend, of in found.items()}


def _take(worlds: dict[str, World], entry: Series, steps: int, timed: bool) -> None:
    answers = worlds[entry.contender.backend].ask("turn", entry.contender, steps)
    entry.losses += answers[0][1]
    print(f"  {entry.contender.name}: {max(seconds for seconds, _ in answers) / steps:.2f} s a step", flush=True)
    if timed:
        entry.seconds.append(max(seconds for seconds, _ in answers))


def summarize_run(series: Sequence[Series], steps: int) -> list[dict[str, Any]]:
    """The table's rows: seconds a step, what of it `alone` takes too, the rest, and ratios to each rival."""
    ran = {entry.contender.name: [t / steps for t in entry.seconds] for entry in series if not entry.skipped}
    computing = ran.get(ALONE.name)
    rows: list[dict[str, Any]] = []
    for entry in series:
        name = entry.contender.name
        row: dict[str, Any] = {"contender": name, "settings": entry.contender.settings}
        rows.append(row)
        if entry.skipped:
            row["skipped"] = entry.skipped
            continue
        row |= {"seconds_per_step": vars(summarize(ran[name])), "rounds": ran[name]}
        row |= {"first_loss": entry.losses[0], "last_loss": entry.losses[-1]}
        if computing is None or name == ALONE.name:
            continue
        exposed = summarize([whole - part for whole, part in zip(ran[name], computing, strict=True)])
        row["communication_seconds"] = vars(exposed)
        row["communication_share"] = exposed.median / row["seconds_per_step"]["median"]
    _compare({row["contender"]: row for row in rows if "skipped" not in row})
    return rows


def _compare(rows: dict[str, dict[str, Any]]) -> None:
    """Add, to each of ours, its step and its communication against the fastest rival of equal degree."""
    for ours, rivals in RIVALS:
        ran = [rows[rival.name] for rival in rivals if rival.name in rows]
        if ours.name not in rows or not ran:
            continue
        row, best = rows[ours.name], min(ran, key=lambda rival: float(rival["seconds_per_step"]["median"]))
        pairs = zip(row["rounds"], best["rounds"], strict=True)
        row["best_rival"] = best["contender"]
        row["step_ratio"] = summarize([theirs / own for own, theirs in pairs]).median
        if "communication_seconds" in row:
            least = min(float(rival["communication_seconds"]["median"]) for rival in ran)
            row["communication_ratio"] = row["communication_seconds"]["median"] / least


def check(series: Sequence[Series]) -> list[str]:
    """What makes the numbers unusable: losses of one step that differ. `alone` learns nothing and is left out."""
    ran = [entry for entry in series if not entry.skipped and entry.contender.name != ALONE.name]
    for step in range(min((len(entry.losses) for entry in ran), default=0)):
        losses = {entry.contender.name: entry.losses[step] for entry in ran}
        if not agree(losses.values(), LOSS_TOLERANCE):
            return [f"step {step + 1}: losses differ by more than {LOSS_TOLERANCE}: {losses}"]
    return []


def render(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Seconds of a step: median (quartiles)")
    titles = (
        "contender",
        "step",
        "communication",
        "share",
        "step ratio",
        "comm. ratio",
        "beside",
        "first loss",
        "last loss",
    )
    for title in titles:
        table.add_column(title, justify="left" if title in ("contender", "beside") else "right", no_wrap=True)
    for row in rows:
        if "skipped" in row:
            table.add_row(row["contender"], row["skipped"])
            continue
        table.add_row(
            row["contender"],
            _spread(row["seconds_per_step"]),
            _spread(row["communication_seconds"]) if "communication_seconds" in row else "",
            *(f"{row[key]:.2f}" if key in row else "" for key in ("communication_share", "step_ratio")),
            f"{row['communication_ratio']:.2f}" if "communication_ratio" in row else "",
            row.get("best_rival", ""),
            *(f"{row[key]:.5f}" for key in ("first_loss", "last_loss")),
        )
    return table


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['low']:.2f} {values['high']:.2f})"


# --- on each rank


def _rank(options: argparse.Namespace) -> int:
    """Build what is asked for and take turns, until the other end closes."""
    key = os.environ.pop("SHARDWISE_BENCH_KEY").encode()
    redirect_output(options.directory / f"{options.rank}{os.environ['RANK']}.log")  # nobody reads the pipe meanwhile
    with Client(str(options.directory / "socket"), "AF_UNIX", authkey=key) as connection:
        rank, steps = int(os.environ["RANK"]), dict[str, Step]()
        connection.send((options.rank, rank))
        try:
            torch.set_num_threads(1)
            if options.rank == registration.BACKEND:
                registration.register()
            dist.init_process_group(options.rank)
            while True:
                what, contender, *numbers = connection.recv()
                if what == "build":
                    arguments = (workload_of(options), options.directory)
                    steps[contender.name] = build_step(contender, arguments, rank, dist.get_world_size())
                    connection.send(("ready", None))
                else:
                    connection.send(("turn", take_turn(steps[contender.name], *numbers)))
        except EOFError:
            os._exit(0)  # no teardown: exit hooks would wait for ranks that are gone
        except BaseException:
            connection.send(("error", traceback.format_exc()))
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
