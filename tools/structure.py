"""The structure of the code in numbers: `python tools/structure.py [checkout ...]`.

The table stands in docs/explanations/structure.md.

Reads source as text and syntax trees; imports nothing of the package. A cycle is counted between files, imports inside
functions and under `TYPE_CHECKING` included.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "shardwise"
WEAK_OPENINGS = ("Of", "What", "Whether", "By", "In", "To", "Where", "How", "Which")
VAGUE_LOCALS = ("each", "found", "held", "here", "mine", "seen")
GENERATED = ("reference",)  # pages under docs/ that the code writes


def module_name(path: Path, source: Path) -> str:
    """Return the dotted name of the module in `path` below `source`."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def read_tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once: many checks read all of them."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a syntax tree, which is walked once."""
    return tuple(ast.walk(tree))


def read_trees(source: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package, by dotted name."""
    files = sorted((source / PACKAGE).rglob("*.py"))
    return {module_name(file, source): read_tree(file) for file in files}


def imported_modules(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the package that `tree` imports anywhere, deferred and type-only imports included."""
    targets: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                targets.add(below if below in modules else node.module)
    return targets & modules


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return module -> modules that it imports."""
    modules = set(trees)
    return {name: imported_modules(tree, modules) - {name} for name, tree in trees.items()}


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                components.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(components, key=len, reverse=True)


def room(module: str) -> str:
    """Return the room of a module: the first folder below the package, or the module itself at the root."""
    return module.split(".")[1] if "." in module else module


def room_arrows(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports from the second."""
    pairs = {(room(module), room(target)) for module, targets in graph.items() for target in targets}
    return {(start, end) for start, end in pairs if start != end}


def functions(trees: dict[str, ast.Module]) -> list[int]:
    """Return the length of every function in lines, ascending."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for tree in trees.values() for node in nodes_of(tree) if isinstance(node, kinds))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def public_definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the public classes and functions at the top level of a module."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    yield from (node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))


def double_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public names that are defined in more than one module, with those modules."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for name in public_definitions(tree):
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


def docstrings(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield (module:object, docstring) of everything that has one."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{module}:{getattr(node, 'name', '')}", text


def weak_openings(trees: dict[str, ast.Module]) -> list[str]:
    """Return the objects whose docstring begins with one of `WEAK_OPENINGS`."""
    return [where for where, text in docstrings(trees) if text.split()[0].strip("`.,:") in WEAK_OPENINGS]


def vague_locals(trees: dict[str, ast.Module]) -> list[str]:
    """Return module:line of every local or parameter that one of `VAGUE_LOCALS` names."""
    places = []
    for module, tree in trees.items():
        for node in nodes_of(tree):
            name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else None
            if name in VAGUE_LOCALS and not isinstance(getattr(node, "ctx", None), ast.Load):
                places.append(f"{module}:{node.lineno}")
    return places


def doc_words(docs: Path, with_code: bool = False) -> int:
    """Return the number of words under docs/, generated pages left out; of prose alone, or with code and outputs."""
    pages = (page for page in docs.rglob("*.md") if not set(GENERATED) & set(page.relative_to(docs).parts))
    texts = [page.read_text(encoding="utf-8") for page in pages]
    if not with_code:
        texts = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts]
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)


def private_torch_names(source: Path) -> int:
    """Return how many lines outside of `_torch_compat` name a private attribute of a module of torch.

    torch documents its `_foreach_` functions; strings that start like a name of torch's are names of files or modules.
    """
    attribute = r"""(?<!["'`])\b(?:torch|dist|fsdp)(?:\.\w+)*\._(?!foreach_)[a-z]\w*"""
    pattern = re.compile(attribute + r"|from torch[\w.]*\._|from torch[\w.]* import _")
    files = (file for file in (source / PACKAGE).rglob("*.py") if "_torch_compat" not in file.as_posix())
    return sum(bool(pattern.search(line)) for file in files for line in file.read_text("utf-8").splitlines())


def measure(checkout: Path) -> dict[str, object]:
    """Return every figure of the table, by its name."""
    source = checkout / "src"
    trees = read_trees(source)
    graph = import_graph(trees)
    lengths = functions(trees)
    openings = weak_openings(trees)
    files = [len(file.read_text("utf-8").splitlines()) for file in (source / PACKAGE).rglob("*.py")]
    roots = list((source / PACKAGE).glob("*.py"))
    return {
        "Python files": len(files),
        "lines of Python": sum(files),
        "modules at the package's root": len(roots),
        "files over 600 lines": sum(lines > 600 for lines in files),
        "arrows between rooms": len(room_arrows(graph)),
        "import cycles between files (sizes)": ", ".join(str(len(cycle)) for cycle in import_cycles(graph)) or "none",
        "functions": len(lengths),
        "function length: median, 90th percentile, longest": (
            f"{statistics.median(lengths):.0f}, {lengths[int(0.9 * len(lengths))]}, {lengths[-1]}"
        ),
        "public names defined more than once": len(double_names(trees)),
        "docstrings": sum(1 for _ in docstrings(trees)),
        f"docstrings that begin with {', '.join(WEAK_OPENINGS)}": len(openings),
        f"locals named {', '.join(VAGUE_LOCALS)}": len(vague_locals(trees)),
        "lines with private names of torch outside _torch_compat": private_torch_names(source),
        "words of prose under docs/": doc_words(checkout / "docs"),
    }


def main() -> None:
    """Print the table of one checkout, or of two beside each other; with `--list`, what the counts are made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parent.parent])
    parser.add_argument("--list", action="store_true", help="name the cycles, double names and docstrings")
    arguments = parser.parse_args()
    tables = [measure(checkout) for checkout in arguments.checkouts]
    for name in tables[0]:
        print(f"| {name} | " + " | ".join(str(table[name]) for table in tables) + " |")
    if arguments.list:
        trees = read_trees(arguments.checkouts[-1] / "src")
        for cycle in import_cycles(import_graph(trees)):
            print("cycle:", ", ".join(cycle))
        for name, modules in double_names(trees).items():
            print(f"double: {name}: {', '.join(modules)}")
        counts = Counter(where.split(":")[0] for where in weak_openings(trees))
        for module, count in counts.most_common():
            print(f"openings: {module} {count}")
        for place in vague_locals(trees):
            print(f"vague: {place}")


if __name__ == "__main__":
    main()
