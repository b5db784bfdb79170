"""torch's tests made to run on a backend of another name, on a host without a GPU, in forks of one process.

Its text, and that of torch's own helpers, gets the backend's name where it says Gloo's, and a CPU where it says a GPU;
what asks for one is let through, so a test that needs it fails on both backends and counts for neither. A call of
Gloo's own that chooses an interface is left out. Nothing else of a test is changed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

RANKS = 4
INSTALLED = "torch.testing._internal.distributed.distributed_test"
HELPERS = (  # modules of torch's that name backends for its scripts
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._shard.sharded_tensor",
)
SECONDS = 60  # for a test, where torch has no other limit for it
ASKS = (  # decorators of torch's that skip a test for what the host or torch's build has
    "skip_if_lt_x_gpu",
    "requires_world_size",
    "requires_gloo",
    "requires_nccl",
    "requires_nccl_version",
    "requires_accelerator_dist_backend",
)
NO_GPU = (  # what a text says of a GPU, and what it says without one
    (r"\brank_to_GPU\[\w+\]\[0\]|\btorch\.cuda\.current_device\(\)", "'cpu'"),
    (r"\.cuda\([^()]*\)", ""),
    (r"\.to\((self\.)?(rank|device_id)\)", ""),
    (r"\bdevice_ids=\[[^\]]*\]", "device_ids=None"),
    (r"\boutput_device=torch\.device\([^()]*\)", "output_device=None"),
    (r"\bdevice=((self\.)?(rank|device_id)\b(?!\.)|dist\.get_rank\(\))", "device='cpu'"),
    (r"\b[\w.]+(\([^()]*\))?\.device_count\(\)", str(RANKS)),
    (r"\btorch\.accelerator\.set_device_index\([^()]*\)", "None"),
    (r"\btorch\.accelerator\.current_device_(index|idx)\(\)", "'cpu'"),
    (r"\btorch\.accelerator\.current_accelerator\([^()]*\)", "torch.device('cpu')"),
    (r"\btorch\.accelerator\.is_available\(\)", "False"),
    (r"\btorch\.cuda\.(set_device|synchronize|empty_cache)\([^()]*\)", "None"),
    (r"\btorch\.cuda\.manual_seed\b", "torch.manual_seed"),
    (r"\btorch\.device\((self\.)?(rank|next_rank)\)", "torch.device('cpu')"),
    (r"\btorch\.device\(f?(['\"])cuda[^()]*\)", "torch.device('cpu')"),
    (r"(['\"])cuda\1", "'cpu'"),
)
GLOOS_OWN = (r"\bbackend\.create_device\([^()]*\)", "None")  # the interface that its connections would take
NO_NCCL = (
    (r"(['\"])nccl\1", "'gloo'"),
    (r"\bcuda:nccl\b", "cuda:gloo"),
    (r"\bBackend\.NCCL\b", "Backend.GLOO"),
)


def adapt(text: str, backend: str, without_nccl: bool) -> str:
    """Return a test's text for the CPU, with `backend` for Gloo; with `without_nccl` for NCCL too."""
    for pattern, other in (*NO_GPU, GLOOS_OWN, *(NO_NCCL if without_nccl else ())):
        text = re.sub(pattern, other, text)
    text = re.sub(r"(['\"])gloo(['\":])", rf"\1{backend}\2", text)
    text = re.sub(r"\b(cpu|cuda):gloo\b", rf"\1:{backend}", text)
    return re.sub(r"\bBackend\.GLOO\b", f"Backend.{backend.upper()}", text)


def prepare(backend: str) -> None:
    """Set what torch's test modules read when they are imported; call it before they are."""
    os.environ |= {
        "BACKEND": backend,
        "WORLD_SIZE": str(RANKS),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
        "OMP_NUM_THREADS": "1",
    }
    import torch.distributed
    import torch.multiprocessing
    from torch.testing._internal import common_distributed as common

    torch.multiprocessing.set_start_method("fork")
    torch.distributed.Backend.default_device_backend_map["cpu"] = backend
    for backends in common.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(backend)
    features = common.DistTestCases.backend_feature
    features["plugin"].add(backend)
    features["cpu"] = features["cuda"]  # as an adapted text calls it
    common.MultiProcessTestCase._spawn_processes = _fork_processes
    common.skip_if_no_gpu = _unchanged
    for name in ASKS:
        if hasattr(common, name):
            setattr(common, name, lambda *_, **__: _unchanged)


def load_installed(backend: str) -> ModuleType:
    """Load the tests that torch installs, with the class that torch's own script makes of them."""
    module = _load(INSTALLED, _source(INSTALLED), backend, without_nccl=False)

    class TestDistBackendWithSpawn(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    del module.TestDistBackend  # it has no tests
    module.TestDistBackendWithSpawn = TestDistBackendWithSpawn  # type: ignore[attr-defined]
    return module


def load_script(path: Path, backend: str) -> ModuleType:
    """Load one of torch's test scripts; those beside it and below torch's `test` can be imported by it."""
    for name in HELPERS:
        _load(name, _source(name), backend, without_nccl=False)
    roots = [parent for parent in path.parents if parent.name == "test"]
    sys.path[:0] = [str(path.parent), *(str(each) for root in roots for each in (root, root.parent))]
    return _load(path.stem, path, backend, without_nccl=True)


def _source(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _load(name: str, path: Path, backend: str, without_nccl: bool) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(path)
    if path.name == "__init__.py":
        module.__path__ = [str(path.parent)]
    sys.modules[name] = module
    code = compile(adapt(path.read_text(), backend, without_nccl), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def _fork_processes(test: Any) -> None:
    """Start a test's ranks: forks, which have torch and the test's module as this process has them."""
    import torch.multiprocessing

    test._start_processes(torch.multiprocessing.get_context("fork").Process)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
