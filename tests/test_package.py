"""Rules about the source itself that no linter of ours knows: what it may read, import and how long it may be."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from tools.structure import nodes_of, read_tree

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
HEAVY = ("torch", "transformers", "datasets", "plotly", "pydantic", "numpy")
LONGEST_FUNCTION, LONG_FILE = 60, 600
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# A test's pool, the tokenizer's processes: each and its own child processes, over pipes.
MAY_PICKLE = {"testing/world.py", "data/parallel_tokenize.py", "data/tokenize_worker.py"}
DOCUMENTED = ("_foreach_", "_record_memory_history", "_dump_snapshot")  # torch's documentation has them by these names


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def dotted(node: ast.expr) -> str:
    """`torch.nn.Module` of the expression that says so, else ''."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(the name it is bound to, the full name of what is imported, line)."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", node.lineno


def is_private(full_name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in full_name.split("."))


def private_torch(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Imports of private names of torch, and attributes of its modules that are private."""
    modules = {}
    for bound, full_name, line in imports(tree):
        if full_name.partition(".")[0] == "torch":
            modules[bound] = full_name if bound != "torch" else "torch"
            if is_private(full_name):
                yield full_name, line
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = dotted(node.value)
            if node.attr.startswith(DOCUMENTED):
                continue
            if owner.partition(".")[0] in modules and modules[owner.partition(".")[0]][-1].islower():
                yield f"{owner}.{node.attr}", node.lineno


def torch_privates() -> frozenset[str]:
    """Private attributes of torch's objects, which torch may rename."""
    objects = (nn.Module(), torch.zeros(0), optim.SGD([torch.zeros(1)]))
    classes = (dist.ProcessGroup, dist.Work, DeviceMesh, DTensor, FSDPModule, FullyShardedDataParallel, PipelineStage)
    named = {attribute for item in objects for attribute in (*dir(item), *vars(item))}
    named |= {attribute for kind in classes for attribute in dir(kind)}
    named |= {"_timeout", "_use_orig_params", "_comm_hook", "_comm_hook_state", "_fsdp_param_group", "_local_tensor"}
    return frozenset(name for name in named if name.startswith("_") and not name.endswith("__"))


def private_attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Uses of torch's private attributes on any object; an attribute that the file itself defines is its own."""
    own = {node.name for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            own.add(node.attr)
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr in TORCH_PRIVATES and node.attr not in own:
            yield f"{ast.unparse(node.value)}.{node.attr}", node.lineno


def unsafe_reading(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Ways by which data could run code."""
    for _, full_name, line in imports(tree):
        if full_name.partition(".")[0] in PICKLING:
            yield f"import of {full_name}", line
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        options = {word.arg: word.value for word in node.keywords}
        if called == "torch.load" and not is_true(options.get("weights_only")):
            yield "torch.load without weights_only=True", node.lineno
        if called.split(".")[-1] in ("load", "unsafe_load", "full_load") and called.startswith("yaml."):
            yield f"{called}, which builds any object; use yaml.safe_load", node.lineno
        if called in ("eval", "exec", "os.system", "os.popen"):
            yield called, node.lineno
        if any(is_true(options.get(option)) for option in ("shell", "allow_pickle")):
            yield f"{called} with shell or allow_pickle", node.lineno


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def too_long(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{node.name} has {lines} lines", node.lineno


def offenders(check: object, allowed: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    found = []
    for path in files():
        if name(path) not in allowed:
            found += [f"{name(path)}:{line}: {what}" for what, line in check(read_tree(path))]  # type: ignore[operator]
    return found


MAY_BE_PRIVATE = {name(path) for path in (SOURCE / "_torch_compat").glob("*.py")}
TORCH_PRIVATES = torch_privates()


def test_import_is_cheap() -> None:
    code = f"import sys, shardwise; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_that_is_read_can_run_code() -> None:
    assert not offenders(unsafe_reading, MAY_PICKLE)


def test_private_torch_is_imported_in_one_folder() -> None:
    assert not offenders(private_torch, MAY_BE_PRIVATE)


def test_private_attributes_of_torch_are_used_in_one_folder() -> None:
    assert not offenders(private_attributes, MAY_BE_PRIVATE)


@pytest.mark.parametrize(
    "code", ["module._parameters['weight']", "self._modules", "tensor._version", "group._allgather_base(a, b)"]
)
def test_the_check_of_private_attributes_sees(code: str) -> None:
    assert list(private_attributes(ast.parse(code)))


def test_an_attribute_of_ones_own_passes() -> None:
    assert not list(
        private_attributes(ast.parse("class A:\n  def f(self):\n    self._version = 1\n    self._version\n"))
    )


def test_functions_fit_on_a_screen() -> None:
    assert not offenders(too_long)


def test_long_files_are_named() -> None:
    """A file holds one idea; a long one is a warning to look whether it still does, not a failure."""
    lengths = {name(path): len(path.read_text().splitlines()) for path in files()}
    for path, lines in lengths.items():
        if lines > LONG_FILE:
            warnings.warn(f"{path} has {lines} lines", stacklevel=1)
    assert lengths


def test_every_file_says_what_it_is_for() -> None:
    assert not [name(path) for path in files() if path.read_text() and not ast.get_docstring(read_tree(path))]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import yaml\nyaml.load('x')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "eval('1')",
    ],
)
def test_the_check_of_reading_sees(code: str) -> None:
    assert list(unsafe_reading(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed import _functional_collectives",
        "import torch\ntorch._C._cuda_init()",
        "import torch.distributed as dist\ndist._x()",
    ],
)
def test_the_check_of_private_names_sees(code: str) -> None:
    assert list(private_torch(ast.parse(code)))


def test_the_checks_let_ordinary_code_pass() -> None:
    tree = ast.parse("import torch, yaml\ntorch.load('x', weights_only=True)\nyaml.safe_load('a')\nself._x.torch._y\n")
    assert not [*unsafe_reading(tree), *private_torch(tree)]
