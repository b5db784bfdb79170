"""Two-level collectives as a backend of torch.distributed, over Gloo, NCCL or the native engine.

    name = hierarchical.register("measured", between="gloo", inside="shardwise")
    torch.distributed.init_process_group(name)

Every group that is made then looks at its ranks' hosts. Where it has several hosts with equally many ranks, and more
than one on each, all-gather, reduce-scatter and all-reduce take what the group's table says (`choice.py`): flat, or the
two levels of `two_level.py`. Everything else, and groups of another shape, run flat on `between`.

`around` does the same for a group that exists, for FSDP2's communication objects (`fsdp.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import add_backends, backends_of
from shardwise.collectives import carriers, choice, engine
from shardwise.collectives.carriers import Seat
from shardwise.collectives.choice import Algorithm, Operation, Table
from shardwise.collectives.topology import discover
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

    def __init__(self, levels: TwoLevel, table: Table, turns: Turns) -> None:
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
        """Whether the flat operation would take the pair, as far as the levels ask for it."""
        same = whole.dtype == piece.dtype and whole.device == piece.device
        contiguous = whole.is_contiguous() and piece.is_contiguous()
        return same and contiguous and piece.numel() > 0 and whole.numel() == self.levels.size * piece.numel()


class HierarchicalGroup(dist.ProcessGroup):
    """A process group that takes two levels where its table says so, and is flat otherwise.

    Its C++ base leads every operation that is not here to the backends of `flat`.
    """

    def __init__(self, seat: Seat, flat: dist.ProcessGroup, hierarchy: Hierarchy) -> None:
        super().__init__(seat.rank, seat.size)
        add_backends(self, backends_of(flat))
        self.flat, self.hierarchy = flat, hierarchy

    def all_gather_single(self, output: Tensor, piece: Tensor, options: Any = None) -> Any:
        work = self.hierarchy.all_gather([output], [piece], _blocking(options))
        return work or self.flat._allgather_base(output, piece, *_given(options))

    def all_gather_single_coalesced(self, outputs: list[Tensor], pieces: list[Tensor], options: Any = None) -> Any:
        work = self.hierarchy.all_gather(outputs, pieces, _blocking(options))
        return work or self.flat.allgather_into_tensor_coalesced(outputs, pieces, *_given(options))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        work = self.hierarchy.reduce_scatter([output], [whole], _reduction(options), _blocking(options))
        return work or self.flat._reduce_scatter_base(output, whole, *_given(options))

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

    # The names of torch before 2.13, which it still calls in places.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        self.hierarchy.close()
        self.flat.shutdown()


def register(algorithm: Choice, between: str, inside: str) -> str:
    """Make a backend of torch.distributed for this choice and return its name; a second call does nothing.

    Args:
        algorithm: for everything, or `measured`: each group's table is measured when it is made, or read from the cache.
        between: what carries flat operations and those between hosts, one of `carriers.NAMES`.
        inside: what carries operations inside a host.

    Raises:
        ConfigError: there is no such algorithm or carrier.
    """
    for word, words in ((algorithm, ("measured", *choice.ALGORITHMS)), *((n, carriers.NAMES) for n in (between, inside))):
        if word not in words:
            raise ConfigError(f"{word!r} is none of {', '.join(words)}")
    name = f"{algorithm}_{between}_{inside}"
    if not hasattr(dist.Backend, name.upper()):
        devices = ["cpu", "cuda"] if between == carriers.NCCL else ["cpu"]
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
    seat = Seat(dist.PrefixStore("two_level", group.get_group_store()), group.rank(), members, timeout)
    return _hierarchy(seat, group, algorithm, carrier, carrier)


def _create(algorithm: Choice, between: str, inside: str, options: Any, backend_options: Any) -> dist.ProcessGroup:
    """A group; called by torch on each member with the group's own store."""
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    seat = Seat(options.store, options.group_rank, members, options.timeout)
    flat = carriers.make(between, seat.among("flat", list(range(seat.size))))
    hierarchy = _hierarchy(seat, flat, algorithm, between, inside)
    return flat if hierarchy is None else HierarchicalGroup(seat, flat, hierarchy)


