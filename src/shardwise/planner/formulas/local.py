"""The cluster that a running world is, for predictions about it; and constants that were measured on this machine.

`shardwise plan calibrate` without a table writes them (`MachineConstants`) into the cache; a CPU has no datasheet, so
that without them there is nothing to predict from.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from shardwise.plan.draft import World
from shardwise.planner.constants.hardware import Accelerator, find_accelerator
from shardwise.planner.constants.inventory import CPU, cluster, own_stack
from shardwise.planner.formulas.prediction import Cluster, Fabric, Stack
from shardwise.planner.published.calibrate_spread import USUAL, USUAL_ROWS, Prior, alike, probed

# How a process grows on a machine that was not measured: that of two cores of a Xeon, glibc's allocator, torch 2.13.
USUAL_GROWTH, USUAL_GROWTH_SHARE = 66.0 * 2**20, 0.23


@dataclass(frozen=True)
class MachineConstants:
    """The rates of this machine's CPU, of one process of so many.

    tflops: fp32 matrix products, by number of processes that share the cores. bandwidth: GB/s of memory, likewise.
    link: GB/s of a collective's traffic between processes; hop_seconds: of one hop. step_factor: measured step time of
    short trainings against the prediction with the constants above, by number of processes. growth: bytes that a
    process takes in its first steps beside what the closed form counts. growth_share: and of its activations.
    source: when and how.
    """

    tflops: dict[int, float]
    bandwidth: dict[int, float]
    link: float
    hop_seconds: float
    step_factor: dict[int, float]
    growth: float
    source: str
    growth_share: float = 0.0

    def rate(self, of: dict[int, float], ranks: int) -> float:
        """A rate of one of `ranks` processes: its share of what the nearest number that was measured does together."""
        known = _nearest(of, ranks)
        return of[known] * known / ranks

    def factor(self, ranks: int) -> float:
        """The correction of a step of `ranks` processes: that of the nearest number that was measured."""
        return self.step_factor[_nearest(self.step_factor, ranks)]


def _nearest(of: dict[int, float], ranks: int) -> int:
    return min(of, key=lambda count: (abs(count - ranks), count))


def constants_path() -> Path:
    """Return the file in which this machine's constants are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardwise" / f"machine-{platform.node() or 'local'}.json"


def machine_constants() -> MachineConstants | None:
    """Return what was measured here; None where nothing was, or the file is not what was written."""
    try:
        data = json.loads(constants_path().read_text(encoding="utf-8"))
        for name in ("tflops", "bandwidth", "step_factor"):
            data[name] = {int(key): float(value) for key, value in data[name].items()}
        return MachineConstants(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def keep_constants(constants: MachineConstants) -> Path:
    """Write them where `machine_constants` looks."""
    path = constants_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(constants), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def cluster_of(world: World) -> Cluster | None:
    """The cluster of a running world; None for an accelerator that is not in the table or not a rank's own."""
    if world.device_type == "cpu":
        return cpu_cluster(world.size)
    if world.shares_gpus or find_accelerator(world.accelerator) is None:
        return None
    named = cluster(f"{world.accelerator}:{world.size}")
    return replace(named, nodes=world.hosts, per_node=world.local_size)


def cpu_cluster(ranks: int, constants: MachineConstants | None = None) -> Cluster:
    """`ranks` processes that share this machine's cores and memory."""
    memory = psutil.virtual_memory().total // ranks
    named = cluster(f"cpu:{ranks}")
    constants = constants or machine_constants()
    if constants is None:
        return replace(named, accelerator=replace(CPU, memory_bytes=memory))
    rate = constants.rate(constants.tflops, ranks)
    measured: Accelerator = replace(
        CPU, memory_bytes=memory, fp64=rate / 2, fp32=rate, fp16=rate / 2, bf16=rate / 2,
        bandwidth=constants.rate(constants.bandwidth, ranks), matmul=1.0, memory_bound=1.0,
    )  # fmt: skip
    link = Fabric("measured", 1.0, constants.hop_seconds)
    return replace(named, accelerator=measured, intra=constants.link, link=link)


def is_calibrated(world: World) -> bool:
    """Return whether predictions of time mean anything: a CPU has to have been measured."""
    return world.device_type != "cpu" or machine_constants() is not None


def growth(activations: float) -> float:
    """Bytes that a process takes in its first steps beside what the closed form, with these activations, counts."""
    constants = machine_constants()
    if constants is None:
        return USUAL_GROWTH + USUAL_GROWTH_SHARE * activations
    return constants.growth + constants.growth_share * activations


def stack_here(world: World) -> Stack:
    """Shardwise's constants; on a CPU that was measured with its own correction of a step, and the spread it leaves."""
    stack, constants = own_stack(), machine_constants()
    if world.device_type != "cpu" or constants is None:
        return stack
    measured = probed([alike(0.0, 0.0)], Prior(USUAL, USUAL, stack.wait_spread, USUAL_ROWS))
    return replace(stack, spread=measured.spread, step_factor=constants.factor(world.size))
