"""One model at one sequence length on one device: the micro-batch ladder, then interleaved rounds.

Runs in a process of its own, so that one case that fails leaves the others alone; everything measured is sent to the
parent at once. Contenders do not fit into the device together: each is built anew for each of its turns and freed
after it.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_contenders import BUILDERS, IdStep
from benchmarks.gpu_models import build, flops_per_token, model_config

Send = Callable[[str, Any], None]


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    family: str
    size: str
    sequence: int
    device: str
    contenders: tuple[str, ...]
    ladder: tuple[int, ...]
    rounds: int
    steps: int
    warmup: int
    compile_mode: str
    product: int  # side of the matrices of the peak measurement
    base: str = ""  # contender that the others are held against; "" is shardwise
    memory_bytes: int | None = None  # of the device; None is all of it

    @property
    def name(self) -> str:
        return f"{self.family} {self.size}, sequence {self.sequence}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory is full; compilers and cuBLAS wrap it in types of their own."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def run_case(case: Case, send: Send) -> None:
    """Measure `case` and send ("flops_per_token", x), ("limit", FLOP/s), ("ladder" | "turn" | "failed", {...})."""
    from shardwise.launch.process_group import process_group

    with process_group(case.device, "nccl" if case.device == "cuda" else "gloo") as device:
        if device.type == "cuda" and case.memory_bytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.memory_bytes / whole), device)
        config = model_config(case.family, case.size, case.sequence)
        with torch.device("meta"):
            send("flops_per_token", flops_per_token(build(config, torch.device("meta")), config, case.sequence))
        batches: dict[str, int] = {}
        for name in case.contenders:
            with _reported(name, send):
                found = climb(case, config, device, name, batches.get(name.removesuffix("-compile")))
                send("ladder", {"contender": name, **found})
                if found["microbatch"]:
                    batches[name] = found["microbatch"]
        for number in range(case.rounds):
            send("limit", product_rate(case.product, device))
            for name in _rotated([name for name in case.contenders if name in batches], number):
                with _reported(name, send):
                    send("turn", {"contender": name, **take_turn(case, config, device, name, batches[name])})


def climb(case: Case, config: Any, device: torch.device, name: str, known: int | None) -> dict[str, Any]:
    """The largest micro-batch of the ladder that trains two steps.

    `known` is what fitted without compilation: a compiled contender starts there, because every size costs it a
    compilation, and steps down only where that does not fit.
    """
    ladder = sorted(case.ladder)
    start = ladder.index(known) if known in ladder else 0
    best, first_loss, reason = 0, None, ""
    upward = ladder[start:]
    for size in upward:
        loss, reason = _attempt(case, config, device, name, size)
        if loss is None:
            break
        best, first_loss = size, loss if size == ladder[0] else first_loss
    for size in reversed(ladder[:start]):
        if best:
            break
        loss, reason = _attempt(case, config, device, name, size)
        best = size if loss is not None else 0
    return {"microbatch": best, "first_loss": first_loss, "stopped_by": reason}


def _attempt(case: Case, config: Any, device: torch.device, name: str, size: int) -> tuple[float | None, str]:
    """(first loss, "") of two steps at micro-batch `size`, or (None, why it ran out of memory)."""
    reason = ""
    try:
        step = _build(case, config, device, name)
        ids = token_ids(config, size, case.sequence, device)
        loss = float(step(ids))
        step(ids)
        _synchronize(device)
        return loss, ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = f"micro-batch {size}: {str(error).splitlines()[0][:200]}"
    finally:
        step = ids = None  # type: ignore[assignment]
        _free(device)
    return None, reason


def take_turn(case: Case, config: Any, device: torch.device, name: str, size: int) -> dict[str, Any]:
    """Build, warm up, time `steps` steps, free; seconds of a step and peak memory."""
    try:
        step = _build(case, config, device, name)
        ids = token_ids(config, size, case.sequence, device)
        for _ in range(case.warmup):
            step(ids)
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for _ in range(case.steps):
            loss = step(ids)
        _synchronize(device)
        seconds = (time.perf_counter() - start) / case.steps
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {"seconds": seconds, "tokens": ids.numel(), "peak_memory_bytes": peak, "last_loss": float(loss)}
    finally:
        step = ids = loss = None  # type: ignore[assignment]
        _free(device)


def _build(case: Case, config: Any, device: torch.device, name: str) -> IdStep:
    builder, compiled = BUILDERS[name]
    return builder(config, device, case.compile_mode if compiled else None)


def token_ids(config: Any, size: int, sequence: int, device: torch.device) -> Tensor:
    """[size, sequence] random ids, the same for every contender; a larger batch begins with the smaller one's rows."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(config.vocab_size, (sequence,), generator=generator) for _ in range(size)]).to(
        device
    )


def product_rate(side: int, device: torch.device, repeats: int = 20) -> float:
    """FLOP/s of a bf16 product of two [side, side] matrices, the median of single products."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    times = []
    for _ in range(repeats + 5):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2.0 * side**3 / sorted(times[5:])[repeats // 2]


def _rotated(names: Sequence[str], by: int) -> list[str]:
    shift = by % max(1, len(names))
    return [*names[shift:], *names[:shift]]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    """Give everything back; compiled code too, or it would hold the model it was made for."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _reported(name: str, send: Send) -> Iterator[None]:
    """An error of one contender is sent and does not end the case."""
    try:
        yield
    except Exception as error:
        what = "out of memory" if is_out_of_memory(error) else traceback.format_exc(limit=-4)
        send("failed", {"contender": name, "reason": what})
