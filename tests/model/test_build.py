"""Models are built on meta from every source, without a hub, and every broken source has its own error."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.activations import GELUTanh, NewGELUActivation

from shardwise.errors import ConfigError, ModelError
from shardwise.job.schema import Job
from shardwise.model.build import build_model, constructed_parameters, load_config, parameters_on_meta
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.toy_inputs import toy_of_files
from tests.model import toys


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _devices(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


def _message(job: Job) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        build_model(job)
    return str(caught.value)


@pytest.mark.parametrize("model_type", toys.CONFIGS)
def test_every_family_is_built_on_meta(model_type: str) -> None:
    model = build_model(toys.job(model_type))
    assert _devices(model) == {"meta"}
    assert model.training and model.config.use_cache is False
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("as_file", [False, True])
def test_directory_and_file(tmp_path: Path, as_file: bool) -> None:
    GPT2Config(**toys.GPT, dtype="bfloat16").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "do_sample": True}))
    model = {"config": str(tmp_path / "config.json")} if as_file else {"path": str(tmp_path)}
    built = build_model(Job.model_validate({"model": model}))
    assert type(built) is GPT2LMHeadModel and built.config.n_layer == 2
    assert next(built.parameters()).dtype is torch.float32  # master weights, whatever the checkpoint was saved in
    assert as_file or built.generation_config.temperature == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neo", "gptj"])
def test_gelu_new_is_one_kernel_that_keeps_its_input_alone(model_type: str, dtype: torch.dtype) -> None:
    activations = [m for m in build_model(toys.job(model_type)).modules() if "gelu" in type(m).__name__.lower()]
    assert {type(m) for m in activations} == {GELUTanh} and len(activations) == 2
    values = torch.linspace(-6, 6, 4001, dtype=dtype).requires_grad_()
    numbers, kept = [], []
    for function in (NewGELUActivation(), activations[0]):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            result = function(values)
        [gradient] = torch.autograd.grad(result.sum(), values)
        numbers.append((result, gradient))
        kept.append(len(saved))
    assert kept[1] == 1 < kept[0]
    for plain, fused in zip(*numbers, strict=True):
        # torch's kernel rounds once; the formula in steps rounds after each
        torch.testing.assert_close(fused, plain, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_default_is_about_ten_million_parameters() -> None:
    for vocabulary in (512, 4096, 32768):
        job = Job.model_validate({"data": {"vocabulary_size": vocabulary, "sequence_length": 2048}})
        model = build_model(job)
        assert 8.5e6 < sum(p.numel() for p in model.parameters()) < 11.5e6
        assert model.config.vocab_size == vocabulary and model.config.max_position_embeddings >= 2048
        assert model.lm_head.weight is not model.gpt_neox.embed_in.weight
        assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))


def test_vocabulary_follows_the_tokenizer_trained_here() -> None:
    values = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {
        "trained": ({"vocabulary_size": 301}, {}, 301),
        "given": ({"vocabulary_size": 301}, {"vocab_size": 77}, 77),
        "own tokenizer": ({"vocabulary_size": 301, "tokenizer": "somewhere"}, {}, 32000),
    }
    for name, (data, extra, expected) in sizes.items():
        job = Job.model_validate({"model": {"config": {**values, **extra}}, "data": data})
        assert load_config(job).vocab_size == expected, name


def test_fields_of_a_config_stand_on_top_of_a_directory(tmp_path: Path) -> None:
    own = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
    own["rope_parameters"] = {"rope_theta": 700.0, "rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(own))
    fields = {"max_position_embeddings": 96, "rope_parameters": {"factor": 4.0}}
    job = {"path": str(tmp_path), "config": {"model_type": "llama", **fields}}
    config = load_config(Job.model_validate({"model": job}))
    assert (config.num_hidden_layers, config.max_position_embeddings) == (3, 96)
    assert config.rope_parameters == {"rope_theta": 700.0, "rope_type": "linear", "factor": 4.0}
    for wrong, says in (
        ({"model_type": "gpt2"}, "holds a 'llama' model"),
        ({"hidden_sizes": 3}, "Did you mean 'hidden_size'"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(Job.model_validate({"model": {"path": str(tmp_path), "config": wrong}}))
    elsewhere = {"path": str(tmp_path / "elsewhere"), "config": {"model_type": "llama", "num_hidden_layers": 5}}
    assert load_config(Job.model_validate({"model": elsewhere})).num_hidden_layers == 5


def test_special_tokens_beyond_a_small_vocabulary_are_dropped() -> None:
    config = load_config(toys.Job.model_validate({"model": {"config": {"model_type": "gpt2", **toys.GPT}}}))
    assert config.eos_token_id is None  # GPT-2's own is 50256
    assert load_config(toys.job("gpt2", config={"eos_token_id": 3})).eos_token_id == 3


def test_dropout_sets_every_probability_of_the_body() -> None:
    config = load_config(toys.job("gpt2", dropout=0.3))
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.3, 0.3, 0.3)
    assert config.summary_first_dropout == 0.1  # a head that a language model does not have
    bert = load_config(toys.job("bert", dropout=0.0))
    assert (bert.hidden_dropout_prob, bert.attention_probs_dropout_prob, bert.classifier_dropout) == (0.0, 0.0, None)
    assert load_config(toys.job("opt", dropout=0.2)).layerdrop == 0.0


def test_dropout_is_refused_where_there_is_none() -> None:
    job = {"model": {"config": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1}, "dropout": 0.1}}
    assert "'mamba' has no dropout" in _message(Job.model_validate(job))
    job["model"]["dropout"] = 0.0  # type: ignore[index]
    assert build_model(Job.model_validate(job)) is not None


def test_layers_dropped_at_random_are_refused() -> None:
    assert "layerdrop=0.1 in the config of 'opt'" in _message(toys.job("opt", config={"layerdrop": 0.1}))


def test_attention_kernel() -> None:
    assert build_model(toys.job("llama", attention="eager")).config._attn_implementation == "eager"
    assert build_model(toys.job("llama", attention="sdpa")).config._attn_implementation == "sdpa"
    assert build_model(toys.job("gpt_neo", attention="sdpa")).config.model_type == "gpt_neo"  # by a kernel of ours
    config = {"model_type": "mpt", "d_model": 32, "n_layers": 1, "n_heads": 4}
    message = _message(Job.model_validate({"model": {"config": config, "attention": "sdpa"}}))
    assert "model.attention='sdpa'" in message and "'mpt' has eager only" in message


def test_an_encoder_trained_as_causal_lm_does_not_see_the_future() -> None:
    job = toys.job("bert", task="causal_lm", dropout=0.0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(build_model(job).config).eval()
    tokens = torch.arange(12).reshape(1, 12)
    other = tokens.clone()
    other[0, -1] = 90
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits[:, :-1], model(other).logits[:, :-1])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "holds no config.json"),
        ("{broken", "cannot be read as JSON"),
        ("[1]", "holds a list, not a JSON object"),
        ('{"hidden_size": 3}', "has no model_type"),
        ('{"model_type": "gpt_neoxx"}', "Did you mean 'gpt_neox'?"),
        ('{"model_type": "t5"}', "model_type 't5' has no such head"),
        ('{"model_type": "distilbert"}', "use model.task='masked_lm'"),
        ('{"model_type": "gpt_neox", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "gpt_neox", "hidden_size": 10, "num_attention_heads": 3}', "divisible"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "quantized weights"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}', "model.trust_remote_code=False"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "them/repo--code.Mine"}}', "lives on a hub"),
    ],
)
def test_broken_directories(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert expected in _message(Job.model_validate({"model": {"path": str(tmp_path)}}))


def test_missing_directory(tmp_path: Path) -> None:
    assert "does not exist" in _message(Job.model_validate({"model": {"path": "gpt2"}}))
    (tmp_path / "file").write_text("")
    assert "is not a directory" in _message(Job.model_validate({"model": {"path": str(tmp_path / "file")}}))


def test_unknown_key_of_a_config_is_refused() -> None:
    assert "Did you mean 'num_hidden_layers'?" in _message(toys.job("llama", config={"num_hidden_layer": 3}))
    assert load_config(toys.job("llama", config={"rope_theta": 500.0})).rope_parameters["rope_theta"] == 500.0


def test_remote_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "code_of_mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine_of_a_test'\n"
        "class MineLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    auto_map = {"AutoConfig": "code_of_mine.MineConfig", "AutoModelForCausalLM": "code_of_mine.MineLM"}
    config = {"model_type": "mine_of_a_test", "auto_map": auto_map, **toys.GROUPED}
    (directory / "config.json").write_text(json.dumps(config))
    model = {"path": str(directory)}
    assert "set model.trust_remote_code=True" in _message(Job.model_validate({"model": model}))
    built = build_model(Job.model_validate({"model": {**model, "trust_remote_code": True}}))
    assert type(built).__name__ == "MineLM" and _devices(built) == {"meta"}


def test_a_users_module_keeps_its_buffers() -> None:
    model = build_model(toys.factory_job("tower", factory_arguments={"width": 8, "layers": 4}))
    assert _devices(model) == {"meta"} and model.training
    assert model.scales.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.mirror is model.readout.weight


def test_one_parameter_registered_twice_stays_one() -> None:
    model = build_model(toys.factory_job("twice_registered"))
    assert model.left is model.right and model.left.device.type == "meta" and not model.left.requires_grad


def test_the_patch_is_undone_after_a_failure() -> None:
    original = nn.Module.register_parameter
    with pytest.raises(RuntimeError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.device.type == "meta"
        raise RuntimeError
    assert nn.Module.register_parameter is original
    assert nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raises", f"raised RuntimeError: no such luck ({toys.__file__}:"),
        ("no_module", "returned a int"),
        ("no_parameters", "without parameters"),
        ("lazy", "is lazy"),
        ("buffer_without_values", "buffer 'copy' has no values"),
        ("not_callable", "not a function or class"),
        ("towr", "Did you mean 'tower'?"),
    ],
)
def test_broken_factories(name: str, expected: str) -> None:
    assert expected in _message(toys.factory_job(name))


def test_factory_with_wrong_arguments() -> None:
    assert "unexpected keyword argument 'depth'" in _message(toys.factory_job("tokens", factory_arguments={"depth": 3}))


@pytest.mark.skipif("apertus1p5" not in CONFIG_MAPPING, reason="this transformers has no Apertus 1.5")
def test_what_is_computed_from_a_constructor_s_parameter_has_values() -> None:
    """A weight norm takes direction and length off the weight of a convolution, which is gone then."""
    config, _ = toy_of_files("image_text_to_text", "apertus1p5")
    job = Job.model_validate({"model": {"config": config, "task": "image_text_to_text"}, "data": {"path": "text"}})
    weight = "model.audio_tokenizer.encoder.layers.0.conv.parametrizations.weight.original"
    made = constructed_parameters(job, [f"{weight}0", f"{weight}1"])
    length, direction = made[f"{weight}0"], made[f"{weight}1"]
    assert torch.equal(length, torch.norm_except_dim(direction, 2, 0)) and length.any()


def test_a_config_that_has_no_defaults_without_its_parts() -> None:
    """transformers 5.17 makes no vision-encoder-decoder without both, and takes values out of what it is given."""
    config, _ = toy_of_files("image_text_to_text", "vision-encoder-decoder")
    job = Job.model_validate({"model": {"config": config, "task": "image_text_to_text"}, "data": {"path": "text"}})
    built = build_model(job)
    assert built.config.encoder.num_hidden_layers == built.config.decoder.num_hidden_layers == 2
    assert built.config.decoder_start_token_id == 1 and job.model.config == config


def test_a_decoder_whose_inputs_lack_padding_is_refused() -> None:
    """transformers would raise in the first step."""
    config, _ = toy_of_files("speech_seq2seq", "speech-encoder-decoder")
    del config["pad_token_id"]
    job = Job.model_validate({"model": {"config": config, "task": "speech_seq2seq"}, "data": {"path": "sound"}})
    with pytest.raises(ModelError, match=r"cannot make its decoder's inputs of labels.*set pad_token_id in its config"):
        build_model(job)


def test_a_parameter_that_is_replaced_shifts_no_numbers(tmp_path: Path) -> None:
    """LUKE ties what it has registered; a parameter made later may have the id of one that is gone."""
    (tmp_path / "config.json").write_text(json.dumps(toy_config("luke")))
    job = Job.model_validate({"model": {"config": str(tmp_path), "task": "masked_lm"}, "data": {"path": "text"}})
    for _ in range(20):
        (bias,) = constructed_parameters(job, ["entity_predictions.bias"]).values()
        assert not bias.is_meta and not bias.any()
