"""Dimensions of public models, against the numbers of parameters that their makers publish."""

from __future__ import annotations

import pytest

from shardwise.job.public_models import find_mentioned, find_model, public_models

BILLIONS = {
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
    "meta-llama/Llama-3.1-405B": 405.85,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "mistralai/Mixtral-8x22B-v0.1": 140.62,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-72B": 72.71,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-235B-A22B": 235.09,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "deepseek-ai/DeepSeek-R1": 671.03,
    "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83,
    "meta-llama/Llama-4-Scout-17B-16E": 107.77,
    "meta-llama/Llama-4-Maverick-17B-128E": 400.71,
}


@pytest.mark.slow  # large models on the meta device
@pytest.mark.parametrize("name", BILLIONS)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    from shardwise.job.schema import Job
    from shardwise.model.build import build_model

    model = build_model(Job.model_validate({"model": {"config": public_models()[name].config}}))
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.004)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf_llama3_2_1b_seq8k_gpu_p5x1_pretrain", "meta-llama/Llama-3.2-1B"),
        ("hf_llama3_2_11b_seq8k_gpu_p5x4_pretrain", None),
        ("hf_llama3_3_70b_seq8k_gpu_lora", "meta-llama/Llama-3.3-70B-Instruct"),
        ("hf_llama3_405b_seq16k_gpu_qlora", "meta-llama/Llama-3.1-405B"),
        ("hf_llama4_17b_16e_seq4k_gpu_lora", "meta-llama/Llama-4-Scout-17B-16E"),
        ("hf_deepseek_r1_671b_seq8k_gpu_lora", "deepseek-ai/DeepSeek-R1"),
        ("deepseek-r1-distilled-qwen-1-dot-5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        ("qwen-2d5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen-3-1d7b", "Qwen/Qwen3-1.7B"),
        ("openai-gpt-oss-120b", "openai/gpt-oss-120b"),
        ("hf_mixtral_8x7b_seq8k", "mistralai/Mixtral-8x7B-v0.1"),
        ("somebody-elses-7b", None),
    ],
)
def test_models_are_found_in_names_of_runs_and_files(text: str, name: str | None) -> None:
    model = find_mentioned(text)
    assert (model.name if model else None) == name


def test_models_are_found_by_their_names_and_in_directories() -> None:
    assert find_model("qwen/qwen3-8b") == find_model("/models/Qwen3-8B/") == public_models()["Qwen/Qwen3-8B"]
    assert find_model("Qwen/Qwen3-9B") is None
