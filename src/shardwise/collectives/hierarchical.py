"""Two-level collectives as a backend of torch.distributed, over Gloo, NCCL or the native engine.

    name = hierarchical.register_two_levels("measured", between="gloo", inside="shardwise")
    torch.distributed.init_process_group(name)

Every group that is made then looks at its ranks' hosts. Where it has several hosts with equally many ranks, and more
than one on each, all-gather, reduce-scatter and all-reduce take what the group's table says (`choice.py`): flat, or the
two levels of `two_level.py`. Everything else, and groups of another shape, run flat on `between`.

`around` does the same for a group that exists, for FSDP2's communication objects (`fsdp.py`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import (
    add_backends,
    all_gather_base,
    all_gather_whole,
    backends_of,
    default_store,
    reduce_scatter_base,
    reduce_scatter_whole,
)
from shardwise.collectives import carriers, choice
from shardwise.collectives.carriers import GroupMember
from shardwise.collectives.choice import Algorithm, AlgorithmTable, Operation
from shardwise.collectives.topology import Topology, discover_topology
from shardwise.collectives.turns import Turns
from shardwise.collectives.two_level import TwoLevel, can_reduce
from shardwise.errors import ConfigError

Choice = Literal["measured", "flat", "two_level", "direct"]
TIMEOUT = timedelta(minutes=10)  # torch's own for NCCL


class Hierarchy:
    """The two levels of a group beside its flat form, and which of them a call takes.

    The operations return None where the table says flat or the tensors cannot be moved in two levels; the caller then
    makes the flat call. That is decided on the caller's thread, so that flat calls keep their order.
    """

    def __init__(self, levels: TwoLevel, table: AlgorithmTable, turns: Turns) -> None:
        self.levels, self.table, self.turns = levels, table, turns

    def all_gather(self, outputs: Sequence[Tensor], pieces: Sequence[Tensor], blocking: bool) -> dist.Work | None:
        """Pieces [c] of all ranks to outputs [n * c], pair by pair."""
        algorithm = self._algorithm("all_gather", outputs)
        pairs = list(zip(outputs, pieces, strict=True))
        if algorithm == "flat" or not all(self._fits(output, piece) for output, piece in pairs):
            return None

        def operation() -> None:
            for output, piece in pairs:
                self.levels.all_gather(output, piece, algorithm == "direct")

        return self.turns.run(operation, pieces, outputs, blocking)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], reduction: Any, blocking: bool
    ) -> dist.Work | None:
        """Wholes [n * c], reduced over the ranks, to outputs [c] by rank, pair by pair."""
        algorithm, reduction = self._algorithm("reduce_scatter", wholes), _kind(reduction)
        pairs = list(zip(outputs, wholes, strict=True))
        fits = all(self._fits(whole, output) and can_reduce(whole, reduction) for output, whole in pairs)
        if algorithm == "flat" or not fits:
            return None

        def operation() -> None:
            for output, whole in pairs:
                self.levels.reduce_scatter(output, whole, reduction, algorithm == "direct")

        return self.turns.run(operation, wholes, outputs, blocking)

    def all_reduce(self, tensors: Sequence[Tensor], reduction: Any, blocking: bool) -> dist.Work | None:
        """Each of `tensors` reduced over the ranks, in place."""
        if any(tensor.layout != torch.strided for tensor in tensors):
            return None  # sparse ones
        algorithm, reduction = self._algorithm("all_reduce", tensors), _kind(reduction)
        fits = all(t.numel() and t.is_contiguous() and can_reduce(t, reduction) for t in tensors)
        if algorithm == "flat" or not fits:
            return None

        def operation() -> None:
            for tensor in tensors:
                self.levels.all_reduce(tensor, reduction, algorithm == "direct")

        return self.turns.run(operation, tensors, tensors, blocking)

    def close(self) -> None:
        """End the thread and the groups of the levels."""
        self.turns.close()
        self.levels.local.shutdown()
        self.levels.cross.shutdown()

    def _algorithm(self, operation: Operation, wholes: Sequence[Tensor]) -> Algorithm:
        return self.table.algorithm(operation, sum(whole.nbytes for whole in wholes))

    def _fits(self, whole: Tensor, piece: Tensor) -> bool:
        """Return True if the flat operation would take the pair, as far as the levels ask for it."""
        same = whole.dtype == piece.dtype and whole.device == piece.device
        contiguous = whole.is_contiguous() and piece.is_contiguous()
        return same and contiguous and piece.numel() > 0 and whole.numel() == self.levels.size * piece.numel()


def _flat(name: str) -> Callable[..., Any]:
    def call(self: HierarchicalGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.flat, name)(*arguments, **keywords)

    return call


class HierarchicalGroup(dist.ProcessGroup):
    """A process group that takes two levels where its table says so, and is flat otherwise.

    Operations that are not here go to the backends of `flat` by its C++ base. Those that C++ looks up in Python have to
    be here: where there is none, it calls its own with Python's lock held, for which a thread of Gloo may be waiting
    with Gloo's lock held (torch 2.13, PyProcessGroup.hpp).
    """

    def __init__(self, member: GroupMember, flat: dist.ProcessGroup, hierarchy: Hierarchy) -> None:
        super().__init__(member.rank, member.size)  # type: ignore[call-arg]
        add_backends(self, backends_of(flat))
        self.flat, self.hierarchy = flat, hierarchy

    def all_gather_single(self, output: Tensor, piece: Tensor, options: Any = None) -> Any:
        work = self.hierarchy.all_gather([output], [piece], _blocking(options))
        return work or all_gather_base(self.flat, output, piece, *_given(options))

    def all_gather_single_coalesced(self, outputs: list[Tensor], pieces: list[Tensor], options: Any = None) -> Any:
        work = self.hierarchy.all_gather(outputs, pieces, _blocking(options))
        return work or self.flat.allgather_into_tensor_coalesced(outputs, pieces, *_given(options))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        work = self.hierarchy.reduce_scatter([output], [whole], _reduction(options), _blocking(options))
        return work or reduce_scatter_base(self.flat, output, whole, *_given(options))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], options: Any = None) -> Any:
        work = self.hierarchy.reduce_scatter(outputs, wholes, _reduction(options), _blocking(options))
        return work or self.flat.reduce_scatter_tensor_coalesced(outputs, wholes, *_given(options))

    def allreduce(self, tensors: list[Tensor] | Tensor, options: Any = None) -> Any:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        work = self.hierarchy.all_reduce(tensors, _reduction(options), _blocking(options))
        return work or self.flat.allreduce(tensors, *_given(options))

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        work = self.hierarchy.all_reduce(tensors, _reduction(options), _blocking(options))
        return work or self.flat.allreduce_coalesced(tensors, *_given(options))

    broadcast = _flat("broadcast")
    allgather = _flat("allgather")
    reduce_scatter = _flat("reduce_scatter")
    all_to_all_single = _flat("alltoall_base")
    barrier = _flat("barrier")
    send = _flat("send")
    recv = _flat("recv")

    # The names of torch before 2.13, which it still calls in places.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def shutdown(self) -> None:
        self.hierarchy.close()
        self.flat.shutdown()


def backend_name(algorithm: str, between: str, inside: str) -> str:
    """The backend's name for a choice: `direct_gloo_shardwise`; of flat collectives that of `between`."""
    return between if algorithm == "flat" else f"{algorithm}_{between}_{inside}"


