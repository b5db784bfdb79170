"""The cluster of a row: its accelerator by name and memory, its nodes and the links between them."""

from __future__ import annotations

import re
from dataclasses import replace

from shardwise.planner.constants.hardware import ACCELERATORS, GIB, USABLE, Accelerator, find_accelerator
from shardwise.planner.constants.inventory import fabrics, link_of, usual_network
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.published.row import Row, Unmapped

_FABRICS = {  # the first whose pattern a row's words match
    "efa-v4": re.compile(r"\bp6e?\b", re.IGNORECASE),
    "efa-v3": re.compile(r"\bp5en\b", re.IGNORECASE),
    "efa": re.compile(r"\bEFA\b|\bp[345]d?[en]?n?\b|SMDDP|amazon", re.IGNORECASE),
}


def cluster_of_row(row: Row, model_ranks: int) -> Cluster:
    """Return the cluster of `row`, as many accelerators on each node. `model_ranks`: those of one data rank."""
    device = accelerator_of(row)
    if device is None:
        raise Unmapped(f"gpu={row.text['gpu']!r} is not a known accelerator")
    whole = row.whole("gpus_per_node", 8)
    ranks = row.whole("n_gpus", row.whole("dp", 1) * model_ranks)
    nodes = -(-ranks // whole)
    while ranks % nodes:  # as many ranks on each node
        nodes += 1
    words = " ".join(row.text.get(column, "") for column in ("collectives", "assumed", "notes", "table", "url"))
    fabric = fabrics()[next((name for name, pattern in _FABRICS.items() if pattern.search(words)), "rdma")]
    inter = row.number("inter_Gbps_per_node", usual_network(device)) / 8
    in_use = min(1.0, ranks / nodes / whole)  # of a node, and with its accelerators of the adapters beside them
    intra = row.number("intra_GBps_per_gpu", device.link)
    return Cluster(
        name=row.text["gpu"],
        accelerator=device,
        nodes=nodes,
        per_node=ranks // nodes,
        intra=intra,
        inter=inter * in_use,
        link=link_of(intra),
        fabric=fabric,
    )


def accelerator_of(row: Row) -> Accelerator | None:
    """Return the part that `gpu` names, or None.

    `A100-40`, `8x H100`, `H100-96-500W`: the part of nearest memory; a stated power limit slows it.
    """
    text = re.sub(r"(?i)^\d+ ?[x*] ?", "", row.text["gpu"]).replace("_", " ")
    sheet = find_accelerator(text)
    if sheet is None:
        return None
    words = [word.upper() for word in re.split(r"[- ]+", text)]
    alike = [part for part in ACCELERATORS if part.name.split()[0] == sheet.name.split()[0] and sheet.name[:3] != "RTX"]
    parts = alike or [sheet]
    sizes = {f"{part.memory_bytes / GIB / USABLE:.0f}": part.memory_bytes / GIB for part in parts}
    stated = next(
        (sizes[size] for word in words if (size := word.removesuffix("GB")) in sizes), parts[0].memory_bytes / GIB
    )
    memory = row.numbers.get("gpu_mem_gb", stated)
    special = {part: set(part.name.upper().split()) & {"PCIE", "NVL"} for part in parts}
    said = {"PCIE", "NVL"}.intersection(words)
    wanted = [part for part in parts if said and special[part] == said] or [part for part in parts if not special[part]]
    part = min(wanted or parts, key=lambda variant: abs(variant.memory_bytes / GIB - memory))
    watts = next((float(word[:-1]) for word in words if re.fullmatch(r"\d+W", word)), part.watts)
    size = int(row.numbers["gpu_mem_gb"] * GIB * USABLE) if "gpu_mem_gb" in row.numbers else part.memory_bytes
    return replace(part, memory_bytes=size, watts=watts, matmul=part.matmul * (watts / part.watts) ** POWER)


POWER = 0.4  # exponent of the rate of matrix products against the power limit
