"""Steps of libraries on CPU ranks whose collectives are the engine's, beside Gloo's: one word differs.

    python -m benchmarks.collectives_libraries --json libraries.json

DDP, FSDP2, DTensor's tensor parallelism, torch.distributed.checkpoint, Accelerate, Hugging Face's Trainer and Lightning
train, or save, the same small network. In a round each library runs on both backends in turn, in processes of their
own; a step takes as long as the median one of the slowest rank. Ratios are medians of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.record import header, write_json
from shardwise.collectives import engine

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("shardwise", "gloo")
WIDTH, DEPTH, ROWS = 256, 6, 4
WARM = 5  # steps that are not counted


class Network(nn.Module):
    """Linear layers; the loss is the mean square of what the last one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the loss [] of rows [B, width]."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return {"loss": x.square().mean()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result; or run one library on one backend, as a rank."""
    options = _parse(arguments)
    if options.library:
        _run_rank(options.library, options.backend, options.steps, options.times)
        return
    engine.build()
    rows = []
    for ranks in options.ranks:
        for library in (*LIBRARIES, *OWN_GROUPS):
            if library in OPTIONAL and importlib.util.find_spec(OPTIONAL[library]) is None:
                print(f"{library}: {OPTIONAL[library]} is not installed", file=sys.stderr)
                continue
            rows.append(_measure(library, ranks, options.rounds, options.steps))
    Console().print(render(rows))
    if options.json:
        versions = header(("torch", "shardwise", "accelerate", "transformers", "lightning"))
        write_json(options.json, versions | {"rounds": options.rounds, "rows": rows})


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a library on a backend, in a round")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--library", default="", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measure(library: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the times of a library on both backends."""
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for number in range(rounds):
        for backend in BACKENDS[:: 1 if number % 2 else -1]:
            times[backend].append(_start(library, backend, ranks, steps))
    ratios = [other / own for own, other in zip(*times.values(), strict=True)]
    medians = {backend: statistics.median(values) for backend, values in times.items()}
    return {"library": library, "ranks": ranks, "seconds": medians, "ratio": statistics.median(ratios)}


def _start(library: str, backend: str, ranks: int, steps: int) -> float:
    """Run ranks of a library, and return the seconds of a step on the slowest."""
    with tempfile.TemporaryDirectory() as directory:
        own = ["--library", library, "--backend", backend, "--steps", str(steps), "--times", str(Path(directory) / "t")]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        module = ["-m", "benchmarks.collectives_libraries"]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": directory,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        command = [sys.executable, *launcher, *module, *own]
        ended = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            raise SystemExit(f"{library} on {backend} failed:\n{ended.stderr[-3000:]}")
        return max(float(json.loads(path.read_text())) for path in Path(directory).glob("t.*"))


def _run_rank(library: str, backend: str, steps: int, times: Path) -> None:
    """Run a library on this rank, and write how long a step took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if library in OWN_GROUPS:
        seconds = OWN_GROUPS[library](backend, steps + WARM)[WARM:]
    else:
        dist.init_process_group(backend)
        seconds = LIBRARIES[library](steps + WARM)[WARM:]
    times.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(statistics.median(seconds)))
    if dist.is_initialized():
        dist.barrier()
    # At the interpreter's end a rank of Gloo aborts now and then, and the others are ended before they write.
    os._exit(0)


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table("library", "ranks", "engine, ms", "Gloo, ms", "Gloo / engine", box=None)
    for row in rows:
        times = [f"{1000 * row['seconds'][backend]:.2f}" for backend in BACKENDS]
        table.add_row(row["library"], str(row["ranks"]), *times, f"{row['ratio']:.2f}")
    return table


# --- the libraries: each returns the seconds of its steps ---------------------------------------------------------


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _trained(model: nn.Module, parameters: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters.parameters(), 0.01)
    rows = torch.ones(ROWS, WIDTH)

    def step() -> None:
        model(rows)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, steps)


def _ddp(steps: int) -> list[float]:
    model = nn.parallel.DistributedDataParallel(Network())
    return _trained(model, model, steps)


def _fsdp2(steps: int) -> list[float]:
    model = _sharded()
    return _trained(model, model, steps)


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Network(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _dtensor(steps: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Network(), init_device_mesh("cpu", (dist.get_world_size(),))
    styles = (ColwiseParallel, RowwiseParallel)
    parallelize_module(model, mesh, {f"layers.{number}": styles[number % 2]() for number in range(DEPTH)})
    return _trained(model, model, steps)


def _checkpoint(steps: int) -> list[float]:
    import torch.distributed.checkpoint as dcp

    model = _sharded()
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else contextlib.nullcontext("") as directory:
        places = [directory]
        dist.broadcast_object_list(places)
        return _timed(lambda: dcp.save(model.state_dict(), checkpoint_id=f"{places[0]}/saved"), steps)


def _accelerate(steps: int) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Network()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    rows = torch.ones(ROWS, WIDTH)

    def step() -> None:
        accelerator.backward(prepared(rows)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, steps)


def _trainer(steps: int) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [{"x": [1.0] * WIDTH, "labels": 0}] * (ROWS * dist.get_world_size() * (steps + 1))
    settings = TrainingArguments(
        "out", use_cpu=True, max_steps=steps + 1, save_strategy="no", per_device_train_batch_size=ROWS,
        report_to=[], disable_tqdm=True, logging_strategy="no", optim="sgd",
    )  # fmt: skip
    Trainer(Network(), settings, train_dataset=rows, callbacks=[Clock()]).train()
    return [end - begin for begin, end in pairwise(ends)]


def _lightning(backend: str, steps: int) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    ends: list[float] = []

    class Clock(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.network(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    ranks = int(os.environ["WORLD_SIZE"])
    rows = torch.ones(ROWS * ranks * (steps + 1), WIDTH)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, max_steps=steps + 1, logger=False,
        strategy=DDPStrategy(process_group_backend=backend), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Clock()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, ROWS))  # type: ignore[arg-type]
    return [end - begin for begin, end in pairwise(ends)]


LIBRARIES: dict[str, Callable[[int], list[float]]] = {
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "DTensor": _dtensor,
    "torch.distributed.checkpoint": _checkpoint,
    "Accelerate": _accelerate,
    "Trainer": _trainer,
}
OWN_GROUPS: dict[str, Callable[[str, int], list[float]]] = {"Lightning": _lightning}  # by the word that they are given
OPTIONAL = {"Accelerate": "accelerate", "Trainer": "accelerate", "Lightning": "lightning"}  # packages


if __name__ == "__main__":
    main()
