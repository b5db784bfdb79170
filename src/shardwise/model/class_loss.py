"""The loss that a class of transformers takes of `logits` and `labels`: the cross-entropy that we take, or another.

A class says nowhere whether its labels stand at their own token or at the logits that foretell them, and whether its
loss is a cross-entropy at all (CTC, regression, a sum with a router's loss). So it computes its loss once, on fake
tensors, with labels that are known: what `cross_entropy` is given there tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED, TASKS
from shardwise.model.probe import copy_to_probe, run_on_fakes, token_inputs, try_devices

CROSS_ENTROPY = inspect.signature(F.cross_entropy)
LENGTH = 8  # of the sequences on which a class is asked
SAME, NEXT, OTHER, UNKNOWN = "same", "next", "other", ""


class _CrossEntropy(TorchFunctionMode):
    """A mode that records the calls of `cross_entropy` and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[inspect.BoundArguments, Tensor]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.cross_entropy:
            self.calls.append((CROSS_ENTROPY.bind(*args, **kwargs), result))
        return result


def labels_of_class(model: PreTrainedModel, job: Job, example: Mapping[str, Tensor] | None = None) -> str:
    """Return where labels that the user gives stand for a model: by its class's own loss, if it can be asked.

    Args:
        example: keyword arguments of a forward; unset: tokens.
    """
    inputs = example or token_inputs(model, min(LENGTH, job.data.sequence_length))
    kind = class_loss(model, {name: value for name, value in inputs.items() if name != "labels"})
    return kind or labels_of_task(model, job)


def labels_of_task(model: PreTrainedModel, job: Job) -> str:
    """Return where labels stand for a model by the job's task, or for one that the user builds by transformers' list.

    The class is not asked.
    """
    if job.model.factory is None:
        return NEXT if TASKS[job.model.task].labels == "next" else SAME
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    return NEXT if type(model) in (causal if isinstance(causal, tuple) else (causal,)) else SAME


def class_loss(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str:
    """Return what the loss of a model's own code is, as far as it is a mean cross-entropy of `logits` and labels.

    Args:
        model: it stays as it is.
        inputs: keyword arguments of a forward, without labels; of tensors shapes and dtypes count.

    Returns:
        `same`: of each label and the logits at its place; `next`: of each label and the logits one ahead of it;
        `other`: another loss; empty where there is none, or the forward does not run on fake tensors.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return UNKNOWN
    first = next(iter(inputs.values()))
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids", first))
    for shape in (tokens.shape[:2], tokens.shape[:1]):  # labels of tokens, or of samples
        labels = torch.arange(shape.numel()).reshape(shape)
        kind, _ = try_devices(partial(_kind, model, inputs, labels))
        if kind is not None:
            return kind
    return UNKNOWN


def _kind(model: PreTrainedModel, inputs: Mapping[str, Tensor], labels: Tensor, device: str, dtype: torch.dtype) -> str:
    recorded, arguments = _CrossEntropy(), dict[str, Any](inputs) | {"labels": labels}
    if getattr(model.config, "output_router_logits", False):  # the routers' loss is added by us
        arguments["output_router_logits"] = False
    run = run_on_fakes(copy_to_probe(model), arguments, device, dtype, watching=recorded)
    if len(recorded.calls) != 1 or run.output.loss is not recorded.calls[0][1]:
        return OTHER
    call = recorded.calls[0][0]
    target = run.known.value_of(call.arguments["target"])
    has_logits_of_each = run.output.logits.shape[:-1].numel() == labels.numel()
    if target is None or not has_logits_of_each or not _is_plain(call):
        return OTHER
    if target.flatten().equal(labels.flatten()):
        return SAME
    ahead = labels[..., 1:]  # the last place is left out, or is not counted
    forms = (ahead, F.pad(ahead, (0, 1), value=IGNORED))
    return NEXT if any(target.flatten().equal(form.flatten()) for form in forms) else OTHER


def _is_plain(call: inspect.BoundArguments) -> bool:
    """Tell whether a call of `cross_entropy` has torch's own defaults: the mean of the labels that are counted."""
    call.apply_defaults()
    defaults = {name: parameter.default for name, parameter in CROSS_ENTROPY.parameters.items()}
    return all(value is defaults[name] or value == defaults[name] for name, value in [*call.arguments.items()][2:])
