"""Finds out whether the rows of a microbatch change each other's numbers, so that a layout may not put them together.

Means over rows, losses between rows, and decisions such as `if x.mean() > 0` make it part of a model's definition which
rows are together. So a user's module is tried before training: rows together have to give the loss and the gradients
that the same rows give one by one. It has random weights, as those at start may be zeros. Random draws are constants.
Modules with running statistics use them (`model.running_statistics` is their rule).

How much is tried depends on the size of the module. What is not is told, and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch_compat.tracing import TorchDispatchMode, tree_leaves
from shardwise.model.construct import drawing_from
from shardwise.model.forward_failures import failure_reason
from shardwise.model.probe import copy_to_probe, operations_of
from shardwise.model.process_numbers import process_numbers_kept
from shardwise.model.user_state import user_state_kept

ROWS = 8  # of the data; that all decide alike by chance is one in 2^7
MOST_OPERATIONS = 1e10  # of a trial: a few seconds of one core
TOLERANCE, EPSILONS = 1e-6, 1e3  # of a difference: what sums in another order leave is far below
DRAWN = 10007  # random numbers that weights repeat, a prime
SCALES = (1.0, 0.25, 4.0)  # of random weights
DTYPES = (torch.float64, torch.float32)  # where a forward refuses one, the next is tried

Call = Callable[..., Any]
Summed = Callable[[Call, Sequence[int]], Tensor]
Values = Callable[[], Mapping[str, Tensor]]


class TrialSize(NamedTuple):
    """Rows of a trial, whether their gradients are compared too, and the parameters of the largest such module."""

    rows: int
    with_gradients: bool
    most_parameters: int

    @property
    def forwards(self) -> int:
        """Forwards of one row that take as long as it: all rows are run twice, and a backward is two forwards."""
        return 2 * self.rows * (3 if self.with_gradients else 1)


SIZES = (TrialSize(ROWS, True, 2**24), TrialSize(ROWS, False, 2**27), TrialSize(2, False, 2**27))


@dataclass(frozen=True)
class RowCoupling:
    """The finding of a trial: how the numbers of a row depend on the rows beside it.

    Attributes:
        is_coupled: whether rows change each other's numbers.
        untried: why that was not found out, as a clause about the module; empty where it was.
        keeps_statistics: whether modules in training take statistics of rows together, and keep them in buffers.
        reads_statistics: whether the forward in training reads buffers that it changes.
        draws_numbers: whether the forward draws random numbers other than those of dropout, of torch, Python or NumPy.
    """

    is_coupled: bool = False
    untried: str = ""
    keeps_statistics: bool = False
    reads_statistics: bool = False
    draws_numbers: bool = False


@dataclass(frozen=True)
class TrialRows:
    """Rows on which a module is tried.

    Attributes:
        number: of the rows.
        inputs: keyword arguments of the forward for the first of them.
        summed: called with the module's forward and numbers of rows; returns the summed loss of these rows.
    """

    number: int
    inputs: Mapping[str, Tensor]
    summed: Summed


def find_coupling(
    module: nn.Module,
    rows: TrialRows,
    reads_values: bool = False,
    values: Values | None = None,
) -> RowCoupling:
    """Return whether rows of a microbatch change each other's numbers in `module`, which stays as it is.

    Args:
        module: parameters may be on the meta device.
        rows: of the data, or like it.
        reads_values: whether the forward decides by values, which few rows may all decide alike.
        values: gives the module's own weights.
    """
    if rows.number < 2:
        return RowCoupling()
    size, reason = _affordable(module, rows, ROWS if reads_values else 2)
    if size is None:
        return RowCoupling(untried=reason)
    failure = ""
    for dtype in DTYPES:
        try:
            with _default_dtype(dtype), warnings.catch_warnings(action="ignore"):
                return _tried(module, rows, size, reads_values, values)
        except Exception as error:  # any code may run in a model's forward
            failure = failure or (str(error) if isinstance(error, _Undecided) else failure_reason(error))
    return RowCoupling(untried=failure)


def _tried(
    module: nn.Module, rows: TrialRows, size: TrialSize, reads_values: bool, values: Values | None
) -> RowCoupling:
    """Try random weights, of several scales where a decision may hang on it, and the module's own."""
    trial, further = _Trial(module, rows, SCALES[0]), size._replace(with_gradients=False)
    try:
        is_coupled = trial.are_coupled(size)
        if reads_values:
            is_coupled = is_coupled or any(_Trial(module, rows, scale).are_coupled(further) for scale in SCALES[1:])
    except _Undecided:
        if values is None:
            raise
        is_coupled, reads_values = False, True
    if reads_values and values is not None and not is_coupled:
        is_coupled = _Trial(module, rows, SCALES[0], values()).are_coupled(further)
    draws = trial.draws.have_drawn or trial.draws_in_process
    return RowCoupling(is_coupled, "", trial.keeps_statistics, trial.reads_statistics, draws)


