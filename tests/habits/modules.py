"""Small modules, each with one habit of building. `tests/habits/table.py` says what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from tests.habits.building import POSITIONS, WIDTH, Residual, Stack, squared_error


class KeywordResidual(Residual):
    def forward(self, *, states: Tensor) -> Tensor:
        return super().forward(states)


class KeywordBlocks(Stack):
    """Its blocks take nothing but a keyword argument."""

    block = KeywordResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(states=x)
        return x


class AttendingResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(x, x, x, need_weights=False)[0])


class Attending(Stack):
    """torch's attention, whose initializer is called `_reset_parameters`."""

    block = AttendingResidual


class ScalingHooks(Stack):
    """Hooks that mask and scale gradients, of a block and outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.25)
        self.blocks[1].up.weight.register_hook(_without_first_rows)


def _without_first_rows(gradient: Tensor) -> Tensor:
    masked = gradient.clone()
    masked[:4] = 0
    return masked


class ClippingHook(Stack):
    """A hook for which a sum of gradients is not the sum of what it makes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


class AccumulateHook(Stack):
    """A hook for when a gradient has been accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


class BlockHooks(Stack):
    """Hooks on blocks that change what these return."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 0.9)


class BackwardHooks(Stack):
    """Hooks on blocks that change their gradients."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, ours, theirs: (ours[0] * 0.5,))


class Shortcut(Stack):
    """A shortcut past the blocks, from the first layer and from the first block."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = x
        early = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first * early


class GradientFreeShortcut(Stack):
    """Shortcuts past the blocks on which no gradient flows: from a frozen layer, and of a detached value."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def run_blocks(self, x: Tensor) -> Tensor:
        first = x
        early = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first * early.detach()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class ReversedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(Reversal.apply(x))


class ReversedGradients(Stack):
    """Blocks with an autograd function of their own, and a shortcut past the blocks."""

    block = ReversedResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        return x + super().run_blocks(x)


class PositionedResidual(Residual):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return super().forward(x + (position - 4097.0).to(x.dtype))


class Positions(Stack):
    """Blocks are given a position in fp32 that 16 bits do not hold."""

    block = PositionedResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        position = torch.full((len(x), 1, 1), 4098.0, device=x.device)
        for block in self.blocks:
            x = block(x, position)
        return x


class Penalized(Stack):
    """Its forward reads every parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class NormedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)


class Parametrized(Stack):
    """Weights that parametrizations compute: with an inverse in the blocks, without one outside of them."""

    block = NormedResidual

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", Symmetric())


class Symmetric(nn.Module):
    """A symmetric matrix."""

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.triu() + matrix.triu(1).transpose(-1, -2)


class SingleLayer(nn.Module):
    """Nothing that could be cut apart."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.only(x.mean(1))
        return result


# ---- values that a constructor gives; `computed` names those that have to be the start


class Loaded(Stack):
    """Its factory loads weights into it."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {name: value.shape for name, value in self.state_dict().items()}
        lines = {name: torch.linspace(-0.5, 0.5, shape.numel()).view(shape) for name, shape in shapes.items()}
        self.load_state_dict(lines)
        self.computed = tuple(shapes)


class GainedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class RegisteredValues(Stack):
    """Parameters that are registered with values, in blocks and outside, and no initializer."""

    block = GainedResidual
    computed = ("scale", "blocks.0.gain", "blocks.2.gain")

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.25))

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x) * self.scale


class ZeroedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        self.down.bias.data.fill_(0.125)


class Zeroed(Stack):
    """Its constructors change what an initializer has drawn."""

    block = ZeroedResidual
    computed = ("blocks.1.down.weight", "blocks.1.down.bias", "first.weight")

    def __init__(self) -> None:
        super().__init__()
        self.apply(_set_input_layer)


