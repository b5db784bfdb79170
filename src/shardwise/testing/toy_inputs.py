"""Toys of tasks that read files: the config of a type at toy size, and what a row of its samples has.

How a model takes an image is found from the arguments of its forward, and by trying shapes; it gets as many image
tokens as it makes features of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.job.tasks import TASKS
from shardwise.testing.toy_configs import like, toy_of
from shardwise.testing.toy_rows import OF_ROWS, Row
from shardwise.testing.toy_samples import IMAGE_TOKEN, MARKS
from shardwise.testing.toy_towers import FRAMES, LARGER, OF_FAMILIES, PATCH, PIXELS, SECTIONS, SIDE, SIZES

GRID_NAMES = ("image_grid_thw", "image_grid_hw", "image_grids")  # arguments for patches of images joined
GRIDS = ((SIDE, SIDE), (SIDE // 2, 2 * SIDE), (SIDE // 2, SIDE))  # patches of images of several sizes
LEAST = 0.001  # deviation of weights; with the 1e-10 of some towers gradients would be no numbers to compare
OTHER_TOKEN = 9  # for what stands for sound and videos, which toys lack


def toy_of_files(task: str, model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a toy of a task that reads files, and the arguments of its `ToySamples`.

    Raises:
        Exception: transformers refuses the toy's sizes, or its model is called in a way of its own.
    """
    from transformers import CONFIG_MAPPING

    more = OF_FAMILIES.get(model_type, {})
    whole = CONFIG_MAPPING[model_type](**copy.deepcopy(more))  # some take values out of what they are given
    config, rows = _joined(_sized(whole, toy_of(whole)), more), OF_ROWS.get(model_type)
    if task == "image_classification":
        return config, {"task": task, "inputs": rows or [_image_row(_built(task, config))]}
    if "deepstack_visual_indexes" in config.get("vision_config", {}):  # which joins a block, and stages have others
        config["text_config"]["num_hidden_layers"] = 3
    model = _built(task, config)
    if task == "speech_seq2seq":
        return config, {"task": task, "inputs": rows or [_sound_row(model)]}
    return config, {"task": task, **_image_arguments(model, rows)}