def _affordable(module: nn.Module, rows: TrialRows, fewest: int) -> tuple[TrialSize | None, str]:
    """Return the largest trial that a module of this size can have, or why it can have none."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    sizes = [size for size in SIZES if size.rows >= fewest and parameters <= size.most_parameters]
    if not sizes:
        return None, f"it has {parameters:,} parameters"
    operations = 2 * parameters * max((value.numel() for value in rows.inputs.values()), default=1)
    if operations * sizes[0].forwards > MOST_OPERATIONS:
        operations = operations_of(module, rows.inputs) or operations
    affordable = (size for size in sizes if operations * size.forwards <= MOST_OPERATIONS)
    return next(affordable, None), f"a forward of one row takes {operations:.1g} operations"


class _Undecided(Exception):
    """A trial whose numbers say nothing; the message is a clause about the module."""


class _Trial:
    """A copy of a module with random weights of torch's default dtype, or some of `weights`."""

    def __init__(
        self, module: nn.Module, rows: TrialRows, scale: float, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.module, self.rows = copy_to_probe(module).train(), rows
        self.draws = ConstantDraws()
        self.keeps_statistics = self.reads_statistics = self.draws_in_process = False
        given = weights or {}
        self.parameters = {
            name: _cast(given[name]) if name in given else _drawn(parameter, name, number, scale)
            for number, (name, parameter) in enumerate(module.named_parameters())
        }
        self.buffers = {
            name: _drawn(buffer, name, number, scale) if buffer.is_meta else _cast(buffer)
            for number, (name, buffer) in enumerate(module.named_buffers())
        }

    def are_coupled(self, size: TrialSize) -> bool:
        """Return whether rows together give other numbers than one by one.

        Raises:
            _Undecided: the numbers are not finite, or too coarse.
        """
        number = min(size.rows, self.rows.number)
        together = self._measure(range(number), size.with_gradients)
        changed = [name for name, value in self.buffers.items() if not torch.equal(value, self.state[name])]
        self.keeps_statistics = bool(changed)
        if changed:
            self.reads_statistics = self._reads(changed, range(number), together[0])
            self._keep_statistics(changed)
            together = self._measure(range(number), size.with_gradients)
        if not all(bool(part.isfinite().all()) for part in together):
            raise _Undecided("its numbers are not finite")
        self.draws.are_needed = self.draws.have_drawn
        apart = self._apart(number, size.with_gradients)
        tolerance = max(TOLERANCE, EPSILONS * self.draws.epsilon)
        if tolerance > 0.1:
            raise _Undecided("it computes in 16 bits")
        sums = [torch.stack(parts).sum(0) for parts in zip(*apart, strict=True)]
        size_of_loss = torch.stack([part[0].abs() for part in apart]).sum()
        return not (
            _is_close(together[:1], sums[:1], tolerance, size_of_loss) and _is_close(together[1:], sums[1:], tolerance)
        )

    def _apart(self, number: int, with_gradients: bool) -> list[list[Tensor]]:
        """Return what rows give one by one, or two by two where the forward takes no single one."""
        try:
            return [self._measure([row], with_gradients) for row in range(number)]
        except Exception:
            if number <= 2:
                raise
            return [self._measure(range(row, min(row + 2, number)), with_gradients) for row in range(0, number, 2)]

    def _reads(self, changed: Sequence[str], rows: Sequence[int], loss: Tensor) -> bool:
        """Return whether the same rows give another loss once they have changed these buffers."""
        before = self.buffers
        self.buffers = {**before, **{name: self.state[name].detach().clone() for name in changed}}
        again = self._measure(rows, with_gradients=False)[0]
        self.buffers = before
        return not _is_close([again], [loss], TOLERANCE)

    def _keep_statistics(self, changed: Sequence[str]) -> None:
        """Let modules whose buffers training changes use these as they are."""
        for name in changed:
            self.module.get_submodule(name.rpartition(".")[0]).training = False

    def _measure(self, rows: Sequence[int], with_gradients: bool) -> list[Tensor]:
        """Return the summed loss of rows, and then its gradients."""
        trained = {
            name: nn.Parameter(value.clone(), requires_grad=self.module.get_parameter(name).requires_grad)
            for name, value in self.parameters.items()
        }
        self.state = {**trained, **{name: value.clone() for name, value in self.buffers.items()}}
        call = partial(_call, self.module, self.state)
        watching = self.draws if self.draws.are_needed else nullcontext()
        with (
            drawing_from(0),
            process_numbers_kept() as were_drawn,
            user_state_kept(self.module),
            _NoDropout(),
            watching,
        ):
            loss = self.rows.summed(call, rows)
            self.draws_in_process = self.draws_in_process or were_drawn()
            if with_gradients and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        gradients = [_dense(value.grad, value) for value in trained.values()] if with_gradients else []
        return [loss.detach(), *gradients]


def _call(module: nn.Module, state: dict[str, Tensor], **inputs: Any) -> Any:
    return torch.func.functional_call(module, state, (), inputs)


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient


def _is_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float, scale: Tensor | None = None) -> bool:
    """Return whether no difference is above tolerance, relative to the largest of all numbers or to `scale`."""
    pairs = [(left, right) for left, right in zip(ours, theirs, strict=True) if left.numel()]
    if not pairs:
        return True
    largest = max(float((left - right).abs().max()) for left, right in pairs)
    whole = max(float(left.abs().max()) for left, _ in pairs) if scale is None else float(scale)
    return largest <= tolerance * whole  # not so where rows apart have no finite numbers