def _set_input_layer(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.in_features == module.out_features:
        nn.init.eye_(module.weight)


class ParentInitialized(Stack):
    """A module's initializer fills the modules below it."""

    computed = ("first.weight", "last.bias", "blocks.2.up.bias")

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.first.weight, 0.25)
        nn.init.constant_(self.last.bias, -0.5)
        for block in self.blocks:
            nn.init.constant_(block.up.bias, 0.75)


class PairOfLayers(nn.Module):
    """Its initializer fills its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.eye_(self.one.weight)
        self.other.bias.data.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(self.one(x))
        return result


class ParentBesideBlocks(Stack):
    """The same of a module that holds no blocks."""

    computed = ("first.one.weight", "first.other.bias")

    def __init__(self) -> None:
        super().__init__()
        self.first = PairOfLayers()


class ReplacedLayer(ParentInitialized):
    """A layer that its initializer fills is replaced afterwards, so that the initializer cannot run again."""

    computed = ("last.bias", "blocks.2.up.bias")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class UnitLayer(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)


class FilledAfterwards(ParentInitialized):
    """A layer is filled anew after its parent's initializer."""

    computed = ("last.weight", "last.bias", "blocks.2.up.bias")

    def __init__(self) -> None:
        super().__init__()
        self.last = UnitLayer(WIDTH, WIDTH)
        self.reset_parameters()
        self.last.reset_parameters()


class SpectralResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.up)


class SpectrallyNormed(Stack):
    """`spectral_norm`, whose buffers follow from weights; its power iteration stands still."""

    block = SpectralResidual

    def __init__(self) -> None:
        super().__init__()
        self.train()

    def train(self, mode: bool = True) -> SpectrallyNormed:
        super().train(mode)
        for block in self.blocks:
            block.up.parametrizations.train(False)
        return self


class OrthogonalResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.down)


class Orthogonal(Stack):
    """`orthogonal`."""

    block = OrthogonalResidual


