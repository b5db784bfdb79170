"""Initial weights: bit-equal on every layout, a function of seed and name, read by slices from a directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.initializers import run_initializer
from shardwise.parallel.transforms.materialize import is_blank, materialize
from shardwise.testing.capture import gather
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training import init
from shardwise.training.setup import set_up, study
from tests.parity.jobs import MODELS, VOCABULARY, make_job, make_module_job

MODULE = {"factory": "tests.parity.jobs:Regression", "loss": "tests.parity.jobs:squared_error"}
LAYOUTS = [
    (4, {"sharded_data_parallel_degree": 2}),
    pytest.param(2, {}, marks=pytest.mark.slow),
    pytest.param(2, {"sharded_data_parallel_degree": 1}, marks=pytest.mark.slow),
    pytest.param(2, {"shard_optimizer_state": True}, marks=pytest.mark.slow),
    pytest.param(3, {}, marks=pytest.mark.slow),
    pytest.param(8, {}, marks=pytest.mark.slow),
    pytest.param(8, {"sharded_data_parallel_degree": 4, "placement_strategy": "spread"}, marks=pytest.mark.slow),
]


def drawn(model_type: str, absent: Collection[str] = ()) -> Any:
    """A model in fp64 whose initializer has run but for the modules `absent`, as far as `initialize` reads it."""
    job = Job(model={"config": toy_config(model_type)})
    module = build_model(job).double()
    materialize(module, torch.device("cpu"), torch.device("cpu"))
    with torch.no_grad():
        for name in reversed([name for name, _ in module.named_modules()]):
            if name not in absent:
                run_initializer(module, name)
    part = SimpleNamespace(module=module, boundary=SimpleNamespace(absent=frozenset(absent)))
    return SimpleNamespace(parts=[part], plan=SimpleNamespace(job=job), device=torch.device("cpu"), module=module)


def test_buffers_that_no_initializer_fills_have_the_values_of_their_constructor() -> None:
    model = drawn("apertus")
    assert is_blank(model.module.get_buffer("model.layers.0.mlp.act_fn.beta"))
    with torch.no_grad():
        init._fill_blank_buffers(model, 0)
    assert model.module.get_buffer("model.layers.0.mlp.act_fn.beta").item() == 0.5
    assert not any(map(is_blank, model.module.buffers()))


def test_buffers_of_modules_of_other_stages_have_the_values_of_the_initializer() -> None:
    """A constructor makes them in fp32."""
    model = drawn("gemma", ["model.embed_tokens"])
    scale = model.module.get_buffer("model.embed_tokens.embed_scale")
    with torch.no_grad():
        init._fill_blank_buffers(model, 0)
    assert scale.dtype == torch.float64
    assert scale.item() == model.module.config.hidden_size**0.5 != torch.tensor(scale.item()).float().item()


def test_a_buffer_that_nobody_fills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "constructed_buffers", lambda job, initialized: {})
    with pytest.raises(ModelError, match=r"buffer 'model\.layers\.0\.mlp\.act_fn\.beta' has no values"):
        init._fill_blank_buffers(drawn("apertus"), 0)


def test_blank_buffers_of_any_dtype_are_known() -> None:
    module = nn.Module()
    for name in ("bool", "int64", "bfloat16"):
        module.register_buffer(f"of_{name}", torch.empty(2, device="meta", dtype=getattr(torch, name)))
    materialize(module, torch.device("cpu"), torch.device("cpu"))
    assert all(map(is_blank, module.buffers()))
    for buffer in module.buffers():
        buffer.copy_(torch.zeros(2))
    assert not any(map(is_blank, module.buffers()))


def initial(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole parameters (rank 0) and buffers after `set_up`."""
    run = set_up(job, torch.device("cpu"))
    return gather(run), {name: buffer.clone() for name, buffer in run.model.module.named_buffers()}


def jobs(corpora: Path, **sections: Any) -> dict[str, Job]:
    made = {family: make_job(corpora, family, **sections) for family in MODELS}
    return made | {"module": make_module_job(corpora, **sections)}


def all_initial(several: dict[str, Job]) -> dict[str, Any]:
    return {name: initial(job) for name, job in several.items()}


