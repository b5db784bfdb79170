"""Toy models, and the comparison of what is read with what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.model.discover import find_ties
from tests.model import toys
from tests.parity.jobs import Regression


class Phases(Regression):
    """Regression, with persistent buffers of complex numbers and of bare 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("places", torch.arange(65_530, 65_533).to(torch.uint16))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output + torch.view_as_real(self.phases * self.places.to(torch.int64)).sum().to(output.dtype) * 1e-6


def make_model(model_type: str, **config: Any) -> PreTrainedModel:
    kind = AutoModelForMaskedLM if model_type in toys.MASKED else AutoModelForCausalLM
    torch.manual_seed(1)
    values = {**toys.CONFIGS[model_type], "bos_token_id": None, "eos_token_id": None, **config}
    return kind.from_config(CONFIG_MAPPING[model_type](**values)).eval()


def resolve(weights: HuggingFaceWeights, model: PreTrainedModel) -> dict[str, str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return weights.resolve(names, base_model_prefix=model.base_model_prefix, ties=find_ties(model), model=model)


def assert_reads_all(path: Path, model: PreTrainedModel) -> None:
    weights = HuggingFaceWeights(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    resolved = resolve(weights, model)
    assert list(resolved) == list(parameters)
    weights.check_shapes(resolved, {name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        torch.testing.assert_close(weights.read(resolved[name]), parameter.detach(), rtol=0, atol=0)
