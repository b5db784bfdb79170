"""What a tower would return, told on a stage that does not hold it, against what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from shardwise.errors import ModelError
from shardwise.model.stage_cut import towers_of
from shardwise.model.tower_placeholders import TowerPlaceholder, leave_out_towers
from shardwise.testing.toy_inputs import toy_of_files

CPU = torch.device("cpu")


def qwen_tower(device: str) -> Any:
    config = AutoConfig.for_model(**toy_of_files("image_text_to_text", "qwen2_vl")[0])
    with torch.device(device):
        return Qwen2VisionTransformerPretrainedModel(config.vision_config)


def test_the_form_follows_the_sizes_of_images() -> None:
    tower, whole = qwen_tower("cpu"), qwen_tower("meta")
    blocks = [f"blocks.{number}" for number in range(len(tower.blocks))]
    placeholder = TowerPlaceholder("visual", whole, blocks, torch.float32, CPU)
    patch = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    merge = tower.spatial_merge_size
    for sizes in ([(1, 2, 2)], [(1, 2, 3), (1, 1, 2)], [(1, 4, 1)]):
        grid = torch.tensor(sizes) * torch.tensor([1, merge, merge])
        pixels = torch.randn(int(grid.prod(1).sum()), patch)
        expected, given = tower(pixels, grid_thw=grid), placeholder(pixels, grid_thw=grid)
        assert type(given) is type(expected)
        tensors = {name: value for name, value in expected.items() if isinstance(value, Tensor)}
        assert tensors and not any(given[name].any() for name in tensors)
        assert {name: (given[name].shape, given[name].dtype) for name in tensors} == {
            name: (value.shape, value.dtype) for name, value in tensors.items()
        }
    assert list(whole.parameters())


def test_towers_stand_beside_blocks_that_run_last() -> None:
    config = AutoConfig.for_model(**toy_of_files("image_text_to_text", "llava")[0])
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tower, main = ([f"model.{part}.layers.{n}" for n in (0, 1)] for part in ("vision_tower.encoder", "language_model"))
    assert towers_of(model, [tower, main], [*tower, *main]) == ("model.vision_tower", "model.multi_modal_projector")
    assert (
        towers_of(model, [tower, main], [*main, *tower]) == towers_of(model, [tower, main[:1]], [*tower, main[0]]) == ()
    )
    assert towers_of(model, [main], main) == towers_of(model, [], []) == ()


class Fickle(nn.Module):
    """A tower whose output has as many rows as its input has positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        if int(times.sum()) < 0:
            raise ValueError("no time")
        return self.layer(values).repeat(int(times.sum()), 1)


def test_integers_are_told_apart_by_their_values_and_a_failure_is_named() -> None:
    placeholder = TowerPlaceholder("tower", Fickle(), (), torch.float32, CPU)
    for times in (2, 3, 2):
        assert placeholder(torch.ones(5, 4), torch.tensor([times])).shape == (5 * times, 4)
    with pytest.raises(ModelError, match=r"what tower would return .* ValueError: no time; use pipeline_parallel_deg"):
        placeholder(torch.ones(5, 4), torch.tensor([-1]))


def test_a_tower_that_is_left_out_keeps_its_dtype_and_what_is_no_tensor() -> None:
    model = nn.ModuleDict({"visual": (tower := qwen_tower("meta"))})
    names, merge = {name for name, _ in tower.named_modules(prefix="visual")}, tower.spatial_merge_size
    assert leave_out_towers(model, ["visual"], lambda name: lambda value: value + 1, torch.bfloat16, CPU) == names
    assert tower.dtype == torch.bfloat16 and tower.spatial_merge_size == merge
    assert not list(tower.named_parameters()) and tower(1) == 2
