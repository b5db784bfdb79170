"""The table of what the backends of CPU ranks do, made by a run: `python -m tools.collectives_table PAGE`.

Each operation runs on two ranks for each dtype and form of a tensor, on the engine and on Gloo, and is right, refused
by an error, or wrong: what came out is not what a plain computation gives.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import registration
from shardwise.testing.world import WorldPool

RANKS = 2
SECONDS = 5
BACKENDS = (registration.BACKEND, "gloo")
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
)
ROWS, COLUMNS = 4, 3
GENERATED = "<!-- Written by `python -m tools.collectives_table PAGE` from a run; do not edit. -->"
REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "bitwise and": dist.ReduceOp.BAND,
    "premultiplied sum": dist._make_nccl_premul_sum(0.5),
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "transposed": lambda tensor: tensor.T.contiguous().T,
    "with gaps": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "empty": lambda tensor: tensor[:0].clone(),
}


def value_of(rank: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings, [ROWS, COLUMNS]: small whole numbers, with which nothing is rounded."""
    numbers = (torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + 2 * rank) % 5 + 1
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(0)).to(dtype)
    return numbers.to(dtype)


def reduced(name: str, inputs: Sequence[Tensor]) -> Tensor:
    """What the reduction is by a plain computation.

    Raises:
        RuntimeError: it is not defined for the dtype.
    """
    first = inputs[0]
    if name == "bitwise and":
        return inputs[0] & inputs[1]
    wide = torch.stack([each.to(torch.complex128 if each.is_complex() else torch.float64) for each in inputs])
    if name in ("min", "max"):
        return getattr(wide, f"a{name}")(0).to(first.dtype)
    if name == "product":
        return wide.prod(0).to(first.dtype)
    total = wide.sum(0) * {"sum": 1.0, "average": 1 / len(inputs), "premultiplied sum": 0.5}[name]
    return total.to(first.dtype)


class Call:
    """A call on this rank: operands in their form, the operation, and what should come out of it."""

    def __init__(self, group: Any, dtype: torch.dtype, form: Callable[[Tensor], Tensor]) -> None:
        self.group, self.form, self.rank = group, form, dist.get_rank(group)
        self.inputs = [form(value_of(rank, dtype)).contiguous() for rank in range(RANKS)]
        self.own = form(value_of(self.rank, dtype))

    def zeros(self, like: Tensor | None = None) -> Tensor:
        return self.form(torch.zeros_like(self.inputs[0])) if like is None else torch.zeros_like(like).contiguous()

    def halves(self) -> list[Tensor]:
        return [each.chunk(RANKS)[self.rank] if each.numel() else each for each in self.inputs]


