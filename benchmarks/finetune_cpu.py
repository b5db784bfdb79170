"""Tokens/s of fine-tuning on CPU ranks: shardwise beside TRL's SFTTrainer (FSDP2 through Accelerate), one GPT-2.

    python -m benchmarks.finetune_cpu --kind sft --ranks 2 --rounds 9 --steps 2 --json result.json

`--kind sft` trains all weights, `--kind lora` adapters of all linear layers of the blocks (with peft). Sequences are
whole, as packing leaves them, and three of four tokens are a completion's, which alone are trained on. All load the
same weights, see the same rows, and must show the same first loss. Other options are those of training_cpu. Each rank's
peak of memory is printed too. TRL is in the extra bench-peers.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import training_cpu
from benchmarks.contenders.shardwise_contender import ON_ENGINE, SHARDWISE, causal_batch, data_parallel_job, on_cpu
from benchmarks.harness import Contender, Step
from benchmarks.workload import Workload, load_model, token_ids

RANK, ALPHA = 16, 32  # of the adapters
LAYERS = ["c_attn", "c_proj", "c_fc"]
PEAKS = "SHARDWISE_BENCH_PEAKS"  # environment: the directory in which ranks note their peaks of memory
PROMPT = 4  # one token of so many is the prompt's
TRL_SETTINGS = "its SFTTrainer: FSDP2 through Accelerate, a block a unit, fused AdamW"


def contenders(kind: str) -> dict[str, Contender]:
    """Return who takes part in a kind of fine-tuning, by the names of the command line."""
    made = {}
    for name, base in (("shardwise", SHARDWISE), ("engine", ON_ENGINE)):
        made[name] = Contender(
            base.name, f"{__name__}:shardwise_{kind}", "shardwise", f"{base.settings}; {kind}", base.backend
        )
    return made | {"trl": Contender("TRL", f"{__name__}:trl_{kind}", "trl", TRL_SETTINGS)}


def shardwise_sft(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _shardwise(workload, directory, rank, world, {})


def shardwise_lora(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _shardwise(workload, directory, rank, world, {"kind": "lora", "rank": RANK, "alpha": ALPHA})


def _shardwise(workload: Workload, directory: Path, rank: int, world: int, adapter: dict[str, Any]) -> Step:
    trainable = on_cpu(data_parallel_job(workload, directory, world, adapter=adapter))
    batch = causal_batch(token_ids(workload, rank), trainable.layout.data_rank)
    assert batch.labels is not None
    batch.labels[:, : workload.sequence // PROMPT - 1] = -100
    name = f"shardwise, {dist.get_backend()}"
    return partial(_watched, lambda: trainable.run([batch]), name, rank)


def trl_sft(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _trl(workload, directory, rank, world, None)


def trl_lora(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    from peft import LoraConfig

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, task_type="CAUSAL_LM", fan_in_fan_out=True)
    return _trl(workload, directory, rank, world, config)


def _trl(workload: Workload, directory: Path, rank: int, world: int, peft_config: Any) -> Step:
    """What SFTTrainer's loop does in a step, on its own first batch, which holds the rows of all ranks."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(directory / "trl"), use_cpu=True, report_to=[], max_length=workload.sequence,
        per_device_train_batch_size=workload.batch, learning_rate=workload.learning_rate,
        max_grad_norm=workload.clip_norm, weight_decay=workload.weight_decay, optim="adamw_torch_fused",
        gradient_checkpointing=False, bf16=False, lr_scheduler_type="constant", completion_only_loss=True,
        shuffle_dataset=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        load_model(directory), arguments, train_dataset=_rows(workload, world), peft_config=peft_config,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=_tokenizer(workload), pad_token="0", eos_token="0"),
    )  # fmt: skip
    # Accelerate has FSDP on accelerators only; these are what it sets there (see benchmarks/peers.py).
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
        reshard_after_forward=workload.reshard, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    if not trainer.accelerator.is_fsdp2 or trainer.accelerator.num_processes != world:
        raise RuntimeError(f"accelerate did not switch FSDP2 on: {state!r}")
    batches = iter(trainer.get_train_dataloader())
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    trainer.model_wrapped = model
    inputs, items = trainer.get_batch_samples(batches, 1, torch.device("cpu"))

    def step() -> Tensor:
        loss: Tensor = trainer.training_step(model, dict(inputs[0]), items)
        trainer.accelerator.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return partial(_watched, step, "TRL", rank)


def _rows(workload: Workload, world: int) -> Any:
    from datasets import Dataset

    ids = torch.cat([token_ids(workload, rank) for rank in range(world)])
    prompt = workload.sequence // PROMPT
    mask = [int(position >= prompt) for position in range(workload.sequence)]
    return Dataset.from_dict({"input_ids": ids.tolist(), "completion_mask": [mask] * len(ids)})


def _tokenizer(workload: Workload) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(number): number for number in range(workload.vocabulary)}, unk_token="0"))


def _watched(step: Step, contender: str, rank: int) -> Tensor:
    """Run a step, and note how much memory the rank's process has had at most, in MiB."""
    loss = step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (Path(os.environ[PEAKS]) / f"{contender}, rank {rank}").write_text(f"{peak:,.0f} MiB")
    return loss


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark of training_cpu with these contenders."""
    parser = argparse.ArgumentParser(prog="benchmarks.finetune_cpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--kind", choices=("sft", "lora"), default="sft")
    options, others = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-peaks-") as directory:
        os.environ[PEAKS] = directory
        status = training_cpu.main(others, contenders(options.kind), frozen=options.kind == "lora")
        for file in sorted(Path(directory).iterdir()):
            print(f"peak memory of {file.name}: {file.read_text()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
