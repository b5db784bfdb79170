"""Python that pages of the documentation show, made a module so that tests can run it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(page: str) -> list[str]:
    """Return the blocks of Python on a page under docs/."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)


def block_with(page: str, text: str) -> str:
    """Return the one block of a page that holds `text`."""
    [block] = [block for block in python_blocks(page) if text in block]
    return block


def load_block(page: str, definition: str, name: str = "") -> ModuleType:
    """Import the one block of a page that defines `definition`, as a module whose file is named after the page.

    The module is `name` in `sys.modules`, or where that is not given has a name made of the page and the definition.
    """
    [block] = [text for text in python_blocks(page) if re.search(rf"^(def |class )?{definition}\b", text, re.M)]
    name = name or f"page_{Path(page).stem.replace('-', '_')}_{definition}"
    module = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    module.__file__ = f"{page}: {definition}"
    sys.modules[name] = module
    exec(compile(block, module.__file__, "exec"), vars(module))
    return module