def assert_equal(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def alone(world_pool: WorldPool, corpora: Path) -> dict[str, Any]:
    return world_pool.run(1, all_initial, jobs(corpora))[0]


@pytest.mark.parametrize("ranks, parallel", LAYOUTS)
def test_bit_equal_on_every_layout(
    world_pool: WorldPool, corpora: Path, alone: dict[str, Any], ranks: int, parallel: dict[str, Any]
) -> None:
    found = world_pool.run(ranks, all_initial, jobs(corpora, parallel=parallel))[0]
    for name, expected in alone.items():
        assert_equal(found[name], expected)


def test_memory_settings_do_not_touch_them(world_pool: WorldPool, corpora: Path, alone: dict[str, Any]) -> None:
    memory = {"offload_parameters": True, "activation_checkpointing": "full", "checkpoint_strategy": "contiguous"}
    assert_equal(world_pool.run(2, initial, make_job(corpora, memory=memory))[0], alone["gpt2"])


def test_they_look_like_the_models_own_initialization(alone: dict[str, Any]) -> None:
    """Norms are ones, biases zeros, GPT-2's residual projections narrower, rotary buffers filled."""
    weights, _ = alone["gpt2"]
    assert torch.equal(weights["transformer.ln_f.weight"], torch.ones(26, dtype=torch.float64))
    assert float(weights["transformer.h.0.mlp.c_fc.bias"].abs().max()) == 0.0
    assert float(weights["transformer.wte.weight"].std()) == pytest.approx(0.02, rel=0.1)
    narrow = 0.02 / (2 * 3) ** 0.5
    assert float(weights["transformer.h.1.attn.c_proj.weight"].std()) == pytest.approx(narrow, rel=0.2)
    _, buffers = alone["llama"]
    assert all(float(buffer.max()) == 1.0 for name, buffer in buffers.items() if "inv_freq" in name)
    _, buffers = alone["module"]
    assert torch.equal(buffers["scale"], torch.linspace(0.5, 1.5, 6).double())


def test_another_seed_draws_other_weights_and_equal_modules_differ(
    world_pool: WorldPool, corpora: Path, alone: dict[str, Any]
) -> None:
    other, _ = world_pool.run(1, initial, make_job(corpora, training={"seed": 1}))[0]
    weights, _ = alone["gpt2"]
    name = "transformer.h.{}.mlp.c_fc.weight"
    assert not torch.equal(other[name.format(0)], weights[name.format(0)])
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])


def test_a_directorys_weights_are_read_on_every_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**{**MODELS["gpt2"], "vocab_size": VOCABULARY})
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    job = make_job(corpora, model={"config": None, "path": str(tmp_path)})
    for ranks in (1, 3):
        weights, _ = world_pool.run(ranks, initial, job)[0]
        expected = dict(model.named_parameters())
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], expected[name].detach().double()) for name in expected)


def test_parameters_without_an_initializer_may_come_from_a_directory(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**toy_config("apertus", vocab_size=VOCABULARY)))
    model.save_pretrained(tmp_path)
    weights, buffers = world_pool.run(1, initial, make_job(corpora, model={"config": None, "path": str(tmp_path)}))[0]
    name = "model.layers.0.mlp.act_fn.alpha_p"
    assert torch.equal(weights[name], model.get_parameter(name).detach().double())
    assert buffers["model.layers.0.mlp.act_fn.beta"].item() == 0.5


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale


def setting_up_fails(job: Job) -> str:
    with pytest.raises(ModelError) as caught:
        set_up(job, torch.device("cpu"))
    return str(caught.value)


def test_a_parameter_without_initializer_is_named(world_pool: WorldPool, corpora: Path) -> None:
    job = make_module_job(corpora, model={"factory": f"{__name__}:Unset"})
    (message,) = world_pool.run(1, setting_up_fails, job)
    assert "'scale'" in message and "Unset" in message and "reset_parameters" in message


def test_a_file_gives_some_weights(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    given = {"first.weight": torch.linspace(0, 1, 36).view(6, 6), "blocks.1.up.bias": torch.ones(13)}
    torch.save(given, tmp_path / "some.pt")
    save_file(given, tmp_path / "some.safetensors")
    files = [None, str(tmp_path / "some.pt"), str(tmp_path / "some.safetensors")]
    several = {str(file): make_module_job(corpora, model=MODULE | {"weights": file}) for file in files}
    drawn, *read = (weights for weights, _ in world_pool.run(2, all_initial, several)[0].values())
    for weights in read:
        assert all(torch.equal(value, given.get(name, drawn[name]).double()) for name, value in weights.items())


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("frst.weight", torch.ones(6, 6), "Did you mean 'first.weight'"),
        ("first.weight", torch.ones(6, 5), r"shape \[6, 5\]"),
        ("first.weight", torch.ones(6, 6, dtype=torch.int8), "stored as int8"),
        ("first.weight", torch.ones(6, 6).to(torch.float8_e4m3fn), "stored as F8_E4M3"),
    ],
)
def test_a_file_of_other_weights_is_refused(
    corpora: Path, tmp_path: Path, name: str, tensor: Tensor, says: str
) -> None:
    save_file({name: tensor}, tmp_path / "other.safetensors")
    job = make_module_job(corpora, model=MODULE | {"weights": str(tmp_path / "other.safetensors")})
    with pytest.raises(ModelError, match=says):
        study(job)