class BufferOfWeights(Stack):
    """A buffer that its constructor computes from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", self.first.weight.detach().norm())

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x) * self.norm


# ---- what blocks are given


class CollectingResidual(Residual):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        losses.append(self.down(self.up(x)).square().mean((1, 2)))
        return x


class CollectedLosses(Stack):
    """Each block appends a loss to a list that its caller adds up."""

    block = CollectingResidual

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, losses)
        return self.read_out(x) + 0.1 * torch.stack(losses).sum(0)[:, None]


class DenseResidual(Residual):
    def forward(self, batch: dict[str, Any]) -> None:  # type: ignore[override]
        batch["x"] = super().forward(batch["x"] + 0.1 * torch.stack(batch["states"]).sum(0) * batch["depth"])
        batch["states"].append(batch["x"])
        batch["depth"] += 1


class GrowingState(Stack):
    """Blocks read a dict that the blocks before have written, and write into it."""

    block = DenseResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        batch = {"x": x, "states": [x], "depth": 1}
        for block in self.blocks:
            block(batch)
        result: Tensor = batch["x"] * batch["depth"]
        return result


class Notes:
    """An object that blocks write into."""

    def __init__(self) -> None:
        self.loss: Any = 0.0


class NotingResidual(Residual):
    def forward(self, x: Tensor, notes: Notes) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        self.kept = self.down(self.up(x)).square().mean((1, 2))
        notes.loss = notes.loss + self.kept
        return x


class NotedLosses(Stack):
    """Blocks add their losses up in an object, and keep them on themselves."""

    block = NotingResidual

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, notes)
        return self.read_out(x) + (0.1 * notes.loss + sum(block.kept for block in self.blocks))[:, None]


class InPlaceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class InPlace(Stack):
    """Blocks write into the hidden states that they are given."""

    block = InPlaceResidual


# ---- kinds of parameters


class OwnParameter(Residual):
    """A block with a parameter of its own, which `make` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(self.make())

    def make(self) -> Tensor:
        return torch.full((), 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.own


class Scalars(Stack):
    """0-dim parameters, in blocks and outside."""

    block = OwnParameter

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Oddities(OwnParameter):
    """Parameters that are frozen, of one element, without elements, transposed in memory, or of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0, WIDTH))
        self.columns = nn.Parameter(torch.linspace(-0.5, 0.5, 5 * WIDTH).view(WIDTH, 5).t())
        self.order = nn.Parameter(torch.tensor([0, 2, 1]), requires_grad=False)

    def make(self) -> Tensor:
        return torch.full((1, 1), 1.5)

    def forward(self, x: Tensor) -> Tensor:
        sums = (x @ self.columns.t())[..., self.order].sum(-1, keepdim=True)
        return super().forward(x) * self.one + self.none.sum() + sums


class OddParameters(Stack):
    """Blocks of such parameters."""

    block = Oddities


class TiedBlocks(Stack):
    """One parameter in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class LookedUp(Stack):
    """An embedding beside the blocks."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.words((x[..., 0].abs() * 5).long().clamp(max=15)))


class BoundedRows(LookedUp):
    """An embedding that scales its rows down in forward."""

    options: ClassVar[dict[str, Any]] = {"max_norm": 0.5}


class MovingAverageResidual(Residual):
    """Beside the residual a frozen layer that follows a trained one, changed through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
        return super().forward(x) + 0.1 * self.fast(x) * self.slow(x)


class MovingAverages(Stack):
    """Blocks that write parameters in forward, as momentum encoders do."""

    block = MovingAverageResidual


class ReplacedParameters(Stack):
    """A forward that puts a new parameter in the place of one while it trains."""

    def read_out(self, x: Tensor) -> Tensor:
        if self.training:
            self.last.bias = nn.Parameter(self.last.bias.detach() * 0.9)
        return super().read_out(x)


class RecurrentResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(x)[0]


class Recurrent(Stack):
    """Blocks with torch's own recurrent layers, which list their parameters."""

    block = RecurrentResidual


class SparseGradients(LookedUp):
    """An embedding with sparse gradients."""

    options: ClassVar[dict[str, Any]] = {"sparse": True}


class FourierResidual(OwnParameter):
    def make(self) -> Tensor:
        angles = torch.arange(3.0 * WIDTH).view(3, WIDTH)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Tensor) -> Tensor:
        return Residual.forward(self, x) + torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.own, n=x.shape[1], dim=1)


class ComplexParameters(Stack):
    """Layers of a Fourier neural operator."""

    block = FourierResidual


class RotatedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH // 2)
        self.register_buffer("rotation", torch.polar(torch.ones(WIDTH // 2), angles.float()))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * self.rotation
        return super().forward(x) + torch.view_as_real(rotated).flatten(-2).to(x.dtype)


class ComplexBuffers(Stack):
    """Rotations by complex numbers, as in the reference code of Llama."""

    block = RotatedResidual


class ScaledParameter(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.scale = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.scale


class ParameterAttributes(Stack):
    """Blocks read an attribute of their parameter."""

    block = ScaledParameter


class OwnKind(nn.Parameter):
    """A class of parameters."""


class SubclassedParameters(Stack):
    """A parameter of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = OwnKind(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class ListedParameters(Stack):
    """A plain list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight, self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(weight.square().mean() for weight in self.weights)


class ReturnedParameters(Stack):
    """Its loss reads the parameters that its forward returns."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), list(self.parameters())


def penalized_error(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return (sum over the counted samples, how many), of an output with parameters."""
    error, count = squared_error(output[0], batch)
    return error + 0.01 * count * torch.stack([parameter.square().sum() for parameter in output[1]]).sum(), count


class BatchNormed(Stack):
    """Running statistics of a batch norm on what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class BatchNormedResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class BatchNormedBlocks(Stack):
    """The same in blocks."""

    block = BatchNormedResidual


class TimedStack(Stack):
    """The module itself is given a time in fp32 that 16 bits do not hold."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return super().forward(x + (time - 4097.0).to(x.dtype)[:, None, None])


# ---- gradients, checkpoints and collectives in forward


class ForceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(given).square().sum()
            (force,) = torch.autograd.grad(energy, given, create_graph=True)
        return super().forward(x) + 0.01 * force


class Forces(Stack):
    """Blocks take a gradient in their forward, through which backward goes."""

    block = ForceResidual


class ForcesInObjects(Forces):
    """The same where blocks hand each other a dataclass, so that stages are cut from a trace."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made = StatesAndNorm(block(x), x.norm())
            x = made.states / (1 + made.norm)
        return x


class OuterForces(Stack):
    """The module takes a gradient through its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            energy = super().forward(given).square().sum()
            (force,) = torch.autograd.grad(energy, given, create_graph=True)
        return super().forward(x) + 0.01 * force.mean(1)


class CheckpointedResidual(Residual):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return result


class OwnCheckpoints(Stack):
    """Blocks checkpoint themselves."""

    block = CheckpointedResidual


class ReentrantResidual(CheckpointedResidual):
    reentrant = True


class ReentrantCheckpoints(Stack):
    """The same with reentry."""

    block = ReentrantResidual


class CheckpointedBlocks(Stack):
    """The module checkpoints its blocks."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantBlocks(CheckpointedBlocks):
    """The same with reentry."""

    reentrant = True


class CollectiveForward(Stack):
    """Its forward calls a collective of its own."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return super().forward(x - mean)


@dataclass
class StatesAndNorm:
    """States with their norm."""

    states: Tensor
    norm: Tensor


class DataclassResidual(Residual):
    def forward(self, x: Tensor | StatesAndNorm) -> StatesAndNorm:  # type: ignore[override]
        made = super().forward(x.states if isinstance(x, StatesAndNorm) else x)
        return StatesAndNorm(made, made.norm(dim=-1).mean())


class DataclassBlocks(Stack):
    """Blocks hand each other a dataclass."""

    block = DataclassResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        made: Any = x
        for block in self.blocks:
            made = block(made)
        return made.states * made.norm


class PairOfStates(NamedTuple):
    """The same as a named tuple."""

    states: Tensor
    norm: Tensor


class NamedTupleResidual(Residual):
    def forward(self, x: Tensor) -> PairOfStates:  # type: ignore[override]
        made = super().forward(x)
        return PairOfStates(made, made.norm(dim=-1).mean())


class NamedTupleBlocks(Stack):
    """Blocks return a named tuple."""

    block = NamedTupleResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            made = block(x)
            x, total = made.states, total + made.norm
        return x * total


class ModelOutputResidual(Residual):
    def forward(self, x: Tensor) -> BaseModelOutput:  # type: ignore[override]
        made = super().forward(x)
        return BaseModelOutput(last_hidden_state=made, hidden_states=(made * 2,))


class ModelOutputBlocks(Stack):
    """Blocks return transformers' objects."""

    block = ModelOutputResidual

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made = block(x)
            x = made.last_hidden_state + made.hidden_states[0]
        return x


class RowsTogether(Stack):
    """Takes the mean over the rows of a microbatch off each."""

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x - x.mean(0))


class FrozenForAWhile(Stack):
    """Freezes a critic for a part of its forward, as adversarial losses in one forward do."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(WIDTH, WIDTH)

    def read_out(self, x: Tensor) -> Tensor:
        made = super().read_out(x)
        self.critic.requires_grad_(False)
        judged = self.critic(made)
        self.critic.weight.requires_grad = self.critic.bias.requires_grad = True
        return made + 0.1 * judged + 0.1 * self.critic(made.detach())


class ReadStatistics(Stack):
    """Moves centres towards what it is given, in a buffer that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def read_out(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().read_out(x - self.centre.clone())
