"""Conversations with images for tests, and toys of processors, of Llava's and of Gemma 3's kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SIZE, PATCH = 16, 4
WORDS = ("user", "assistant", "what", "is", "this", "a", "cat", "dog", "owl", "and")
SPECIAL = ("<pad>", "<end>", "<image>", "<vision>", "</vision>")
IMAGE = SPECIAL.index("<image>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACE {% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
    "{{ '<end> ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def _tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(SPECIAL[2:]), padding_side="right", **names
    )


def _llava() -> Any:
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=size)
    template = TEMPLATE.replace("PLACE", "<image>")
    return LlavaProcessor(
        images, _tokenizer(image_token="<image>"), patch_size=PATCH, vision_feature_select_strategy="default",
        chat_template=template, num_additional_image_tokens=1,
    )  # fmt: skip


def _gemma3() -> Any:
    names = {"image_token": "<image>", "boi_token": "<vision>", "eoi_token": "</vision>"}
    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    template = TEMPLATE.replace("PLACE", "<vision>")
    return Gemma3Processor(images, _tokenizer(**names), chat_template=template, image_seq_length=4)


def _qwen2_vl() -> Any:
    """Its processor holds one of videos too, for which transformers needs torchvision."""
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    pixels = {"shortest_edge": 64, "longest_edge": SIZE * SIZE * 4}
    images = Qwen2VLImageProcessorPil(size=pixels, **sizes)
    videos = Qwen2VLVideoProcessor(size=pixels, **sizes)
    tokens = {"image_token": "<image>", "vision_bos_token": "<vision>", "vision_eos_token": "</vision>"}
    template = TEMPLATE.replace("PLACE", "<vision> <image> </vision>")
    return Qwen2VLProcessor(images, _tokenizer(**tokens), videos, chat_template=template)


PROCESSORS: dict[str, Callable[[], Any]] = {"llava": _llava, "gemma3": _gemma3, "qwen2_vl": _qwen2_vl}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_token_id": IMAGE, "text_config": {"model_type": "llama"}, "vision_feature_layer": -1,
        "vision_config": {"model_type": "clip_vision_model", "image_size": SIZE, "patch_size": PATCH},
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "image_token_id": IMAGE, "vision_start_token_id": 3, "vision_end_token_id": 4, "video_token_id": 20,
        "vision_config": {
            "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2, "embed_dim": 16,
            "num_heads": 2, "hidden_size": 32,
        },
    },
    "gemma3": {
        "image_token_id": IMAGE, "boi_token_id": 3, "eoi_token_id": 4, "mm_tokens_per_image": 4,
        "vision_config": {"image_size": SIZE, "patch_size": PATCH},
    },
}  # fmt: skip


def write_chats(directory: Path, rows: int = 20) -> Path:
    """Write rows of one or two images and their names, and the images, of several sizes; return the file of rows."""
    from PIL import Image

    draw, lines = np.random.default_rng(7), []
    for number in range(rows):
        files = [f"{number}-{place}.png" for place in range(draw.integers(1, 3))]
        for file in files:
            shape = (SIZE + int(draw.integers(0, 8)), SIZE + int(draw.integers(0, 8)), 3)
            Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(directory / file)
        asked = [*({"type": "image", "image": file} for file in files), {"type": "text", "text": "what is this"}]
        answer = [{"type": "text", "text": " and ".join(f"a {draw.choice(('cat', 'dog', 'owl'))}" for _ in files)}]
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return directory / "rows.jsonl"
