"""The values from which a plainly built model starts, as far as no random number plays a part in them.

Of a Hugging Face directory they are those in its files, as transformers loads them. Of a user's module they are those
that two builds have in common, and those of a file of weights. Nothing here reads the engine's own loading.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.job.objects import load_object
from shardwise.job.schema import Job, ModelSection
from shardwise.job.tasks import TASKS
from shardwise.model.build import load_config
from shardwise.testing.oracle_quantization import quantize_base


def known_start(job: Job) -> dict[str, Tensor]:
    """Return the parameters and buffers of the job's model whose values at start are known, by name."""
    section = job.model
    if section.factory is not None:
        return _constant_values(section) | _values_in_file(section)
    return quantize_base(job, _loaded_values(job)) if section.path is not None else {}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _loaded_values(job: Job) -> dict[str, Tensor]:
    """Return what transformers loads from the job's directory, in fp64; not what it draws for want of values.

    Embeddings are those of the directory, without rows for added tokens.
    """
    section, job = job.model, job.model_copy(update={"data": job.data.model_copy(update={"added_tokens": []})})
    model, report = TASKS[section.task].model_class().from_pretrained(
        str(section.path), config=load_config(job), dtype=torch.float64, trust_remote_code=section.trust_remote_code,
        output_loading_info=True,
    )  # fmt: skip
    return {name: value for name, value in _tensors(model).items() if name not in report["missing_keys"]}


def _constant_values(section: ModelSection) -> dict[str, Tensor]:
    """Return what two builds of the factory have in common: random numbers differ, however they are seeded."""
    first = _built_in(torch.float32, section)
    try:
        second = _built_in(torch.float64, section)  # where a generator of the module's own draws others
    except Exception:  # its code joins what torch makes of this dtype with what is of its own
        return {}
    return {
        name: value
        for name, value in first.items()
        if name in second and value.shape == second[name].shape and equal_but_for_rounding(value, second[name])
    }


def _built_in(dtype: torch.dtype, section: ModelSection) -> dict[str, Tensor]:
    with _other_draws(dtype):
        return _tensors(load_object(str(section.factory))(**copy.deepcopy(section.factory_arguments)))


@contextmanager
def _other_draws(dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch makes tensors of `dtype`, and a seed that code sets has no effect."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mock.patch.object(torch, "manual_seed", lambda seed: torch.default_generator):
            yield
    finally:
        torch.set_default_dtype(before)


def _values_in_file(section: ModelSection) -> dict[str, Tensor]:
    if section.weights is None:
        return {}
    path = Path(section.weights)
    if path.suffix == ".safetensors":
        return load_file(path)
    values: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return values


def equal_but_for_rounding(some: Tensor, other: Tensor, coarsest: torch.dtype = torch.float32) -> bool:
    """Return whether two tensors hold equal values, but for the rounding of the coarser dtype.

    That is `coarsest` at least: a constructor computes in fp32 what an initializer then fills in fp64.
    """
    if not some.is_floating_point():
        return torch.equal(some, other.to(some.dtype))
    eps = max(torch.finfo(dtype).eps for dtype in (some.dtype, other.dtype, coarsest))
    return torch.allclose(some.double(), other.double(), rtol=4 * eps, atol=4 * eps, equal_nan=True)
