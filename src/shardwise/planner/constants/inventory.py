"""The planner's inventory by name: clusters, stacks and model presets, read from the data files beside it.

Three kinds of constants are kept apart: what an accelerator does (data/accelerators.json), what a fabric does
(data/fabrics.json), and what a software stack makes of them (data/constants.json, which also
holds the factors that were fitted on accelerators). Clusters (data/clusters.json) are what their vendors say: AWS's
types those of "Amazon EC2 instance types" (accelerated computing, network specifications, EFA) and of the launch posts
of P5en, P6-B200, P6-B300 and P6e-GB200 (28.8 Tbit/s for 72 accelerators); the others those of NVIDIA's data sheets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job.sources import parse_yaml
from shardwise.planner.constants.hardware import ACCELERATORS, GIB, USABLE, Accelerator, find_accelerator, read_data
from shardwise.planner.formulas.prediction import Cluster, Fabric, ModelShape, Stack, TrainingConfiguration
from shardwise.words import nearest, nearest_file

NVLINK4, PCIE = 400, 100  # GB/s, one direction, from which on links are the former and up to which the latter
OTHER_CHIPS = ("trn", "inf", "ml.trn", "ml.inf")  # of AWS; torch needs a backend of its own for them
# What a release may not have of another's: whose graphs made all launches says nothing of launches one by one, and
# experts' kernels are written anew.
OF_RELEASE = ("launch", "grouped", "sorting", "expert_exposed")
CPU = Accelerator("CPU", r"^cpu$", 16 * GIB, fp64=0.05, fp32=0.1, fp16=0.05, bf16=0.05, bandwidth=20, units=1)


@cache
def fabrics() -> dict[str, Fabric]:
    rows = read_data("fabrics")
    return {
        name: Fabric(name, row["bandwidth"], row["hop_seconds"], row.get("exchange", 0.0)) for name, row in rows.items()
    }


def link_of(intra: float) -> Fabric:
    """The kind of link inside a node that has so many GB/s, one direction: NVLink 4 and later, before, or PCIe."""
    return fabrics()["nvlink4" if intra >= NVLINK4 else "nvlink" if intra > PCIE else "pcie"]


@dataclass(frozen=True)
class Constants:
    """Fitted: stacks by name, with `default`; factors on the rate of products by accelerator family (`*`: others)."""

    accelerators: Mapping[str, float]
    stacks: Mapping[str, Stack]

    def stack(self, name: str) -> Stack:
        """The constants fitted for a stack, or for the last other release of its software; else those of `default`.

        How far a release departs from another is not known, so intervals are as wide as between the two, and what
        is only a release's (`OF_RELEASE`) is the default's.
        """
        if name in self.stacks:
            return self.stacks[name]
        default = self.stacks["default"]
        others = [other for other in self.stacks if other != "default" and software_of(other) == software_of(name)]
        if not others:
            return replace(default, name=name)
        other = self.stacks[max(others)]
        wider = math.sqrt((other.spread**2 + default.spread**2) / 2)
        return replace(other, name=name, spread=wider, **{key: getattr(default, key) for key in OF_RELEASE})

    def device(self, given: Accelerator) -> Accelerator:
        """`given` with the fitted rate of its family."""
        factor = self.accelerators.get(family(given), self.accelerators.get("*", 1.0))
        return replace(given, matmul=given.matmul * factor)

    def applied(self, given: TrainingConfiguration) -> TrainingConfiguration:
        """`given`, made with an accelerator as in the table, under these constants."""
        cluster = replace(given.cluster, accelerator=self.device(given.cluster.accelerator))
        return replace(given, cluster=cluster, stack=self.stack(given.stack.name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; `read_constants` reads it."""
        rows = {
            name: {key: value for key, value in asdict(stack).items() if key != "name"}
            for name, stack in self.stacks.items()
        }
        return {"accelerators": dict(self.accelerators), "stacks": rows}


def software_of(stack: str) -> str:
    """Return a stack's name without its release: what stands before the first digit, in lower case."""
    return re.sub("[^a-z]", "", re.split(r"\d", stack.lower())[0])


