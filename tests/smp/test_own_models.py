"""Scripts' own models: blocks in lists that are no modules, forwards that end earlier, the script's random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.errors import LegalityError
from shardwise.model.discover import find_block_lists
from shardwise.smp.exceptions import StepUsageError
from shardwise.testing.world import WorldPool

WIDTH, ROWS, STEPS = 8, 8, 3
STAGES: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


class Pairs(nn.Module):
    """A pair of layers a block, in a list that the forward takes apart."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)
        pairs = (
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
            for _ in range(blocks)
        )
        self.layers = nn.ModuleList(pairs)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, only_states: bool = False) -> Tensor:
        x = self.inner(x)
        for number, (norm, mix) in enumerate(self.layers):
            x = x + mix(norm(x))
            if only_states and number == 0:
                return x
        scores: Tensor = self.head(x)
        return scores


@smp.step
def train_step(model: Any, x: Tensor, label: Tensor) -> Any:
    scores = model(x)
    loss = F.cross_entropy(scores, label)
    model.backward(loss)
    return loss


@smp.step
def states_step(model: Any, x: Tensor) -> Any:
    return model.forward(x, only_states=True).argmax(1)


def _made(hooked: bool = False) -> Pairs:
    torch.manual_seed(1)
    model = Pairs().double()
    if hooked:
        model.layers[1][1][0].weight.register_hook(lambda gradient: 3 * gradient)
    return model


def _batch() -> tuple[Tensor, Tensor]:
    """From the script's own stream of random numbers."""
    return torch.randn(ROWS, 4, dtype=torch.float64), torch.randint(0, 2, (ROWS,))


def _plain(hooked: bool = False) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = _made(hooked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        x, label = _batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), model(x, only_states=True).argmax(1)


def _trained(config: dict[str, Any], hooked: bool = False) -> tuple[list[float], dict[str, Tensor], Tensor]:
    smp.init(config)
    try:
        with smp.tensor_parallelism():
            module = _made(hooked)
        model: Any = smp.DistributedModel(module)
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(STEPS):
            x, label = (value.chunk(smp.dp_size())[smp.dp_rank()] for value in _batch())
            optimizer.zero_grad()
            loss = train_step(model, x, label).reduce_mean()
            optimizer.step()
            losses.append(sum(float(each) for each in smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        with torch.no_grad():
            found = states_step(model, x)
        whole = torch.cat(smp.allgather(found.concat(), smp.DP_GROUP))
        means = torch.stack(found.outputs).double().mean(0)
        assert found.reduce_mean().is_floating_point() and torch.allclose(found.reduce_mean().double(), means)
        return losses, model.state_dict(), whole
    finally:
        smp.state.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config",
    [
        {"ddp": True, "microbatches": 2},
        STAGES,
        {"ddp": True, "shard_optimizer_state": True},
        {"ddp": True, "tensor_parallel_degree": 2},
        {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
    ],
)
def test_blocks_in_lists_that_are_no_modules(world_pool: WorldPool, config: dict[str, Any]) -> None:
    """On replicas, stages, tensor ranks and shards as on one process; over stages a step may also end before the last
    ones, and the loader's random numbers are those of one worker."""
    losses, weights, states = _plain()
    for found in world_pool.run(2, _trained, config):
        assert found[0] == pytest.approx(losses, abs=1e-12)
        assert all(torch.allclose(found[1][name], value, atol=1e-12) for name, value in weights.items())
        assert torch.equal(found[2], states)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [STAGES, {"ddp": True, "sharded_data_parallel_degree": 2}])
def test_hooks_on_parameters_act(world_pool: WorldPool, config: dict[str, Any]) -> None:
    weights = _plain(hooked=True)[1]
    for _, trained, _ in world_pool.run(2, _trained, config | {"sdp_gradient_clipping": 0.0}, True):
        assert all(torch.allclose(trained[name], value, atol=1e-12) for name, value in weights.items())


def test_what_a_bare_list_holds_are_the_blocks() -> None:
    names = [f"layers.{block}.{part}" for block in range(2) for part in range(2)]
    assert find_block_lists(Pairs(2)) == [names]


def _apart(what: str) -> str:
    smp.init(STAGES)
    try:
        model: Any = smp.DistributedModel(_made())
        x, label = _batch()
        try:
            if smp.pp_rank() == 0 and what == "step":
                states_step(model, x)
            else:
                with torch.set_grad_enabled(what == "step" or smp.pp_rank() > 0):
                    train_step(model, x, label)
        except StepUsageError as error:
            return str(error)
        return ""
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    "what, first", [("step", "'states_step' with gradients"), ("gradients", "'train_step' without gradients")]
)
def test_stages_in_different_steps_are_told(world_pool: WorldPool, what: str, first: str) -> None:
    for said in world_pool.run(2, _apart, what):
        assert f"pipeline rank 0 is in the step {first}, and other stages are not" in said
    assert "(pipeline rank 1: 'train_step' with gradients)" in said


