"""A job's model as the planner counts it: FLOPs against torch's own count of the real model, windows, latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.build import build_model
from shardwise.model.facts import EVERYTHING, LatentAttention, ModelFacts, Reach
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.formulas.compute import BYTES
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.footprint import footprint
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import ModelShape, TrainingConfiguration
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.toy_inputs import toy_of_files
from shardwise.testing.toy_samples import inputs_of_files
from shardwise.training.setup import study
from shardwise.training.step_record import flops_figures

SEQUENCE, WINDOW = 64, 8
PLAIN = ("llama", "qwen3_moe")
WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2")
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu")
CLOSE = 0.03  # of what is counted; norms and biases are in the formulas' parameters and are no products


def config_of(family: str) -> dict[str, Any]:
    chunked = {"attention_chunk_size": 16} if family == "llama4_text" else {}
    return toy_config(family) | ({"sliding_window": WINDOW} if family in WINDOWED else chunked)


def job_of(family: str, **model: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"config": config_of(family), **model},
            "data": {"sequence_length": SEQUENCE},
            "training": {"sequences_per_step": 4},
        }
    )


def visible_products(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attention that multiplies a query with those keys alone that the model's mask lets it see."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    rows = []
    for position in range(query.shape[2]):
        seen = (attention_mask[0, 0, position] == 0).nonzero()[:, 0]
        scores = query[:, :, position : position + 1] @ key[:, :, seen].transpose(2, 3)
        rows.append(scores.softmax(-1) @ value[:, :, seen])
    return torch.cat(rows, 2).transpose(1, 2).contiguous(), None


def counted(family: str) -> float:
    """FLOPs of a token, forward and backward, as torch counts those of transformers' model."""
    AttentionInterface.register("visible", visible_products)
    AttentionMaskInterface.register("visible", eager_mask)
    fields = {name: value for name, value in config_of(family).items() if name != "model_type"}
    config = CONFIG_MAPPING[family](**fields, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="visible")
    tokens = torch.randint(3, config.vocab_size, (1, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / SEQUENCE


def causal_flops(shape: ModelShape, convention: str) -> float:
    """Those of a convention, with half of its attention: it counts keys ahead of a query too, but for the last."""
    attention = 12.0 * shape.layers * shape.attended(SEQUENCE) * shape.attention_width
    return shape.flops_per_token(SEQUENCE)[convention] - attention / 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [*PLAIN, *WINDOWED, *LATENT])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """PaLM's convention has the model's own parameters, Megatron's those of the formula of a block."""
    shape, real = ModelShape.of(study(job_of(family))), counted(family)
    for convention in ("palm", "megatron-2022"):
        assert causal_flops(shape, convention) == pytest.approx(real, rel=CLOSE)
    if family in WINDOWED:
        blind = replace(shape, reaches=EVERYTHING)
        assert causal_flops(blind, "palm") > (1 + CLOSE) * causal_flops(shape, "palm")


def test_a_window_is_counted_as_it_hides() -> None:
    """Each query of a causal sequence sees itself and those before it; twice that, less the half of itself."""
    for window in (1, 5, WINDOW, SEQUENCE, 2 * SEQUENCE):
        seen = sum(min(position + 1, window) for position in range(SEQUENCE))
        assert Reach(1.0, window).attended(SEQUENCE) == pytest.approx((2 * seen - min(window, SEQUENCE)) / SEQUENCE)
    inside = sum(position % WINDOW + 1 for position in range(SEQUENCE))
    assert Reach(1.0, chunk=WINDOW).attended(SEQUENCE) == pytest.approx(2 * inside / SEQUENCE - 1)


REACHES = {
    "llama": EVERYTHING,
    "mistral": (Reach(1.0, WINDOW),),
    "gemma2": (Reach(0.5), Reach(0.5, WINDOW)),
    "longcat_flash": (Reach(2.0),),
    "qwen3_next": (Reach(0.5),),
    "llama4_text": (Reach(0.5), Reach(0.5, 0, 16)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", REACHES)
def test_facts_say_how_far_each_call_sees(family: str) -> None:
    assert study(job_of(family)).reaches == REACHES[family]


def test_a_shape_and_its_facts_count_alike() -> None:
    for family in ("gemma2", "deepseek_v3", "gpt2"):
        facts = study(job_of(family))
        palm = ModelShape.of(facts).flops_per_token(SEQUENCE)["palm"]
        assert palm == pytest.approx(facts.model_flops_per_token(SEQUENCE))


def configured(facts: ModelFacts, device: str = "cuda") -> TrainingConfiguration:
    plan = resolve(job_of(facts.family), World(4, device, 4), facts)
    return configuration_of(plan, facts, cluster("p5.48xlarge:1"))


def test_a_window_saves_time_where_the_kernel_leaves_out_what_it_hides() -> None:
    """Torch's own attention computes all keys of a window, and those ahead, under a mask."""
    facts = study(job_of("mistral"))
    assert [configured(facts, device).masks_windows for device in ("cpu", "cuda")] == [False, True]
    under_mask = configured(facts)
    spared = replace(under_mask, masks_windows=False)
    whole = replace(under_mask, model=replace(under_mask.model, reaches=EVERYTHING))
    seconds = [predict(each).seconds["attention"] for each in (spared, whole, under_mask)]
    assert seconds[0] < seconds[1] and seconds[2] == pytest.approx(2 * seconds[1])


def test_a_windows_mask_is_in_the_memory_where_torch_is_given_one() -> None:
    facts = study(job_of("mistral"))
    whole = replace(facts, attention=tuple(replace(call, window=None) for call in facts.attention))
    held = {}
    for kernel in ("sdpa", "blockwise"):
        plan = resolve(job_of("mistral", attention=kernel), World(1, "cpu", 1), facts)
        one, other = (estimate(plan, each).activations for each in (facts, whole))
        held[kernel] = one - other
    assert held == {"sdpa": SEQUENCE * SEQUENCE * BYTES[plan.dtypes.compute], "blockwise": 0}


@pytest.mark.parametrize("rank", [24, None])
def test_latents_are_read_off_the_config(rank: int | None) -> None:
    config = toy_config("deepseek_v3") | {"q_lora_rank": rank, "v_head_dim": 16}
    facts = study(Job.model_validate({"model": {"config": config}}))
    assert facts.latent == LatentAttention(rank or 0, 16, 8, 8, 16)
    shape = ModelShape.of(facts)
    made = {name: sizes for name, sizes in facts.linears.items() if ".layers.0.self_attn." in name}
    products = sum(into * out for into, out in shape.attention_products(1))
    ahead = 0 if rank else 32 * 4 * 16  # without a latent, queries are a part of a product of hidden states
    assert products == sum(into * out for into, out in made.values())
    assert ahead == sum(into * out for name, (into, out) in made.items() if name.endswith(".q_proj"))


def test_latents_are_held_beside_heads() -> None:
    facts = study(job_of("minicpm3"))
    given = configured(facts)
    held = [
        footprint(replace(given, model=replace(given.model, latent=latent)))[0]["activations"]
        for latent in (facts.latent, None)
    ]
    latents = 2 * (16 + 16) * BYTES[given.precision]  # bytes of a token: each, and what its norm reads
    each = given.stack.activations * given.model.layers * given.microbatch * SEQUENCE
    assert held[0] - held[1] == pytest.approx(each * latents)


def test_a_router_is_no_dense_product_of_many_tensor_ranks() -> None:
    """Beside its experts a block of Mixtral has a router, of fewer features than there are ranks."""
    job = job_of("mixtral")
    keys = {"tensor_parallel_degree": 4, "sequence_parallel": True}
    precision = job.precision.model_copy(update={"compute": "fp32"})
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update=keys), "precision": precision})
    facts, nodes = study(job), cluster("dgx-h100:1")
    made = configuration_of(resolve(job, World(8, "cuda", 8, "H100"), facts), facts, nodes)
    assert 0 < made.model.dense_width < 4
    assert predict(made).step_seconds > 0