def _joined(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with `more` of them, inside of inner ones too."""
    inner = {name: _joined(values[name], value) for name, value in more.items() if isinstance(values.get(name), dict)}
    return {**values, **more, **inner}


def _sized(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a toy with those of SIZES for which a config, or one inside of it, has names."""
    fields = config.to_dict()
    values = values | {name: like(fields[name], size) for name, size in SIZES.items() if fields.get(name) is not None}
    taken = [name for name, value in values.items() if name.endswith("token_id") and value == IMAGE_TOKEN]
    values |= {name: OTHER_TOKEN for name in taken if name != "image_token_id"}
    values |= {"initializer_range": LEAST} if fields.get("initializer_range", LEAST) < LEAST else {}
    rope = fields.get("rope_parameters") or {}
    if "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()) and "rope_type" in rope:
        values["rope_parameters"] = {**rope, **SECTIONS}
    for name in fields:
        inner = vars(config).get(name)
        if hasattr(inner, "to_dict"):
            values[name] = _sized(inner, {"model_type": inner.model_type, **(values.get(name) or {})})
    return values


def _built(task: str, config: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    values = {name: copy.deepcopy(value) for name, value in config.items() if name != "model_type"}
    return TASKS[task].model_class().from_config(CONFIG_MAPPING[config["model_type"]](**values), dtype=torch.float32)


def _image_row(model: Any) -> Row:
    """Return a row with an image that alone trains a model: batch norms refuse one value of a channel."""
    side = getattr(model.config, "image_size", PIXELS)
    side = side if isinstance(side, int) else PIXELS
    try:
        model.train()(pixel_values=torch.randn(1, 3, side, side))
    except ValueError:
        side = max(side, LARGER)
    return {"shapes": {"pixel_values": [3, side, side]}}


def _sound_row(model: Any) -> Row:
    """Return a row with sound: its values, or bins of frames."""
    name, bins = model.main_input_name, model.config.to_dict().get("num_mel_bins", 8)
    bins_first = model.config.model_type == "whisper"
    shape = [20 * FRAMES] if name == "input_values" else [bins, FRAMES] if bins_first else [FRAMES, 8]
    return {"shapes": {name: shape}}


# --- how a model takes an image --------------------------------------------------------------------------------------


def _image_arguments(model: Any, rows: list[Row] | None) -> dict[str, Any]:
    """Return the arguments of samples as the model takes them; `rows` are those of a way of its own."""
    parameters = inspect.signature(model.forward).parameters
    features, joined = _features_function(model, parameters), any(name in parameters for name in GRID_NAMES)
    ways = [rows] if rows else list(_by_grids(model, parameters) if joined else _by_sizes(model, features, parameters))
    is_known = features is None or "tokens" in ways[0][0]
    inputs = ways[0] if is_known else _counted(features, ways, joined)
    return {"inputs": inputs, "reads": _token_arguments(model, parameters), "joined": joined}


def _token_arguments(model: Any, parameters: Collection[str]) -> list[str]:
    """Return the arguments of tokens that a model takes: encoders of images alone have a mask of their own."""
    of_decoder = ["decoder_input_ids"] if getattr(model.config, "is_encoder_decoder", False) else []
    of_text = ["input_ids", "attention_mask", *MARKS] if "input_ids" in parameters else []
    return [name for name in (*of_text, *of_decoder) if name in parameters]


def _features_function(model: nn.Module, names: Collection[str]) -> Any:
    """Return the function by which a model makes features of images; None where it has none.

    Of several, of which outer ones call inner ones, it is the first that takes the most arguments of these `names`.
    """
    functions = [module.get_image_features for module in model.modules() if hasattr(module, "get_image_features")]
    return max(functions, key=lambda function: len(_arguments(function) & set(names)), default=None)


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _by_grids(model: Any, parameters: Any) -> Iterator[list[Row]]:
    """Yield the ways to give patches of images of several grids."""
    vision = model.config.vision_config
    times = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    merged = [2 * PATCH, 2 * PATCH, 3]
    for patch in ([3 * times * PATCH**2], [3 * PATCH**2], [3, PATCH, PATCH], merged):
        yield [
            {"shapes": {"pixel_values": [height * width, *patch]}, "numbers": _grid(height, width, parameters)}
            for height, width in GRIDS
        ]


def _grid(height: int, width: int, parameters: Collection[str]) -> dict[str, Any]:
    known = {"image_grid_thw": [[1, height, width]], "image_grid_hw": [[height, width]], "image_merge_sizes": [2]}
    return {name: numbers for name, numbers in known.items() if name in parameters}


def _by_sizes(model: Any, features: Any, parameters: Any) -> Iterator[list[Row]]:
    """Yield the ways to give an image, with what the model is told about its size: of several sizes where it can be."""
    side = getattr(getattr(model.config, "vision_config", None), "image_size", None)
    side, patches = side if isinstance(side, int) else PIXELS, [SIDE**2, 3 * PATCH**2]
    images = [[*parts, 3, side, side] for parts in ([], [1], [2])]
    in_patches, told = _told_sizes(features, parameters)
    for shape, kinds in product([patches] if in_patches else [*images, patches], told):
        given = {"pixel_values": shape} if "pixel_values" in parameters else {}
        yield [{"shapes": given, "numbers": numbers} for numbers in kinds]


def _told_sizes(features: Any, parameters: Collection[str]) -> tuple[bool, list[list[dict[str, Any]]]]:
    """Return whether images come in patches alone, and the numbers about sizes of rows in turn, in several ways."""
    if _is_required(features, "image_sizes"):
        whole = {"image_sizes": [PIXELS, PIXELS]}
        return False, [[whole, {"image_sizes": [PIXELS // 2, PIXELS]}], [whole]]
    if "image_position_ids" in parameters:
        places = [[[column, row] for row in range(height) for column in range(width)] for height, width in GRIDS[:2]]
        return True, [[{"image_position_ids": of_grid} for of_grid in places]]
    if _is_required(features, "spatial_shapes"):
        mask = {"pixel_attention_mask": [1] * SIDE**2}
        return True, [[{"spatial_shapes": [*grid], **mask} for grid in GRIDS[:2]]]
    return False, [[{}]]


def _is_required(function: Any, name: str) -> bool:
    parameter = function and inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def _counted(features: Any, ways: list[list[Row]], joined: bool) -> list[Row]:
    """Return the first rows of which a model makes features, with their numbers of image tokens.

    Raises:
        Exception: it makes features of none of them.
    """
    failures = list[Exception]()
    for rows in ways:
        try:
            return [{**row, "tokens": _count_features(features, row, joined)} for row in rows]
        except Exception as error:  # any code may run in a model's forward
            failures.append(error)
    raise failures[0]


def _count_features(features: Any, row: Row, joined: bool) -> int:
    tensors = {name: torch.randn(shape) for name, shape in row["shapes"].items()}
    tensors |= {name: torch.tensor(numbers) for name, numbers in row.get("numbers", {}).items()}
    given = {name: value if joined else value[None] for name, value in tensors.items() if name in _arguments(features)}
    with torch.no_grad():
        made = features(**given)
    if not isinstance(made, Tensor | list | tuple):
        made = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    parts = [made] if isinstance(made, Tensor) else list(made)
    return sum(part[..., 0].numel() for part in parts)