class Chain(nn.Module):
    """Blocks in a row over hidden states [rows, features], or with channels in between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(4, WIDTH)
        self.channels = channels
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        states = self.layers(x.unsqueeze(1).expand(-1, self.channels, -1) if self.channels else x)
        return states.mean(1) if self.channels else states


def _chained(channels: int) -> list[float]:
    smp.init(STAGES)
    try:
        model: Any = smp.DistributedModel(Chain(channels).double())
        torch.manual_seed(5)
        first, label = _batch()
        found = [train_step(model, x, wanted).reduce_mean() for x, wanted in ((first, label), (first[:4], label[:4]))]
        return [float(loss) for loss in found]
    finally:
        smp.state.reset()


@pytest.mark.parametrize("channels", [0, 3])
def test_stages_of_hidden_states_of_other_shapes(world_pool: WorldPool, channels: int) -> None:
    plain = Chain(channels).double()
    torch.manual_seed(5)
    x, label = _batch()
    expected = [float(F.cross_entropy(plain(x[:n]), label[:n]).detach()) for n in (ROWS, 4)]
    for found in world_pool.run(2, _chained, channels):
        assert found == pytest.approx(expected, abs=1e-12)


class Mixer(nn.Module):
    """A script's transformer without a config, whose arguments its registration translates."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, heads)


class Sorter(nn.Module):
    """Its middle is replaced; nothing else says how many heads there are."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(4, WIDTH), Mixer(WIDTH, heads), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.inner(x).unsqueeze(1).expand(-1, 3, -1))
        scores: Tensor = self.head(hidden.mean(1))
        return scores


def _replaced(heads: int, config: dict[str, Any]) -> tuple[list[float], str]:
    smp.init(config)
    off = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    smp.tp_register_with_module(
        Mixer,
        smp.nn.DistributedTransformer,
        lambda width, heads: (
            (),
            {"num_layers": 2, "num_attention_heads": heads, "attention_head_size": 4, "hidden_size": width,
             "intermediate_size": 16, **off},
        ),
        lambda x: (((x, torch.zeros(len(x), 1, 1, x.shape[1], dtype=x.dtype)),), {}),
        lambda output: output[0],
    )  # fmt: skip
    try:
        torch.manual_seed(2)
        module = Sorter(heads)
        smp.set_tensor_parallelism(module.middle)
        model: Any = smp.DistributedModel(module.double())
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, label = (value.chunk(smp.dp_size())[smp.dp_rank()] for value in _batch())
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = train_step(model, x, label).reduce_mean()
            optimizer.step()
            losses.append(sum(float(each) for each in smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        return losses, ""
    except LegalityError as error:
        return [], str(error)
    finally:
        smp.state.reset()


@pytest.mark.slow
def test_registered_layers_of_a_model_without_config(world_pool: WorldPool) -> None:
    expected = world_pool.run(1, _replaced, 2, {"ddp": True})[0][0]
    assert len(expected) == STEPS
    for losses, _ in world_pool.run(2, _replaced, 2, {"ddp": True, "tensor_parallel_degree": 2}):
        assert losses == pytest.approx(expected, abs=1e-12)
    for _, said in world_pool.run(2, _replaced, 3, {"ddp": True, "tensor_parallel_degree": 2}):
        assert said.startswith("tensor_parallel_degree=2: ") and "3 attention heads" in said


def test_a_script_finds_the_forward_of_a_class() -> None:
    assert smp.state.patch_manager.get_original_method("forward", nn.Linear) is nn.Linear.forward
