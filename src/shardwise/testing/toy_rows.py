"""Rows of toys' samples whose models take images or sound in a way of their own.

A row is as in `ToySamples`: it has image tokens only where `toy_inputs.py` cannot count features.
"""

from __future__ import annotations

from typing import Any

from shardwise.testing.toy_samples import LENGTH
from shardwise.testing.toy_towers import FLAT, FRAMES, PATCH, PIXELS, SIDE

Row = dict[str, Any]
IMAGE = [3, PIXELS, PIXELS]  # the shape of one
GRIDS = ([SIDE, SIDE], [SIDE // 2, 2 * SIDE])  # patches of images of several sizes
INSTRUCTIONS = ([10, 20, 30], [10, 20, 40])  # tokens that Q-formers read beside images
# Patches that become an image token each; -1 stands for none.
POOLED = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15], [16, 17, 20, 21]]


def _flat_patches(height: int, width: int) -> Row:
    """Return a row of patches that each begin with their row and column, as Pix2Struct's."""
    places = [(row, column) for row in range(1, height + 1) for column in range(1, width + 1)]
    values = [[(row * 7 + column * 5 + value * 3) % 11 / 11 for value in range(FLAT)] for row, column in places]
    patches = [[*place, *some] for place, some in zip(places, values, strict=True)]
    return {"shapes": {}, "numbers": {"flattened_patches": patches}}


def _row(shape: list[int], tokens: int | None = None, **numbers: Any) -> Row:
    counted = {} if tokens is None else {"tokens": tokens}
    return {"shapes": {"pixel_values": shape}, "numbers": numbers, **counted}


FLAT_PATCHES = [_flat_patches(SIDE, SIDE), _flat_patches(SIDE // 2, 2 * SIDE)]
OF_ROWS: dict[str, list[Row]] = {
    "deepseek_vl_hybrid": [{"shapes": {"pixel_values": IMAGE, "high_res_pixel_values": IMAGE}}],
    "git": [{**_row(IMAGE), "ahead": SIDE**2 + 1}],
    "granite4_vision": [_row([2, *IMAGE], 10, image_sizes=[PIXELS, PIXELS])],
    "granite_docling": [_row([2, *IMAGE], pixel_attention_mask=[True, second]) for second in (True, False)],
    "idefics": [
        _row([2, *IMAGE], image_attention_mask=[[1, 0]] * first + [[1, 1]] * (LENGTH + 1 - first)) for first in (3, 5)
    ],
    "instructblip": [_row(IMAGE, qformer_input_ids=tokens) for tokens in INSTRUCTIONS],
    "instructblipvideo": [_row([2, *IMAGE], 8, qformer_input_ids=tokens) for tokens in INSTRUCTIONS],
    "kosmos-2": [_row(IMAGE, 4)],
    "kosmos-2.5": [{**row, "tokens": 4} for row in FLAT_PATCHES],
    "mllama": [  # whose mask, of each token to an image's tiles, is in the place of image tokens
        _row(
            [1, 1, *IMAGE],
            aspect_ratio_ids=[1],
            aspect_ratio_mask=[[1]],
            cross_attention_mask=[[[1]]] * (LENGTH + 1),
        )
    ],
    "molmo2": [
        _row(
            [2, SIDE**2, 3 * PATCH**2],
            image_grids=[[2, 2, 1, 2]],
            image_token_pooling=[*POOLED, [18, 19, 22, last]],
        )
        for last in (23, -1)
    ],
    "pix2struct": FLAT_PATCHES,
    "siglip2": [
        _row([SIDE**2, 3 * PATCH**2], spatial_shapes=grid, pixel_attention_mask=[1] * SIDE**2) for grid in GRIDS
    ],
    "udop": [
        _row(IMAGE, bbox=[[left, 0.1 + 0.02 * place, 0.9, 0.2 + 0.02 * place] for place in range(LENGTH + 1)])
        for left in (0.1, 0.3)
    ],
    "moonshine": [{"shapes": {"input_values": [128 * FRAMES]}}],  # that many make a frame or two
    "pop2piano": [{"shapes": {"input_features": [FRAMES, 32]}}],
    "speech-encoder-decoder": [{"shapes": {"input_values": [20 * FRAMES]}}],
}
