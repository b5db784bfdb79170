"""Parts that transformers' own `Trainer` lacks in its SMP mode, which transformers 5 still has and no longer runs.

Looked at in 5.17 and 5.23: the mode makes no optimizer (`_prepare_for_training` puts that off and has no later place),
wraps the model anew for each evaluation, deals batches and gathers results by rank instead of by data-parallel rank,
clips each rank's gradients by a norm of its own, and under sharded data parallelism saves the optimizer's shard of one
rank in each group alone. The number of steps, by which dropout goes on, is not in its checkpoints. Methods are wrapped
here, while the mode is on and under `shardwise run` alone; a line says so. With the mode off the class stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.layout import smp_axes
from shardwise.smp.nesting import map_leaves
from shardwise.smp.v1.model import DistributedModel
from shardwise.smp.v1.saving import STEPS, save
from shardwise.smp.v1.session import state

NOTE = (
    "transformers' Trainer is in its SMP mode: shardwise makes its optimizer, clips by the whole model's norm, and "
    "deals batches and gathers results by data-parallel rank."
)

STEPS_FILE = "smp_steps.json"
GIVEN = "_smp_given_model"  # in a trainer: the model that it has wrapped


def complete_trainer(trainer: Any) -> None:
    """Complete the class of the module `transformers.trainer`, if the environment asks for the mode."""
    if not trainer.is_sagemaker_mp_enabled():
        return
    cls = trainer.Trainer
    cls.__init__ = _with_tokenizer(cls.__init__)
    cls._wrap_model = _once(cls._wrap_model)
    cls.create_scheduler = _with_optimizer(cls.create_scheduler)
    cls._clip_grad_norm = _clip
    cls._save_optimizer_and_scheduler = _with_shards(cls._save_optimizer_and_scheduler, trainer.OPTIMIZER_NAME)
    cls._save_rng_state, cls._load_rng_state = _with_steps(cls._save_rng_state), _from_step(cls._load_rng_state)
    cls.create_accelerator_and_postprocess = _by_data_rank(cls.create_accelerator_and_postprocess)
    if state.layout.rank == 0:
        print(f"note: {NOTE}", file=sys.stderr)


def _distributed_model() -> DistributedModel | None:
    return state.model if isinstance(state.model, DistributedModel) else None


def _with_tokenizer(make: Callable[..., None]) -> Callable[..., None]:
    """`tokenizer`, as scripts for transformers 4 have it, is `processing_class` now."""

    @functools.wraps(make)
    def make_with(self: Any, *args: Any, **kwargs: Any) -> None:
        if "tokenizer" in kwargs:
            kwargs["processing_class"] = kwargs.pop("tokenizer")
        make(self, *args, **kwargs)

    return make_with


def _once(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluation is given the model without its wrapper: it gets the one that training has made."""

    @functools.wraps(wrap)
    def wrap_once(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = _distributed_model()
        if wrapped is not None and any(
            model is known for known in (wrapped, wrapped.get_module(), vars(self).get(GIVEN))
        ):
            self.model_wrapped = wrapped
            return wrapped
        vars(self)[GIVEN] = model  # which stays the trainer's own, where tensor parallelism replaces it
        return wrap(self, model, *args, **kwargs)

    return wrap_once


def _with_optimizer(create: Callable[..., Any]) -> Callable[..., Any]:
    """The scheduler is made right after the model was wrapped, which is when the optimizer is due: of the wrapped one's
    parameters, since tensor parallelism may have replaced the model's. Trainers derived for transformers 4 ask
    `model_wrapped` for them, and take no model."""

    @functools.wraps(create)
    def create_both(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.optimizer is None and optimizer is None:
            wrapped = _distributed_model()
            self.model_wrapped = wrapped or self.model_wrapped
            takes_model = "model" in inspect.signature(self.create_optimizer).parameters
            self.create_optimizer(*([wrapped.get_module()] if takes_model and wrapped is not None else []))
        return create(self, num_training_steps, optimizer)

    return create_both


def _with_shards(save_state: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Each rank's shard goes to a file of its own, which `smp.load` prefers to the one that all ranks would share."""

    @functools.wraps(save_state)
    def save_all(self: Any, output_dir: str) -> None:
        save_state(self, output_dir)
        if state.cfg.sharded_data_parallel_degree > 1:
            save(self.optimizer.local_state_dict(gather_if_shard=False), os.path.join(output_dir, name), v3=True)

    return save_all


def _with_steps(save_state: Callable[..., None]) -> Callable[..., None]:
    """The random state includes the number of steps, by which dropout goes on."""

    @functools.wraps(save_state)
    def save_both(self: Any, output_dir: str) -> None:
        save_state(self, output_dir)
        if self.args.should_save:
            Path(output_dir, STEPS_FILE).write_text(json.dumps({STEPS: state.step_count}))

    return save_both


def _from_step(load_state: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_state)
    def load_both(self: Any, checkpoint: str | None) -> None:
        load_state(self, checkpoint)
        if checkpoint is not None and (file := Path(checkpoint, STEPS_FILE)).is_file():
            state.step_count = int(json.loads(file.read_text())[STEPS])

    return load_both


def _clip(self: Any, model: DistributedModel) -> float:
    return float(self.optimizer.clip_master_grads(self.args.max_grad_norm))


def _by_data_rank(create: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate knows of no data-parallel ranks but its own: it is told, and what talks between ranks is done here."""

    @functools.wraps(create)
    def create_told(self: Any) -> None:
        create(self)
        accelerator = self.accelerator
        letters = "rdp" if state.cfg.prescaled_batch else "dp"
        data_rank, count, _ = state.layout.smp(letters)
        group = state.layout.group(*smp_axes(letters))
        prepare = accelerator.prepare_data_loader

        @functools.wraps(prepare)
        def dealt(*args: Any, **kwargs: Any) -> Any:
            shown = vars(accelerator.state)
            kept = {name: shown[name] for name in ("num_processes", "process_index")}
            shown.update(num_processes=count, process_index=data_rank)
            try:
                return prepare(*args, **kwargs)
            finally:
                shown.update(kept)

        def padded(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
            return map_leaves(lambda leaf: _padded(leaf, dim, pad_index, pad_first, group), tensor)

        accelerator.prepare_data_loader, accelerator.pad_across_processes = dealt, padded
        accelerator.gather = lambda tensor: map_leaves(lambda leaf: _gathered(leaf, group), tensor)
        accelerator.no_sync = lambda model: model.no_sync()

    return create_told


def _gathered(value: Any, group: dist.ProcessGroup) -> Any:
    """[B, ...] of each member -> [members x B, ...]; a number of each -> [members]."""
    if not isinstance(value, Tensor):
        return value
    local = value.detach().reshape(1) if value.dim() == 0 else value.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts)


def _padded(value: Any, dim: int, index: int, first: bool, group: dist.ProcessGroup) -> Any:
    """With the length along `dim` of the longest among the members'."""
    if not isinstance(value, Tensor) or dim >= value.dim():
        return value
    longest = torch.tensor(value.shape[dim], device=value.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    missing = int(longest) - value.shape[dim]
    shape = [missing if axis == dim else size for axis, size in enumerate(value.shape)]
    fill = value.new_full(shape, index)
    return torch.cat([fill, value] if first else [value, fill], dim) if missing else value
