"""Write small files for images.yaml, speech.yaml and image_chat.yaml: `python examples/files.py runs/files`."""

import json
import math
import random
import struct
import sys
import wave
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

ROWS, RATE = 48, 800
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }} "
    "{% endfor %}<end> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    known = {word: number for number, word in enumerate(("<pad>", "<start>", "<end>", "<image>", *words))}
    made = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": {"image_token": "<image>"}}
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<start>", **names)


def shape(kind: str, draw: random.Random) -> Image.Image:
    image, left, top = Image.new("RGB", (32, 32)), draw.randrange(16), draw.randrange(16)
    ImageDraw.Draw(image).rectangle((left, top, left + 12, top + (12 if kind == "square" else 3)), fill="white")
    return image


def main(root: Path, draw: random.Random) -> None:
    [(root / part).mkdir(parents=True, exist_ok=True) for part in ("images/square", "images/bar", "speech")]
    chats, speech = [], []
    for number in range(ROWS):
        kind, pitch = draw.choice(("square", "bar")), draw.choice((40, 160))
        shape(kind, draw).save(root / f"images/{kind}/{number}.png")
        asked = [{"type": "image", "image": f"images/{kind}/{number}.png"}, {"type": "text", "text": "what is this"}]
        chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"a {kind}"}]})
        with wave.open(str(root / f"speech/{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            tone = [int(20000 * math.sin(2 * math.pi * pitch * t / RATE)) for t in range(RATE // 2)]
            file.writeframes(struct.pack(f"<{len(tone)}h", *tone))
        speech.append({"audio": f"{number}.wav", "text": "low" if pitch == 40 else "high"})
    for name, rows in {"chats.jsonl": chats, "speech/rows.jsonl": speech}.items():
        (root / name).write_text("\n".join(map(json.dumps, rows)))
    for made in (tokenizer("low", "high"), WhisperFeatureExtractor(8, RATE, 25, 1, 50)):
        made.save_pretrained(root / "speech")
    pixels = CLIPImageProcessorPil(size=32, crop_size=32)
    words = tokenizer("user", "assistant", "what", "is", "this", "a", "square", "bar")
    LlavaProcessor(pixels, words, 8, "default", TEMPLATE, num_additional_image_tokens=1).save_pretrained(root / "chats")


if __name__ == "__main__":
    main(Path(sys.argv[1]), random.Random(0))
