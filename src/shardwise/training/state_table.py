"""Dtypes and measured bytes of what rank 0 holds between steps, said once after the first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.table import Table

from shardwise.checkpoint.host_memory import copied_bytes
from shardwise.kernels.precision import DTYPES
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.display import DisplayConsole
from shardwise.observe.metrics import Record
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.training.setup import AssembledJob

WIDTH = 100
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "8 bits"}


class StateReport(Callback):
    """Says what the state takes, once the first step has made the optimizer's."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Say the table after step 1 of the training."""
        if record["step"] != 1:
            return
        console = DisplayConsole(width=WIDTH)
        with console.capture() as capture:
            console.print(state_table(self._assembled))
        session.note(capture.get().rstrip())


def state_table(assembled: AssembledJob) -> Table:
    """Return a table of dtypes and measured bytes."""
    dtypes, model, optimizer = assembled.plan.dtypes, assembled.model, assembled.optimizer
    packed = [entry for entry in model.tensor_map if entry.packing]
    kept = [entry for entry in model.tensor_map if model.facts.kept_dtype(entry.name)]
    masters = [entry for entry in model.tensor_map if not entry.packing and not model.facts.kept_dtype(entry.name)]
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.module.buffers())
    table = Table(title="state of rank 0", title_justify="left", box=None)
    for column in ("", "dtype", "bytes, measured"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    table.add_row("parameters (master)", dtypes.parameters, f"{_bytes(masters):,}")
    if kept:
        names = sorted({NAMES.get(entry.local.dtype, str(entry.local.dtype)) for entry in kept})
        table.add_row("parameters (not trained)", ", ".join(names), f"{_bytes(kept):,}")
    if packed:
        table.add_row("parameters (packed)", packed[0].packing, f"{_bytes(packed):,}")
    table.add_row("buffers", "as the model", f"{buffers:,}")
    table.add_row("compute", dtypes.compute, "gathered a block at a time" if model.fsdp_modules else "in place")
    table.add_row("gradients", dtypes.reduction, f"{optimizer.gradient_bytes:,}")
    name = assembled.plan.job.optimizer.name
    of_states = ", ".join(NAMES.get(dtype, str(dtype)) for dtype in optimizer.state_dtypes())
    table.add_row(f"optimizer ({name})", of_states or dtypes.optimizer, f"{optimizer.state_bytes():,}")
    if optimizer.host is not None:
        table.add_row("of it in host memory", assembled.plan.offloaded_optimizer, f"{optimizer.host_bytes():,}")
        table.add_row("copies in host memory", dtypes.optimizer, f"{optimizer.host.bytes:,}")
    if model.reference is not None:
        table.add_row("reference (frozen)", dtypes.parameters, f"{_bytes(model.reference.tensor_map):,}")
    if model.ema is not None:
        table.add_row("averaged weights (EMA)", dtypes.parameters, f"{model.ema.bytes:,}")
    if assembled.plan.job.checkpoint.memory_every:
        table.add_row("copies in the host's memory", "as the state", f"{copied_bytes(model, optimizer):,}")
    table.add_row("loss", dtypes.loss, "")
    return table


def state_bytes(assembled: AssembledJob) -> dict[str, int]:
    """Return what this rank holds between steps, measured, by the causes of the planner's prediction."""
    gradients = sum(gradient.numel() * gradient.element_size() for _, gradient in assembled.optimizer.gradients())
    reference, ema = assembled.model.reference, assembled.model.ema
    optimizer, host = assembled.optimizer.state_bytes(), assembled.optimizer.host
    if host is not None:  # a CPU holds what a GPU's host does
        optimizer += host.bytes if assembled.model.device.type == "cpu" else -assembled.optimizer.host_bytes()
    return {
        "parameters": _bytes(assembled.model.tensor_map),
        "gradients": gradients,
        "optimizer": optimizer,
        "reference": 0 if reference is None else _bytes(reference.tensor_map),
        "ema": 0 if ema is None else ema.bytes,
    }


def _bytes(entries: Iterable[ParameterEntry]) -> int:
    return sum(entry.local.numel() * entry.local.element_size() for entry in entries)
