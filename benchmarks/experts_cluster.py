"""The exchange of shared experts between four hosts: two levels over the engine, beside a flat one over Gloo.

    python -m benchmarks.experts_cluster --json result.json          # as root

The hosts are those of `benchmarks.cluster`: eight ranks, two a host, links of 1 Gbit/s. Each rank has 1,024 tokens of
1,024 features in fp32, each for 4 of 16 experts at random, two experts a rank. An exchange sends the tokens to their
experts and their outputs back; the experts themselves return what they get. Both contenders run `SharedExperts`, take
turns, and have to agree bit for bit: all numbers are whole.

The link limit is what has to go through the fullest host's link at 1 Gbit/s, a token once to each host, with nothing
off for headers. It is there and back for an exchange, and there for the rows between hosts alone, which are timed by
themselves too: the four hosts share this machine's cores, and copy inside of themselves one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import CONGESTION, HOSTS, LOCAL_RANKS, RATE, cluster, obstacle, outputs, timed_round
from benchmarks.record import header, write_json

TOKENS, WIDTH = 1024, 1024
EXPERTS, CHOSEN = 16, 4
CONTENDERS = ("shardwise", "gloo", "network")  # the last: rows between hosts alone, over the engine
ROUNDS = 7
ELEMENT = 4  # bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the numbers")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"exchanges of each (default {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a rank (default {TOKENS})")
    parser.add_argument("--congestion", default=CONGESTION, help=f"control of TCP, a kernel's (default {CONGESTION})")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        return _rank(options.rounds, options.tokens)
    problem = obstacle()
    if problem:
        print(f"no cluster here: {problem}")
        return 2
    from shardwise.collectives import engine

    engine.build()
    row = measure(options.rounds, options.tokens, options.congestion)
    print(
        f"{options.tokens} tokens a rank: two levels {row['seconds']['shardwise'] * 1e3:.1f} ms, "
        f"flat over Gloo {row['seconds']['gloo'] * 1e3:.1f} ms, {row['ratio_to_gloo']:.2f} x, "
        f"{row['share_of_link_limit']:.3f} of the link; between hosts alone {row['seconds']['network'] * 1e3:.1f} ms, "
        f"{row['network_share_of_link_limit']:.3f} of it; rows between hosts {row['rows']['once a host']} and "
        f"{row['rows']['once an expert']}"
    )
    if options.json:
        write_json(options.json, header(("torch", "shardwise")) | {"rows": [row]})
    return 0


def measure(rounds: int = ROUNDS, tokens: int = TOKENS, congestion: str = CONGESTION) -> dict[str, Any]:
    """The seconds of both, and what they are of the link's.

    Raises:
        ClusterError: there can be no cluster here, or the two disagree.
    """
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.experts_cluster", "--rank"]
    command += ["--rounds", str(rounds), "--tokens", str(tokens)]
    with cluster(congestion=congestion) as made:
        texts = outputs(made.start_ranks(command, {"PYTHONPATH": path}), timeout=300)
    times = json.loads(texts[0].splitlines()[-1])
    seconds = {name: statistics.median(each[name] for each in times) for name in CONTENDERS}
    rows, busiest = crossing_rows(tokens)
    one_way = busiest * WIDTH * ELEMENT * 8 / RATE
    return {
        "tokens": tokens,
        "congestion": congestion,
        "hosts": HOSTS,
        "ranks": HOSTS * LOCAL_RANKS,
        "seconds": seconds,
        "ratio_to_gloo": statistics.median(each["gloo"] / each["shardwise"] for each in times),
        "share_of_link_limit": 2 * one_way / seconds["shardwise"],
        "network_share_of_link_limit": one_way / seconds["network"],
        "rows": rows,
    }


def chosen_experts(rank: int, tokens: int) -> Any:
    """Return the experts of a rank's tokens, [T, k]."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices


def crossing_rows(tokens: int) -> tuple[dict[str, int], int]:
    """Return the rows between hosts on the way there, and the most that one host's link carries."""
    import torch

    once, each = torch.zeros(HOSTS, HOSTS, dtype=torch.int64), 0
    for rank in range(HOSTS * LOCAL_RANKS):
        host = rank // LOCAL_RANKS
        hosts = chosen_experts(rank, tokens) // (EXPERTS // HOSTS)
        each += int((hosts != host).sum())
        once[host] += torch.stack([(hosts == other).any(1).sum() for other in range(HOSTS)])
    once.fill_diagonal_(0)
    there = torch.maximum(once.sum(0), once.sum(1)).max()  # links are as quick both ways at once
    return {"once a host": int(once.sum()), "once an expert": each}, int(there)


# --- on each rank


def _rank(rounds: int, tokens: int) -> int:
    import torch
    import torch.distributed as dist

    from shardwise.collectives import registration

    registration.register()
    dist.init_process_group("gloo")
    gloo = dist.group.WORLD
    runs = _contenders(tokens)
    with torch.no_grad():
        results = {name: run() for name, run in runs.items()}
        if not torch.equal(results["shardwise"], results["gloo"]):
            raise RuntimeError("two levels and one exchange disagree")
        times = [timed_round(lambda run: run(), runs, gloo) for _ in range(rounds)]
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()
    return 0


def _contenders(tokens: int) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from shardwise.kernels.experts import SortedExperts
    from shardwise.parallel.experts import SharedExperts
    from shardwise.parallel.layout import ExpertLevels

    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = [list(range(first, first + LOCAL_RANKS)) for first in range(0, size, LOCAL_RANKS)]
    everyone = dist.new_group(backend="shardwise")
    local, _ = dist.new_subgroups_by_enumeration(hosts, backend="shardwise")
    cross, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*hosts)], backend="shardwise")
    groups = {"shardwise": ExpertLevels(everyone, local, cross), "gloo": ExpertLevels(dist.group.WORLD)}
    experts = SortedExperts(nn.Module(), lambda rows, numbers, weights: rows)
    generator = torch.Generator().manual_seed(100 + rank)
    hidden = torch.randint(9, (tokens, WIDTH), generator=generator).float()
    weights = torch.randint(1, 9, (tokens, CHOSEN), generator=generator).float()
    chosen = chosen_experts(rank, tokens)
    shared = {name: SharedExperts("experts", experts, EXPERTS, among) for name, among in groups.items()}
    exchange, rows = _between_hosts(cross, hidden, chosen)
    return {
        "shardwise": lambda: shared["shardwise"].run(hidden, chosen, weights),
        "gloo": lambda: shared["gloo"].run(hidden, chosen, weights),
        "network": lambda: exchange.exchange(rows),
    }


def _between_hosts(cross: Any, hidden: Any, chosen: Any) -> tuple[Any, Any]:
    """Return the exchange of rows between hosts, and the rows that this rank sends."""
    import torch

    from shardwise.collectives.experts import RowExchange, exchange_counts
    from shardwise.collectives.names import CollectiveName

    name = CollectiveName("rows", "cross", "all_to_all_single")
    hosts = chosen // (EXPERTS // HOSTS)
    tokens = [(hosts == host).any(1).nonzero()[:, 0] for host in range(HOSTS)]
    sent = torch.tensor([len(of_host) for of_host in tokens])
    received = exchange_counts(sent, cross, name)[:, 0]
    return RowExchange(cross, name, sent.tolist(), received.tolist()), hidden[torch.cat(tokens)]


if __name__ == "__main__":
    sys.exit(main())
