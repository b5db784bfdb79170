"""Samples of tensors for toys of models that see images or hear sound, and the sizes that make such toys small.

Values are random. A row of a model of text and images has one image, and as many image tokens as the toy makes features
of it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.testing.toy_configs import VOCABULARY, toy_config

IMAGE_TOKEN, FIRST_TOKEN, CLASSES = 3, 10, 3
PIXELS, PATCH, FRAMES, LENGTH = 16, 4, 32, 32  # of an image's side and of a patch's; of sound; of a row with tokens
LARGER = 64  # pixels of a side, for convolutions that leave one of 32
# Sizes of what sees and hears, by the names that configs give them.
SIZES: dict[str, Any] = {
    "image_size": PIXELS, "patch_size": PATCH, "depth": 2, "embed_dim": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": (PIXELS // PATCH) ** 2,
    "mm_tokens_per_image": 4, "window_size": 8, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [1],
    "num_mel_bins": 8, "input_feat_per_channel": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 64,
    "image_grid_pinpoints": [[PIXELS, PIXELS]], "projection_dim": 32,
    "resampler_n_heads": 4, "resampler_head_dim": 8, "resampler_depth": 2,
    "image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "drop_path_rate": 0.0,
}  # fmt: skip
# What else a family needs to be small, or to see at all.
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "swin": {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "swinv2": {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "convnext": {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "convnextv2": {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "groups_width": 8},
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
        }
    },
    "aria": {"projector_patch_to_query_dict": {(PIXELS // PATCH) ** 2: 4}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "glm4v_moe": {"text_config": {"partial_rotary_factor": 1.0}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        }
    },
    "mllama": {
        "vision_config": {
            "attention_heads": 4, "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1,
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip


class ToySamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tensors with labels.

    Args:
        task: as in `model.task`.
        shapes: of a row's tensors of floats, by name.
        sizes: numbers about a row's image that the model takes, by name.
        tokens: image tokens of a row.
        marks: the argument that marks them, where the model takes one.
        rows: how many.
    """

    def __init__(
        self,
        task: str,
        shapes: dict[str, list[int]],
        sizes: dict[str, list[Any]] | None = None,
        tokens: int = 0,
        marks: str = "",
        rows: int = 40,
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        self.columns = {name: torch.randn(rows, *shape, generator=draw) for name, shape in shapes.items()}
        told = {name: torch.tensor(numbers) for name, numbers in (sizes or {}).items()}
        self.columns |= {name: numbers.expand(rows, *numbers.shape) for name, numbers in told.items()}
        kind = TASKS[task].labels
        high, low = (CLASSES, 0) if kind == "classes" else (VOCABULARY, FIRST_TOKEN)
        labels = torch.randint(low, high, (rows,) if kind == "classes" else (rows, LENGTH), generator=draw)
        if kind == "next":
            ids = torch.stack([_with_image(row, 1 + number % 3, tokens) for number, row in enumerate(labels)])
            labels = torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], dim=1)
            labels = labels.masked_fill(labels == IMAGE_TOKEN, -100)
            self.columns |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self.columns |= {marks: (ids == IMAGE_TOKEN).long()} if marks else {}
        self.columns["labels"] = labels

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


def _with_image(row: Tensor, place: int, tokens: int) -> Tensor:
    """Return `row` with so many image tokens at `place`, and the token in front of them once more behind."""
    return torch.cat([row[:place], torch.full((tokens,), IMAGE_TOKEN), row[place - 1 :]])