def _hierarchy(seat: Seat, flat: dist.ProcessGroup, algorithm: Choice, between: str, inside: str) -> Hierarchy | None:
    if algorithm == "flat":
        return None
    hosts = discover(seat.store, seat.rank, seat.size).hosts
    places = grid(hosts)
    if not places:
        _say_why_flat(hosts, seat.rank)
        return None
    levels = _levels(seat, places, between, inside)
    if algorithm != "measured":
        return Hierarchy(levels, Table.given(algorithm), Turns())
    device = torch.device("cuda" if between == carriers.NCCL else "cpu")
    holds_for = (between, levels.local.name(), device.type, places, *sorted(set(map(str, hosts))))
    return Hierarchy(levels, _measured(seat, flat, levels, holds_for, device), Turns())


def grid(hosts: Sequence[Hashable]) -> list[tuple[int, int]]:
    """(host, local index) of each rank, hosts in the order of their first rank; empty where there are no two levels.

    Two levels need several hosts, more than one rank on each, and equally many.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    sizes = Counter(hosts)
    if len(sizes) < 2 or set(sizes.values()) == {1} or len(set(sizes.values())) > 1:
        return []
    seen: Counter[Hashable] = Counter()
    places = []
    for host in hosts:
        places.append((numbers[host], seen[host]))
        seen[host] += 1
    return places


def _say_why_flat(hosts: Sequence[Hashable], rank: int) -> None:
    """One line where a group has several hosts and unequally many ranks on them; other shapes are flat by nature."""
    sizes = Counter(hosts)
    if rank == 0 and len(set(sizes.values())) > 1:
        spread = " and ".join(map(str, sizes.values()))
        warnings.warn(f"collectives of {len(hosts)} ranks stay flat: {spread} ranks on {len(sizes)} hosts", stacklevel=2)


def _levels(seat: Seat, places: list[tuple[int, int]], between: str, inside: str) -> TwoLevel:
    host, index = places[seat.rank]
    beside = [rank for rank, place in enumerate(places) if place[0] == host]
    across = sorted((rank for rank, place in enumerate(places) if place[1] == index), key=lambda r: places[r][0])
    order = [host * len(beside) + index for host, index in places]
    local = _inside(seat.among(f"host-{host}", beside), inside, between)
    cross = carriers.make(between, seat.among(f"index-{index}", across))
    return TwoLevel(local, cross, host, index, order)


def _inside(seat: Seat, inside: str, instead: str) -> dist.ProcessGroup:
    """The group of a host; where the engine cannot join its ranks, which all of them then see, one of `instead`."""
    try:
        return carriers.make(inside, seat)
    except (RuntimeError, ConfigError) as error:
        if inside != engine.BACKEND or instead == engine.BACKEND:
            raise
        if seat.rank == 0:
            warnings.warn(f"inside this host {instead} carries the collectives: {error}", stacklevel=2)
        return carriers.make(instead, seat.among("instead", list(range(seat.size))))


def _measured(
    seat: Seat, flat: dist.ProcessGroup, levels: TwoLevel, holds_for: Sequence[object], device: torch.device
) -> Table:
    """The group's table: what its first rank finds in the cache goes for all, else all measure."""
    path = choice.file_of(holds_for)
    if seat.rank == 0:
        kept = choice.read(path)
        seat.store.set("table", kept.to_json() if kept else "")
    text = seat.store.get("table").decode()
    if text:
        return Table.from_json(text)
    table = choice.measure(partial(_call, flat, levels), flat, device)
    if seat.rank == 0:
        choice.keep(path, table)
    return table


def _call(flat: dist.ProcessGroup, levels: TwoLevel, operation: Operation, algorithm: Algorithm, whole: Tensor) -> None:
    """One call with the full buffer `whole`, for the measurement."""
    part, summed, direct = whole.numel() // levels.size, dist.ReduceOp.SUM, algorithm == "direct"
    piece = whole[:part].clone()
    if algorithm == "flat":
        works = {
            "all_gather": lambda: flat._allgather_base(whole, piece),
            "reduce_scatter": lambda: flat._reduce_scatter_base(piece, whole),
            "all_reduce": lambda: flat.allreduce([whole]),
        }
        works[operation]().wait()
    elif operation == "all_gather":
        levels.all_gather(whole, piece, direct)
    elif operation == "reduce_scatter":
        levels.reduce_scatter(piece, whole, summed, direct)
    else:
        levels.all_reduce(whole, summed, direct)


def _kind(reduction: Any) -> Any:
    """The kind of a ReduceOp; options hold objects that do not hash like the constants."""
    return getattr(reduction, "op", reduction)


def _reduction(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _blocking(options: Any) -> bool:
    """Whether the caller waits at once. Options that do not say come from C++ (DDP, functional collectives)."""
    return not getattr(options, "asyncOp", True)


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)