def parts_of(name: str) -> tuple[str, str, str]:
    """(algorithm, between, inside) of a backend's name; of one that is not ours it is flat."""
    parts = name.rsplit("_", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("flat", name, name)


def register_two_levels(algorithm: str, between: str, inside: str) -> str:
    """Make a backend of torch.distributed for this choice and return its name; a second call does nothing.

    Args:
        algorithm: for everything, or `measured`: a group's table is measured when it is made, or read from the cache.
        between: what carries flat operations and those between hosts, one of `carriers.NAMES`.
        inside: what carries operations inside a host.

    Raises:
        ConfigError: there is no such algorithm or carrier.
    """
    for word, words in ((algorithm, get_args(Choice)), (between, carriers.NAMES), (inside, carriers.NAMES)):
        if word not in words:
            raise ConfigError(f"{word!r} is none of {', '.join(words)}")
    name = backend_name(algorithm, between, inside)
    if algorithm != "flat" and not hasattr(dist.Backend, name.upper()):
        devices = ["cpu"] if between == carriers.GLOO else ["cpu", "cuda"]
        create = partial(_create, algorithm, between, inside)
        dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    return name


def around(group: dist.ProcessGroup, algorithm: Choice, timeout: timedelta = TIMEOUT) -> Hierarchy | None:
    """The two levels of a group of torch.distributed's own; None where its shape has none. Collective.

    Raises:
        ConfigError: its backend is none that parts of it could be made of.
    """
    backend = dist.get_backend(group)
    names = [name for name in carriers.NAMES if name in backend]
    if not names:
        raise ConfigError(f"backend {backend!r} has no two-level form; use one of {', '.join(carriers.NAMES)}")
    carrier = carriers.NCCL if carriers.NCCL in names else names[0]
    members = tuple(dist.get_process_group_ranks(group))
    member = GroupMember(dist.PrefixStore("two_level", group.get_group_store()), group.rank(), members, timeout)
    return _hierarchy(member, group, algorithm, carrier, carrier)


def _create(algorithm: str, between: str, inside: str, options: Any, backend_options: Any) -> dist.ProcessGroup:
    """A group; called by torch on each member with the group's own store."""
    member = GroupMember.of(options)
    flat = carriers.make(between, member.among("flat", list(range(member.size))))
    hierarchy = _hierarchy(member, flat, algorithm, between, inside)
    return flat if hierarchy is None else HierarchicalGroup(member, flat, hierarchy)


def _hierarchy(
    member: GroupMember, flat: dist.ProcessGroup, algorithm: str, between: str, inside: str
) -> Hierarchy | None:
    if algorithm == "flat":
        return None
    topology = discover_topology(member.store, member.rank, member.size)
    if not has_two_levels(topology):
        _say_why_flat(topology, member.rank)
        return None
    levels = _levels(member, topology, between, inside)
    if algorithm != "measured":
        return Hierarchy(levels, AlgorithmTable.given(algorithm), Turns())
    device = torch.device("cuda" if between == carriers.NCCL else "cpu")
    shape = (between, levels.local.name(), device.type, topology.hosts)
    return Hierarchy(levels, _measured(member, flat, levels, shape, sorted(topology.identities), device), Turns())


def has_two_levels(topology: Topology) -> bool:
    """Return True if there are several hosts with equally many ranks, more than one on each."""
    return len(topology.hosts) > 1 and topology.is_uniform and len(topology.hosts[0]) > 1


def _say_why_flat(topology: Topology, rank: int) -> None:
    """One line where a group has unequally many ranks on its hosts; other shapes are flat by nature."""
    if rank == 0 and not topology.is_uniform:
        spread = " and ".join(str(len(ranks)) for ranks in topology.hosts)
        text = (
            f"collectives of these {sum(map(len, topology.hosts))} ranks stay flat: their hosts have {spread} of them"
        )
        warnings.warn(text, stacklevel=2)


def _levels(member: GroupMember, topology: Topology, between: str, inside: str) -> TwoLevel:
    host, index = topology.node_index(member.rank), topology.local_index(member.rank)
    beside, across = list(topology.hosts[host]), [ranks[index] for ranks in topology.hosts]
    places = [(topology.node_index(rank), topology.local_index(rank)) for rank in range(member.size)]
    local = carriers.make_or(inside, between, member.among(f"host-{host}", beside))
    cross = carriers.make(between, member.among(f"index-{index}", across))
    return TwoLevel(local, cross, host, index, [node * len(beside) + local_index for node, local_index in places])


def _measured(
    member: GroupMember,
    flat: dist.ProcessGroup,
    levels: TwoLevel,
    shape: Sequence[object],
    hosts: Sequence[str],
    device: torch.device,
) -> AlgorithmTable:
    """Return the group's table: that of the job's first group of this shape, which is the kept one or is measured.

    One goes for all. Parameters of which tensor ranks have copies are reduced by a group each: in unlike orders the
    sums would differ by roundings, and the copies drift apart.
    """
    path, key = choice.table_file((*shape, *hosts)), f"collective_algorithms/{choice.table_file(shape).stem}"
    job = default_store() if dist.is_initialized() else member.store
    if member.rank == 0:
        member.store.set("table", _known(job, key, path))
    text = member.store.get("table").decode()
    is_known = bool(text)
    if not is_known:
        measured = choice.measure_algorithms(partial(_call, flat, levels), flat, device)
        if member.rank == 0:
            member.store.set("agreed", _first(job, key, measured))
        text = member.store.get("agreed").decode()
    table = AlgorithmTable.from_json(text)
    if member.rank == 0 and not is_known:
        choice.keep_algorithm_table(path, table)
    if member.members[member.rank] == 0:  # of all ranks the one whose output is shown
        where = f"{levels.hosts} hosts of {levels.locals} ranks, {'known' if is_known else 'measured'}"
        print(f"note: collectives over {where}: {table.describe()}", file=sys.stderr)
    return table


def _known(store: dist.Store, key: str, path: Path) -> str:
    """Return the table that another group has set, or the kept one; empty where there is neither."""
    if store.check([key]):
        return store.get(key).decode()
    kept = choice.read_algorithm_table(path)
    return _first(store, key, kept) if kept else ""


def _first(store: dist.Store, key: str, table: AlgorithmTable) -> str:
    """Return the table that was the first to be set."""
    first: bytes | str = store.compare_set(key, "", table.to_json())
    return first.decode() if isinstance(first, bytes) else first


def _call(flat: dist.ProcessGroup, levels: TwoLevel, operation: Operation, algorithm: Algorithm, whole: Tensor) -> None:
    """One call with the full buffer `whole`, for the measurement."""
    part, summed, direct = whole.numel() // levels.size, dist.ReduceOp.SUM, algorithm == "direct"
    piece = whole[:part].clone()
    calls: dict[tuple[Operation, bool], Callable[[], object]] = {
        ("all_gather", True): lambda: all_gather_whole(flat, whole, piece),
        ("reduce_scatter", True): lambda: reduce_scatter_whole(flat, piece, whole, summed),
        ("all_reduce", True): lambda: flat.allreduce([whole]).wait(),
        ("all_gather", False): lambda: levels.all_gather(whole, piece, direct),
        ("reduce_scatter", False): lambda: levels.reduce_scatter(piece, whole, summed, direct),
        ("all_reduce", False): lambda: levels.all_reduce(whole, summed, direct),
    }
    calls[operation, algorithm == "flat"]()


def _kind(reduction: Any) -> Any:
    """The kind of a ReduceOp; options hold objects that do not hash like the constants."""
    return getattr(reduction, "op", reduction)


def _reduction(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _blocking(options: Any) -> bool:
    """Return True if the caller waits at once. Options that do not say come from C++ (DDP, functional collectives)."""
    return not getattr(options, "asyncOp", True)


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)