def all_reduce(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    dist.all_reduce(call.own, REDUCTIONS[reduction], call.group)
    yield call.own, reduced(reduction, call.inputs)


def reduce(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    dist.reduce(call.own, 0, REDUCTIONS[reduction], call.group)
    if call.rank == 0:
        yield call.own, reduced(reduction, call.inputs)


def reduce_scatter(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    own = call.halves()
    out = call.zeros(own[0])
    reduce_scatter_single(out, call.own, REDUCTIONS[reduction], call.group)
    yield out, reduced(reduction, own)


def reduce_scatter_list(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    out = call.zeros()
    dist.reduce_scatter(out, [call.own, call.own], REDUCTIONS[reduction], call.group)
    yield out, reduced(reduction, call.inputs)


def uneven_reduce_scatter(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = [1, ROWS - 1] if len(call.own) else [0, 0]
    own = [each.split(sizes)[call.rank] for each in call.inputs]
    out = call.zeros(own[0])
    dist.reduce_scatter(out, list(call.own.split(sizes)), REDUCTIONS[reduction], call.group)
    yield out, reduced(reduction, own)


def sparse_all_reduce(call: Call, reduction: str) -> Iterator[tuple[Tensor, Tensor]]:
    data = call.own.to_sparse()
    dist.all_reduce(data, REDUCTIONS[reduction], call.group)
    yield data.to_dense(), reduced(reduction, call.inputs)


def all_gather(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    whole = torch.cat(call.inputs)
    out = call.zeros(whole)
    all_gather_single(out, call.own, call.group)
    yield out, whole


def all_gather_list(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    outs = [call.zeros() for _ in call.inputs]
    dist.all_gather(outs, call.own, call.group)
    yield from zip(outs, call.inputs)


def broadcast(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    dist.broadcast(call.own, 0, call.group)
    yield call.own, call.inputs[0]


def gather(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    outs = [call.zeros() for _ in call.inputs] if call.rank == 0 else None
    dist.gather(call.own, outs, 0, call.group)
    yield from zip(outs or [], call.inputs)


def scatter(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    out = call.zeros()
    dist.scatter(out, [call.form(each) for each in call.inputs] if call.rank == 0 else None, 0, call.group)
    yield out, call.inputs[call.rank]


def all_to_all(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    whole = torch.cat(call.halves())
    out = call.zeros(whole)
    dist.all_to_all_single(out, call.own, group=call.group)
    yield out, whole


def all_to_all_list(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    outs = [call.zeros() for _ in call.inputs]
    dist.all_to_all(outs, [call.own, call.own], call.group)
    yield from zip(outs, call.inputs)


def send_and_receive(call: Call, _: str) -> Iterator[tuple[Tensor, Tensor]]:
    out, other = call.zeros(), 1 - call.rank
    works = [dist.isend(call.own, other, call.group), dist.irecv(out, other, call.group)]
    for work in works:
        work.wait()
    yield out, call.inputs[other]


Operation = Callable[[Call, str], Iterator[tuple[Tensor, Tensor]]]
ADDING: dict[str, Operation] = {
    "`all_reduce`": all_reduce,
    "`all_reduce` of sparse tensors": sparse_all_reduce,
    "`reduce`": reduce,
    "`reduce_scatter_tensor`": reduce_scatter,
    "`reduce_scatter` of a list": reduce_scatter_list,
    "`reduce_scatter` of unequal parts": uneven_reduce_scatter,
}
MOVING: dict[str, Operation] = {
    "`all_gather_into_tensor`": all_gather,
    "`all_gather` to a list": all_gather_list,
    "`broadcast`": broadcast,
    "`gather`": gather,
    "`scatter`": scatter,
    "`all_to_all_single`": all_to_all,
    "`all_to_all`": all_to_all_list,
    "`send`, `recv`": send_and_receive,
}
Case = tuple[str, str, str, torch.dtype]  # operation, reduction, form, dtype


def cases() -> list[Case]:
    """Every case of the table; every reduction of contiguous tensors, and the sum of the other forms."""
    moving = itertools.product(MOVING, [""], FORMS, DTYPES)
    adding = itertools.product(ADDING, REDUCTIONS, FORMS, DTYPES)
    return [*moving, *(case for case in adding if case[1] == "sum" or case[2] == "contiguous")]


def outcomes(backend: str) -> list[str]:
    """What each case has come to on this rank; a group that has failed is replaced."""
    registration.register()
    found, group = [], None
    for operation, reduction, form, dtype in cases():
        if group is None:
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=SECONDS))
        outcome = outcome_of((ADDING | MOVING)[operation], group, reduction, FORMS[form], dtype)
        both: list[Any] = [None] * RANKS
        dist.all_gather_object(both, outcome)
        found.append(max(both, key=("right", "not defined", "refused", "wrong").index))
        if found[-1] == "refused":
            dist.destroy_process_group(group)
            group = None
    return found


def outcome_of(operation: Operation, group: Any, reduction: str, form: Any, dtype: torch.dtype) -> str:
    """Return "right", "wrong", "refused" or, where a plain computation has no answer, "not defined"."""
    try:
        call = Call(group, dtype, form)
        if reduction:
            reduced(reduction, call.inputs)
    except (RuntimeError, TypeError):
        return "not defined"
    try:
        pairs = list(operation(call, reduction))
    except (RuntimeError, ValueError, TypeError):
        return "refused"
    return "right" if all(equal(found, right) for found, right in pairs) else "wrong"


def equal(found: Tensor, right: Tensor) -> bool:
    """Compare bit by bit; torch does not compare every dtype."""
    return torch.equal(found.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def page(results: dict[str, list[str]]) -> str:
    """Return the page: what each backend does of an operation, reduction and form, by dtype."""
    names = ", ".join(f"`{_name(dtype)}`" for dtype in DTYPES)
    lines = [
        GENERATED,
        "",
        "# Collectives: what is right, refused and wrong",
        "",
        f"Two CPU ranks, torch {torch.__version__.partition('+')[0]}. Dtypes: {names}; a cell names those that are not",
        "right, without those for which the reduction has no meaning. Sparse complex tensors are wrong on every",
        "backend: torch hands it a copy.",
        "",
        "| operation | reduction | form | shardwise | Gloo |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = {name: cells(found) for name, found in results.items()}
    for key in rows["gloo"]:
        lines.append(f"| {' | '.join((*key, *(rows[backend][key] for backend in BACKENDS)))} |")
    return "\n".join(lines) + "\n"


def cells(found: Sequence[str]) -> dict[tuple[str, str, str], str]:
    """Return a backend's cell of each operation, reduction and form."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for (operation, reduction, form, dtype), outcome in zip(cases(), found, strict=True):
        rows.setdefault((operation, reduction, form), {}).setdefault(outcome, []).append(_name(dtype))
    return {key: _cell(by_outcome) for key, by_outcome in rows.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cell(by_outcome: dict[str, list[str]]) -> str:
    known = {name: by_outcome[name] for name in ("right", "refused", "wrong") if name in by_outcome}
    if len(known) == 1:
        return next(iter(known))
    return "; ".join(name if name == "right" else f"{name}: {', '.join(dtypes)}" for name, dtypes in known.items())


def main(path: Path) -> None:
    """Run every case on both backends and write the page."""
    with WorldPool(preload=("torch", "torch.distributed")) as pool:
        path.write_text(page({name: pool.run(RANKS, outcomes, name, timeout=900)[0] for name in BACKENDS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
