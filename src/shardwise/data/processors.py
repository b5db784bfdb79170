"""Opens what makes tensors of files: image processors, feature extractors and processors of transformers.

They come from `data.processor`, or from the model's directory; nothing is fetched. Image processors are those on
Pillow, also where torchvision is installed, so that all hosts read the same numbers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job

IMAGES, SOUND, CHAT = "AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor"  # transformers' classes
FILE = "preprocessor_config.json"


def open_processor(job: Job, auto_class: str) -> Any:
    """Return what `auto_class` of transformers makes of the job's `data.processor`, or of its `model.path`.

    Raises:
        ConfigError: there is neither.
        DataError: transformers refuses the files.
    """
    given = job.data.processor
    if isinstance(given, dict):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / FILE).write_text(json.dumps(given))
            return _open(auto_class, directory, f"data.processor={given!r}", False)
    if given is not None:
        return _open(auto_class, given, f"data.processor={given!r}", False)
    if job.model.path is not None:
        return _open(auto_class, job.model.path, f"model.path={job.model.path!r}", job.model.trust_remote_code)
    raise ConfigError(
        f"model.task={job.model.task!r} reads files by a processor, and there is none: set data.processor to the "
        f"directory with its {FILE}, or model.path to a model's directory that holds it"
    )


def _open(auto_class: str, directory: str, where: str, trust_remote_code: bool) -> Any:
    import transformers

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    pillow = {**options, "backend": "pil"}
    try:
        if auto_class == IMAGES:
            return transformers.AutoImageProcessor.from_pretrained(directory, **pillow)
        processor = getattr(transformers, auto_class).from_pretrained(directory, **options)
        if auto_class == CHAT:  # the whole cannot be asked for Pillow: one of videos there has torchvision alone
            processor.image_processor = transformers.AutoImageProcessor.from_pretrained(directory, **pillow)
    except Exception as error:  # each class has its own way to refuse files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{where}: transformers' {auto_class} cannot open it: {reason}; give a directory that `save_pretrained` of "
            "a processor has written"
        ) from error
    return processor