def toy_of_files(task: str, model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a toy of a task that reads files, and the arguments of its `ToySamples`.

    Raises:
        Exception: transformers refuses the toy's sizes, or its model is called in a way of its own.
    """
    from transformers import CONFIG_MAPPING

    more = OF_FAMILIES.get(model_type, {})
    config = _joined(_sized(CONFIG_MAPPING[model_type](**more), toy_config(model_type)), more)
    if task == "image_classification":
        side = _side(_built(task, config))
        return config, {"task": task, "shapes": {"pixel_values": [3, side, side]}}
    if "deepstack_visual_indexes" in config.get("vision_config", {}):  # which joins a block, and stages have others
        config["text_config"]["num_hidden_layers"] = 3
    model = _built(task, config)
    if task == "speech_seq2seq":
        name, bins = model.main_input_name, model.config.to_dict().get("num_mel_bins", 8)
        shape = [20 * FRAMES] if name == "input_values" else [bins, FRAMES] if model_type == "whisper" else [FRAMES, 8]
        return config, {"task": task, "shapes": {name: shape}}
    return config, {"task": task, **_image_arguments(model)}


def _joined(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with `more` of them, inside of inner ones too."""
    inner = {name: _joined(values[name], value) for name, value in more.items() if isinstance(values.get(name), dict)}
    return {**values, **more, **inner}


def inputs_of_files(job: Job) -> dict[str, Tensor]:
    """Return the arguments of a forward of two rows of a toy's samples."""
    samples = ToySamples(**job.data.factory_arguments)
    inputs = {name: values[:2] for name, values in samples.columns.items()}
    labels = inputs.pop("labels")
    return {**inputs, "decoder_input_ids": labels} if TASKS[job.model.task].labels == "decoder" else inputs


def _side(model: Any) -> int:
    """Return the side of an image of which a row alone trains: batch norms refuse one value of a channel."""
    try:
        model.train()(pixel_values=torch.randn(1, 3, PIXELS, PIXELS))
    except ValueError:
        return LARGER
    return PIXELS


def _image_arguments(model: Any) -> dict[str, Any]:
    """Return a row's image as the model takes it, and how many tokens it needs: as many as it makes features."""
    parameters, sizes = inspect.signature(model.forward).parameters, dict[str, Any]()
    if "cross_attention_mask" in parameters:  # of each token to an image's tiles, in the place of image tokens
        sizes = {"aspect_ratio_ids": [1], "aspect_ratio_mask": [[1]], "cross_attention_mask": [[[1]]] * (LENGTH + 1)}
        return {"shapes": {"pixel_values": [1, 1, 3, PIXELS, PIXELS]}, "sizes": sizes}
    features = _features_function(model)
    side, shapes = PIXELS // PATCH, [[*parts, 3, PIXELS, PIXELS] for parts in ([], [1], [2])]
    if "image_grid_thw" in parameters:
        of_patch = 3 * getattr(model.config.vision_config, "temporal_patch_size", 1) * PATCH**2
        shapes, sizes = [[side**2, of_patch], [side**2, 3, PATCH, PATCH]], {"image_grid_thw": [1, side, side]}
    elif _is_required(features, "image_sizes"):
        sizes = {"image_sizes": [PIXELS, PIXELS]}
    elif "image_position_ids" in parameters:
        places = [[column, row] for row in range(side) for column in range(side)]
        shapes, sizes = [[side**2, 3 * PATCH**2]], {"image_position_ids": places}
    elif _is_required(features, "spatial_shapes"):
        shapes, sizes = (
            [[side**2, 3 * PATCH**2]],
            {"spatial_shapes": [side, side], "pixel_attention_mask": [1] * side**2},
        )
    shape, tokens = _features(model, shapes, sizes)
    marks = next((name for name in ("token_type_ids", "mm_token_type_ids") if name in parameters), "")
    return {"shapes": {"pixel_values": shape}, "sizes": sizes, "tokens": tokens, "marks": marks}


def _features_function(model: Any) -> Any:
    """Return the function by which a model, or the one inside of it without a head, makes features of images."""
    return model.get_image_features if hasattr(model, "get_image_features") else model.model.get_image_features


def _is_required(function: Any, name: str) -> bool:
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def _features(model: Any, shapes: list[list[int]], sizes: dict[str, list[Any]]) -> tuple[list[int], int]:
    """Return the first shape of a row's pixels that the model takes, and the features that it makes of them.

    Raises:
        Exception: it takes none of the shapes.
    """
    rows, failures = {name: torch.tensor([numbers]) for name, numbers in sizes.items()}, list[Exception]()
    for shape in shapes:
        try:
            return shape, _count_features(model, shape, rows)
        except Exception as error:  # any code may run in a model's forward
            failures.append(error)
    raise failures[0]


def _count_features(model: Any, shape: list[int], rows: dict[str, Tensor]) -> int:
    pixels = torch.randn(shape if "image_grid_thw" in rows else [1, *shape])
    with torch.no_grad():
        features = _features_function(model)(pixel_values=pixels, **rows)
    if not isinstance(features, Tensor | list | tuple):
        features = features.last_hidden_state if features.pooler_output is None else features.pooler_output
    parts = [features] if isinstance(features, Tensor) else list(features)
    return sum(part[..., 0].numel() for part in parts)


def _built(task: str, config: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    values = {name: value for name, value in config.items() if name != "model_type"}
    return TASKS[task].model_class().from_config(CONFIG_MAPPING[config["model_type"]](**values), dtype=torch.float32)


def _sized(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a toy with those of SIZES for which a config, or one inside of it, has names."""
    fields = config.to_dict()
    values = {**values, **{name: size for name, size in SIZES.items() if fields.get(name) is not None}}
    if "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        values["rope_parameters"] = {**fields["rope_parameters"], "mrope_section": [1, 1, 2]}  # of heads of 8
    for name in fields:
        inner = vars(config).get(name)
        if hasattr(inner, "to_dict"):
            values[name] = _sized(inner, {"model_type": inner.model_type, **(values.get(name) or {})})
    return values
