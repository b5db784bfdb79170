"""Where a class of transformers has its labels, as fake tensors tell, against the loss that it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from shardwise.job.tasks import IGNORED, TASKS
from shardwise.model.class_loss import NEXT, OTHER, SAME, class_loss
from shardwise.model.probe import token_inputs
from shardwise.testing.toy_configs import language_model_types, toy_config

OF_CLASSES = ("sequence_classification", "token_classification")
TASK_TYPES = [
    (task, name)
    for task in ("causal_lm", "masked_lm", "seq2seq_lm", *OF_CLASSES)
    for name in language_model_types(task)
]


def toy(task: str, model_type: str) -> Any:
    """Return a toy with real weights, or skip where there is none or it cannot be built on its own."""
    torch.manual_seed(0)
    try:
        values = toy_config(model_type)
        config = CONFIG_MAPPING[values.pop("model_type")](**values)
        config.use_cache = False  # Dory copies its layers for one
        if task in OF_CLASSES and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 1  # behind which classifiers look for the end of a text
        return TASKS[task].model_class().from_config(config).float().eval()
    except Exception as error:  # each type has its own reasons
        pytest.skip(f"no toy: {type(error).__name__}: {error}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("task", "model_type"), TASK_TYPES, ids=[" ".join(case) for case in TASK_TYPES])
def test_labels_stand_where_the_loss_has_them(task: str, model_type: str) -> None:
    model = toy(task, model_type)
    kind = class_loss(model, token_inputs(model, 8))
    if not kind:
        pytest.skip("its forward does not run on fake tensors with labels")
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(3))
    if isinstance(end := getattr(model.config, "eos_token_id", None), int):
        ids[:, -1] = end  # which classifiers of encoder-decoders look for
    inputs = dict.fromkeys(token_inputs(model, 8), ids)
    labels = ids if task not in OF_CLASSES else ids % 2 if task == "token_classification" else ids[:, 0] % 2
    try:
        with torch.no_grad():
            output = model(**inputs, labels=labels)
    except Exception as error:  # assistants want the states of another model
        pytest.skip(f"its forward wants more than tokens: {type(error).__name__}: {error}")
    logits = output.logits.float().flatten(0, -2)
    forms = {SAME: labels, NEXT: F.pad(labels[..., 1:], (0, 1), value=IGNORED)}
    losses = {name: float(F.cross_entropy(logits, form.flatten())) for name, form in forms.items()}
    own = float(output.loss)
    if kind == OTHER:
        assert all(abs(own - loss) > 1e-3 for loss in losses.values())
    else:
        assert own == pytest.approx(losses[kind], rel=1e-4)