def _cast(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.get_default_dtype() if value.is_floating_point() else value.dtype)


def _drawn(tensor: Tensor, name: str, seed: int, scale: float) -> Tensor:
    """Return random weights in the form of a tensor: matrices keep the size of what they multiply, biases are small."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    numbers = torch.rand(DRAWN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    repeated = numbers.repeat(-(-tensor.numel() // DRAWN))[: tensor.numel()].reshape(tensor.shape)
    if tensor.dim() > 1:
        repeated = repeated * sqrt(3 / max(1, prod(tensor.shape[1:])))
    else:
        repeated = repeated * 0.1 if "bias" in name else 1 + repeated / 2
    return (scale * repeated).to(tensor.dtype if tensor.is_complex() else torch.get_default_dtype())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let what a forward makes of no other tensor be of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _NoDropout(TorchFunctionMode):
    """A mode without dropout, whose masks have no layout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.dropout:
            return args[0] if args else kwargs["input"]
        if func is Tensor.uniform_:
            return args[0].fill_(0.5)
        return func(*args, **(kwargs or {}))


@dataclass
class ConstantDraws(TorchDispatchMode):
    """A mode in which what is drawn does not depend on how many rows there are.

    Numbers are 0.5; a permutation is the reverse, so that rows that are mixed are seen.

    Attributes:
        epsilon: of the coarsest dtype in which was computed.
        are_needed: whether anything was drawn; True before the first run. The mode takes far longer than small modules.
    """

    epsilon: float = 0.0
    are_needed: bool = True
    have_drawn: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__:
            self.have_drawn = True
            for tensor in tensors:
                _set_constant(tensor, is_permutation="randperm" in func.__name__)
        return result


def _set_constant(tensor: Tensor, is_permutation: bool) -> None:
    if is_permutation:
        tensor.copy_(torch.arange(len(tensor) - 1, -1, -1))
    else:
        tensor.fill_(0.5)  # of whole numbers: 0
