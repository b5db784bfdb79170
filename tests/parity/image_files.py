"""Files of images for tests: folders of classes, and the config of a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIZE, CLASSES = 16, ("cat", "dog", "owl")
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": SIZE, "width": SIZE},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.25],
}


def write_folders(root: Path, each: int = 8) -> Path:
    """Write random images of several sizes into a folder for each class; return the directory."""
    from PIL import Image

    draw = np.random.default_rng(3)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for number in range(each):
            shape = (SIZE + number, SIZE + 2, 3)
            Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(root / name / f"{number}.png")
    return root
