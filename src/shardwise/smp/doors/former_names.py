"""Names that public scripts take from transformers 4 and datasets 2, and that are gone; under `shardwise run` alone.

Most such scripts import more than they use, so a name is there where the installed version lacks it, and does what can
still be done. Arguments of transformers' Trainer and of `from_pretrained` that are here have a successor, say what is
so anyway, or are the script's own affair (`overwrite_output_dir`). No more unless a published script needs one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError


def add_former_names(module: ModuleType) -> None:
    """Put the names into `module` that it once had; what is there stays."""
    module = sys.modules[module.__name__]  # transformers puts another in its own place, and later does so once more
    for name, value in FORMER.get(module.__name__, {}).items():
        if not hasattr(module, name):
            setattr(module, name, value)
    if module.__name__ == "transformers.training_args":
        _with_former_arguments(module.TrainingArguments)
    elif module.__name__ == "transformers.modeling_utils":
        _with_former_keywords(module.PreTrainedModel)
    elif module.__name__ == "transformers.utils.import_utils":
        utilities: Any = module
        utilities.direct_transformers_import = _completing(utilities.direct_transformers_import)


def _completing(import_anew: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    @functools.wraps(import_anew)
    def import_whole(*args: Any, **kwargs: Any) -> ModuleType:
        add_former_names(module := import_anew(*args, **kwargs))
        return module

    return import_whole


class _Metric:
    """Stands for a result of `datasets.load_metric`; scripts also load what they do not compute."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._name, self._given = name, (args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # what copying and the like ask every object for
            raise AttributeError(attribute)
        try:
            import evaluate
        except ImportError as error:
            raise ConfigError(
                f"datasets.load_metric({self._name!r}) is no more in datasets; pip install evaluate, which has it"
            ) from error
        args, kwargs = self._given
        return getattr(evaluate.load(self._name, *args, **kwargs), attribute)


def _is_torch_tpu_available(check_device: bool = True) -> bool:
    from transformers.utils import is_torch_xla_available

    return bool(is_torch_xla_available(check_is_tpu=check_device))


def _send_example_telemetry(*args: Any, **kwargs: Any) -> None:
    """Nothing is sent."""


FORMER: dict[str, dict[str, Callable[..., Any]]] = {
    "datasets": {"load_metric": _Metric},
    "transformers": {"is_torch_tpu_available": _is_torch_tpu_available},
    "transformers.utils": {"send_example_telemetry": _send_example_telemetry},
}


def _with_former_keywords(model: Any) -> None:
    """`from_pretrained` hands what it does not know to the model: `use_auth_token` was `token`, and `from_tf` and
    `from_flax` are of other frameworks' files, which are read no more."""
    load = model.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = kwargs.pop("use_auth_token", None)
        if token is not None:
            kwargs.setdefault("token", token)
        for name in ("from_tf", "from_flax"):
            if kwargs.pop(name, False):
                raise ConfigError(f"from_pretrained({name}=True): transformers reads such files no more; convert it")
        return load(cls, *args, **kwargs)

    model.from_pretrained = classmethod(from_pretrained)


@dataclass
class _Arguments:
    """Arguments that TrainingArguments once had."""

    overwrite_output_dir: bool = field(default=False, metadata={"help": "read by scripts, not by the Trainer"})
    evaluation_strategy: str | None = field(default=None, metadata={"help": "the former name of eval_strategy"})
    no_cuda: bool = field(default=False, metadata={"help": "the former name of use_cpu"})


def _with_former_arguments(arguments: Any) -> None:
    """Make them fields of the class `arguments`: for its parser, its constructor and derived dataclasses."""
    fields = arguments.__dataclass_fields__
    added = {name: item for name, item in _Arguments.__dataclass_fields__.items() if name not in fields}
    if not added:
        return
    fields |= added
    arguments.__annotations__ |= {name: _TYPES[name] for name in added}
    defaults = {name: item.default for name, item in added.items()}
    arguments.__init__ = _taking(arguments.__init__, defaults)
    arguments.__post_init__ = _handing_on(arguments.__post_init__)


_TYPES = {"overwrite_output_dir": bool, "evaluation_strategy": str | None, "no_cuda": bool}


def _taking(make: Callable[..., None], defaults: dict[str, Any]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, default in defaults.items():
            setattr(self, name, kwargs.pop(name, default))
        make(self, *args, **kwargs)

    return make_with


def _handing_on(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(finish)
    def finish_with(self: Any) -> None:
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        self.use_cpu = self.use_cpu or self.no_cuda
        finish(self)

    return finish_with
