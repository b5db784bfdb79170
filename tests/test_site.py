"""The site of the documents is built as a reader would build it, and a warning fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert build.returncode == 0, build.stderr[-4000:]
    assert (tmp_path / "site" / "index.html").is_file()
    assert (tmp_path / "site" / "glossary" / "index.html").is_file()
    assert (tmp_path / "site" / "examples" / "own_module.py").is_file()
