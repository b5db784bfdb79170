"""Hooks of mkdocs: the site holds the files under examples/ too, because pages link to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parent.parent / "examples"


def on_files(files: Files, *, config: Any) -> Files:
    """Add every example to the site, at examples/NAME."""
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Return the page with links to examples led to their place in the site, which lies one folder nearer."""
    return re.sub(r"\]\(\.\./((?:\.\./)*examples/)", r"](\1", markdown)
