"""The reason of a failure, where SageMaker looks for it: `/opt/ml/output/failure` of a training container."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

BASE_VARIABLE = "SAGEMAKER_BASE_DIR"
BASE = "/opt/ml"
RESOURCES = Path("input", "config", "resourceconfig.json")  # the service writes it into every container
LONGEST = 20_000  # characters; the service shows the first 1,024


def base_directory(variables: Mapping[str, str] | None = None) -> Path | None:
    """Return `/opt/ml` of a training container, or where SAGEMAKER_BASE_DIR has it; None outside of one."""
    base = Path((os.environ if variables is None else variables).get(BASE_VARIABLE) or BASE)
    return base if (base / RESOURCES).is_file() else None


def leave_failure(text: str) -> None:
    """Tell SageMaker why this process fails; the first on this host is heard. Nothing happens outside of it."""
    base = base_directory()
    if base is None:
        return
    path = base / "output" / "failure"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.stat().st_size:
            path.write_text(text[:LONGEST], encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        print(f"note: {path} cannot be written: {error.strerror}", file=sys.stderr)