def constants_of(data: dict[str, Any]) -> Constants:
    """Return the constants that `Constants.to_dict` made plain data of."""
    stacks = {name: Stack(name, **row) for name, row in data["stacks"].items()}
    return Constants(data["accelerators"], stacks)


@cache
def shipped() -> Constants:
    """The constants that come with the package."""
    return constants_of(read_data("constants"))


def read_constants(path: Path) -> Constants:
    """A file that `shardwise plan calibrate` wrote. Raises ConfigError."""
    try:
        constants = constants_of(json.loads(path.read_text()))
        constants.stacks["default"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"constants={path}: {error!r}; a file written by `shardwise plan calibrate` is needed"
        ) from error
    return constants


def family(given: Accelerator) -> str:
    """Accelerators that share a rate of products: A100 40GB and 80GB."""
    return given.name.split()[0]


def stack_of(name: str) -> Stack:
    """The shipped constants of a stack, or of `default`."""
    return shipped().stack(name)


def own_stack() -> Stack:
    """The constants of shardwise: the default's, but nothing hides exchanges of tensor ranks and of experts."""
    return replace(stack_of("shardwise"), tensor_exposed=1.0, expert_exposed=1.0)


@cache
def presets() -> dict[str, ModelShape]:
    """Named models."""
    return {name: preset_shape(name, row) for name, row in read_data("models").items()}


def preset_shape(name: str, row: dict[str, Any]) -> ModelShape:
    return ModelShape(name=name, **{"key_value_heads": row["heads"], **row})


def accelerator(name: str) -> Accelerator:
    """Return an accelerator by its name in the table or torch's name of the device. Raises ConfigError."""
    wanted = name.lower().replace("-", " ").strip()
    known = {sheet.name.lower(): sheet for sheet in ACCELERATORS}
    device = known.get(wanted) or known.get(f"{wanted} sxm") or find_accelerator(name)
    if device is None:
        raise ConfigError(f"accelerator={name!r} is not known.{nearest(name, [sheet.name for sheet in ACCELERATORS])}")
    return shipped().device(device)


def cluster(text: str) -> Cluster:
    """A cluster: `p5.48xlarge:16` (16 nodes), `h200:4` (4 accelerators), `cpu:4` (4 processes), or a YAML file.

    SageMaker's names of instance types (`ml.p5.48xlarge`) are taken too. A file's keys: accelerator, or `instance` (a
    type of which the other keys are taken where they are not given), nodes, per_node, intra (GB/s of one accelerator,
    one direction; unset: its own links'), inter_gbps (Gbit/s of a node; unset: as in the vendor's machines), link and
    fabric (names of data/fabrics.json), memory_gb (of one accelerator; unset on a CPU: its share of host_gb), host_gb
    (of a node's own memory; unset: what is offloaded is taken to fit), cpus and efa (of a node; for `shardwise
    launch`), domain (accelerators that the links join across nodes, 72 in NVL72). Raises ConfigError.
    """
    if Path(text).suffix in (".yaml", ".yml"):
        return _from_file(Path(text))
    name, _, count = text.partition(":")
    if not (count or "1").isdecimal() or int(count or 1) < 1:
        raise ConfigError(f"cluster={text!r}: {count!r} is no count of nodes; write e.g. p5.48xlarge:16")
    return _named(name.lower(), int(count or 1))


def instance_row(name: str) -> dict[str, Any]:
    """Return what is known of an instance type, with or without SageMaker's `ml.`. Raises ConfigError."""
    known: dict[str, dict[str, Any]] = read_data("clusters")
    plain = name.lower().removeprefix("ml.")
    if plain.startswith(OTHER_CHIPS):
        raise ConfigError(f"instance type {name!r} has chips of AWS, for which there is no backend here; use GPUs")
    if "." not in plain or plain not in known:
        types = [row for row in known if "." in row]
        raise ConfigError(
            f"instance type {name!r} is not known.{nearest(plain, types)} A cluster file can describe any other"
        )
    return known[plain]