def sample_job(task: str, family: str) -> Job:
    config, arguments = toy_of_files(task, family)
    data = {"factory": "shardwise.testing.toy_samples:ToySamples", "factory_arguments": arguments}
    labels = {"labels": ["cat", "dog", "cow"]} if TASKS[task].classifies else {}
    return Job.model_validate({"model": {"config": config, "task": task, **labels}, "data": data})


@pytest.mark.parametrize(
    "task, family, positions",
    [
        ("image_classification", "vit", 17),
        ("image_classification", "resnet", 0),
        ("speech_seq2seq", "whisper", 0),
        ("image_text_to_text", "llava", None),
    ],
)
def test_positions_of_a_sample_are_those_that_blocks_see(task: str, family: str, positions: int | None) -> None:
    """Of a picture its patches and a class token; where blocks differ they are not known, and tokens are counted."""
    facts = study(sample_job(task, family))
    assert facts.sample_positions == positions
    assert facts.positions(SEQUENCE) == (positions or SEQUENCE)


def test_flops_of_an_image_are_those_that_torch_counts() -> None:
    """Those of the pixels' gradient too, which a step does not need."""
    job = sample_job("image_classification", "vit")
    facts = study(job)
    model, inputs = build_model(job).to_empty(device="cpu"), inputs_of_files(job)
    model.set_attn_implementation("eager")
    inputs["pixel_values"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(**inputs).logits.sum().backward()
    number = facts.positions(SEQUENCE)
    counted = counter.get_total_flops() / len(inputs["pixel_values"])
    assert number * facts.model_flops_per_token(number) == pytest.approx(counted, rel=0.1)


def test_a_run_has_the_flops_of_the_positions_that_blocks_see() -> None:
    job = sample_job("image_classification", "vit")
    facts = study(job)
    plan = resolve(job, World(2, "cpu", 2), facts)
    found = flops_figures(plan, facts, 1000.0, SEQUENCE)
    of_one = facts.model_flops_per_token(17)
    assert of_one < facts.model_flops_per_token(SEQUENCE)
    assert found["tflops_per_rank"] == pytest.approx(500 * of_one / 1e12)
    unknown = flops_figures(plan, replace(facts, sample_positions=0), 1000.0, SEQUENCE)
    assert unknown.keys() == found.keys() and set(unknown.values()) == {None}


def test_a_plan_of_images_counts_their_positions() -> None:
    job = sample_job("image_classification", "vit")
    facts = study(job)
    plan = resolve(job, World(1, "cpu", 1), facts)
    assert configuration_of(plan, facts, cluster("cpu")).sequence == facts.sample_positions
    unknown = replace(facts, sample_positions=0)
    assert estimate(plan, facts).activations < estimate(plan, unknown).activations / 4