def _named(name: str, count: int) -> Cluster:
    known: dict[str, dict[str, Any]] = read_data("clusters")
    if name == "cpu":
        return Cluster("cpu", CPU, 1, count, 5.0, 1.0, fabrics()["shared-memory"], fabrics()["ethernet"])
    if name.startswith(("ml.", *OTHER_CHIPS)):
        return _cluster(name.removeprefix("ml."), instance_row(name), count)
    if name not in known and find_accelerator(name) is None:
        raise ConfigError(f"cluster={name!r} is not known.{nearest(name, [*known, 'cpu'])}")
    row = known.get(name, {"accelerator": name, "per_node": 8, "host_gb": 0.0})
    if "." in name or name.startswith("dgx") or "domain" in row:
        return _cluster(name, row, count)
    per_node = min(row["per_node"], count)
    if count % per_node:
        raise ConfigError(f"cluster={name}:{count}: {count} accelerators do not fill nodes of {per_node}")
    host = row["host_gb"] * per_node / row["per_node"]
    return _cluster(name, {**row, "per_node": per_node, "host_gb": host}, count // per_node)


def usual_network(part: Accelerator) -> float:
    """Gbit/s of a node where nobody says it: that of the vendor's own machines with this part, or of those like it."""
    rows = [row for row in read_data("clusters").values() if row["fabric"] == "rdma"]
    own = [row["inter_gbps"] for row in rows if row["accelerator"] == part.name]
    return float(max(own, default=3200 if part.link >= NVLINK4 else 800 if part.link > PCIE else 100))


def _cluster(name: str, row: dict[str, Any], nodes: int) -> Cluster:
    on_cpu = row["accelerator"].lower() == "cpu"
    device = CPU if on_cpu else accelerator(row["accelerator"])
    if "memory_gb" in row:
        device = replace(device, memory_bytes=int(row["memory_gb"] * GIB * USABLE))
    elif on_cpu and row.get("host_gb"):  # which the processes of a node share
        device = replace(device, memory_bytes=int(row["host_gb"] * GIB / row.get("per_node", 8)))
    intra, inter = row.get("intra", device.link), row.get("inter_gbps", usual_network(device)) / 8
    own_link = fabrics()["shared-memory"] if on_cpu else link_of(intra)
    return Cluster(
        name, device, nodes, row.get("per_node", 8), intra, inter,
        link=_fabric(row["link"], "link") if "link" in row else own_link,
        fabric=_fabric(row.get("fabric", "rdma"), "fabric"),
        host_gb=row.get("host_gb", 0.0), cpus=int(row.get("cpus", 0)), efa=int(row.get("efa", 0)),
        instance=row.get("instance", name if "." in name else ""), domain=int(row.get("domain", 0)),
    )  # fmt: skip


def _fabric(name: str, key: str) -> Fabric:
    if name not in fabrics():
        raise ConfigError(f"{key}={name!r} is no known fabric.{nearest(name, fabrics())}")
    return fabrics()[name]


_WORDS = ("accelerator", "instance", "link", "fabric")
_COUNTS = ("nodes", "per_node", "cpus", "efa", "domain")
_KEYS = (*_WORDS, *_COUNTS, "intra", "inter_gbps", "memory_gb", "host_gb")


def _from_file(path: Path) -> Cluster:
    try:
        row = parse_yaml(path.read_text(encoding="utf-8"), f"cluster={path}")
    except FileNotFoundError:
        raise ConfigError(f"cluster={path} does not exist.{nearest_file(path, '.yaml', '.yml')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster={path}: {error}") from error
    if not isinstance(row, dict) or not {"accelerator", "instance"} & set(row):
        raise ConfigError(
            f"cluster={path}: a mapping with at least `accelerator` or `instance` is needed; keys: {', '.join(_KEYS)}"
        )
    for key, value in row.items():
        if key not in _KEYS:
            raise ConfigError(f"cluster={path}: unknown key {key!r}.{nearest(str(key), _KEYS)}")
        if key in _WORDS and not isinstance(value, str):
            raise ConfigError(f"cluster={path}: {key}={value!r} has to be a name")
        if key not in _WORDS and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ConfigError(f"cluster={path}: {key}={value!r} has to be a number above 0")
        if key in _COUNTS and value != int(value):
            raise ConfigError(f"cluster={path}: {key}={value!r} has to be a whole number")
    if "instance" in row:
        row = {**instance_row(row["instance"]), **row, "instance": row["instance"].lower().removeprefix("ml.")}
    return _cluster(path.stem, row, int(row.get("nodes", 1)))
