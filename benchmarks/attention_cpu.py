"""A training step of transformers as it comes, and of shardwise with its defaults, on long sequences on a CPU.

    python -m benchmarks.attention_cpu --rounds 5 --json result.json

GPT-NeoX has SDPA in transformers; GPT-J, GPT-Neo and Bloom have eager attention only. Each family is 4 layers x 512,
vocabulary 50,304, one sequence of 2048, fp32, AdamW, dropout off. Both sides start from the same weights, see the same
tokens and take turns, each in a process of its own as its user would have it (a rank of shardwise keeps the memory that
it frees, which in one process would serve both); ratios are medians of the ratios within a round. The peak is that of
one whole step, live tensor storages counted. A run fails when the losses differ or a family misses its line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.contenders.shardwise_contender import Trainable
from benchmarks.harness import Contender, GroupFailed, Step, paired_ratio, run_rounds, start_groups
from benchmarks.record import header, write_json
from shardwise.job.schema import Job
from shardwise.observe.memory import LiveBytes

LINES = {"gpt_neox": (1.1, 0.6), "gptj": (1.3, 0.5), "gpt_neo": (1.3, 0.5), "bloom": (1.3, 0.5)}  # speed, share of peak
LOSS_TOLERANCE = 1e-4
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.1
PACKAGES = ("torch", "transformers", "shardwise")


SIDES = (
    Contender("transformers", "benchmarks.attention_cpu:theirs", "transformers"),
    Contender("shardwise", "benchmarks.attention_cpu:ours", "shardwise"),
)
WARMUP = 2  # steps before the rounds


class Side(NamedTuple):
    """A step that returns its loss, and what is held from the start."""

    step: Step
    roots: tuple[Any, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every family; 1 when losses disagree or a line is missed."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = [measure(family, options, console) for family in options.families]
    finally:
        dist.destroy_process_group()
    console.print(render(rows))
    problems = [problem for row in rows for problem in check(row)]
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(options.json, {**header(PACKAGES), "settings": settings, "rows": rows, "problems": problems})
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    return 1 if problems else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.attention_cpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--families", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50304, help="GPT-NeoX's, for all families")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="each side takes one step in each")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(arguments)


def measure(family: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Seconds and peak bytes of both sides."""
    held = [_losses_and_peak(side(family, options)) for side in (their_side, our_side)]
    theirs, ours = time_both(family, options, console)
    return {
        "family": family,
        "losses": [loss for loss, _ in held],
        "peaks": [peak for _, peak in held],
        "rounds": list(zip(theirs, ours, strict=True)),
        "speed": paired_ratio(ours, theirs).median,
        "share": held[1][1] / held[0][1],
    }


def _losses_and_peak(side: Side) -> tuple[float, int]:
    """The first step's loss, and the peak bytes of the second: the first makes the optimizer state."""
    loss = float(side.step())
    with LiveBytes(side.roots) as memory:
        side.step()
    return loss, memory.peak


def time_both(family: str, options: argparse.Namespace, console: Console) -> list[list[float]]:
    """Seconds of each round's step, of transformers and of shardwise, each in its process with all cores."""
    threads = torch.get_num_threads()
    groups, series = start_groups(SIDES, (family, options), 1, threads, lambda text: console.log(f"{family}: {text}"))
    try:
        run_rounds(groups, series, WARMUP, options.rounds, 1, lambda number: None)
    finally:
        for group in groups.values():
            group.close()
    for entry in series:
        if entry.skipped:
            raise GroupFailed(entry.skipped)
    return [entry.seconds for entry in series]


def theirs(family: str, options: argparse.Namespace, rank: int, world: int) -> Step:
    """The contender of plain transformers."""
    return their_side(family, options).step


def ours(family: str, options: argparse.Namespace, rank: int, world: int) -> Step:
    """The contender of shardwise."""
    return our_side(family, options).step


def their_side(family: str, options: argparse.Namespace) -> Side:
    """transformers as it comes, and torch's AdamW."""
    model, ids = start(family, options)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Side(step, (model, ids))


def our_side(family: str, options: argparse.Namespace) -> Side:
    """Shardwise with its defaults, from the same weights."""
    model, ids = start(family, options)
    trainer = Trainable(make_job(model.config, options), torch.device("cpu"))
    with torch.no_grad():
        for name, value in model.named_parameters():
            trainer.model.tensor_map[name].store(value.detach())
    return Side(lambda: trainer.step(ids), (trainer.model.module, ids))


def start(family: str, options: argparse.Namespace) -> tuple[Any, Tensor]:
    """The family's model and the tokens [B, S], the same whenever they are asked for."""
    config = make_config(family, options)
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (options.batch, options.sequence))
    return AutoModelForCausalLM.from_config(config).train(), ids


def make_config(family: str, options: argparse.Namespace) -> Any:
    """4 x 512 by default; whatever the family calls its sizes."""
    kind = CONFIG_MAPPING[family]
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": options.heads,
             "intermediate_size": 4 * options.width, "max_position_embeddings": options.sequence,
             "vocab_size": options.vocabulary}  # fmt: skip
    if family == "gpt_neo":
        sizes["attention_types"] = [[["global", "local"], options.layers // 2]]
    if family == "gptj":
        sizes["rotary_dim"] = options.width // options.heads // 2
    known = kind()
    config = kind(**{kind.attribute_map.get(k, k): value for k, value in sizes.items() if hasattr(known, k)})
    config.use_cache = False  # no key-value cache in training: it would cost time for nothing
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    for name in [name for name in vars(config) if name.endswith("_token_id")]:
        setattr(config, name, None)
    return config


def make_job(config: Any, options: argparse.Namespace) -> Job:
    """Shardwise's defaults, with the same optimizer."""
    values = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
    return Job.model_validate(
        {
            "model": {"config": {"model_type": config.model_type, "vocab_size": config.vocab_size, **values}},
            "parallel": {"device": "cpu", "workers": 1},
            "precision": {"compute": "fp32"},
            "data": {"sequence_length": options.sequence},
            "training": {"sequences_per_step": options.batch, "microbatch_size": options.batch},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": None,
                "schedule": "constant",
            },
        }
    )


def check(row: dict[str, Any]) -> list[str]:
    """What of a row is not as it has to be."""
    theirs, ours = row["losses"]
    speed, share = LINES[row["family"]]
    checks = (
        (abs(theirs - ours) > LOSS_TOLERANCE * abs(theirs), f"first losses differ: {theirs:.6f} and {ours:.6f}"),
        (row["speed"] < speed, f"{row['speed']:.2f} times the speed, asked for {speed}"),
        (row["share"] > share, f"{row['share']:.2f} of the peak, asked for {share}"),
    )
    return [f"{row['family']}: {text}" for broken, text in checks if broken]


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """One row a family."""
    table = Table(title="One training step: transformers as it comes, and shardwise", title_justify="left")
    for name in ("family", "transformers s", "shardwise s", "times as fast", "line", "transformers MB", "shardwise MB",
                 "share", "line"):  # fmt: skip
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in rows:
        seconds = [statistics.median(each) for each in zip(*row["rounds"], strict=True)]
        speed, share = LINES[row["family"]]
        table.add_row(
            row["family"],
            *(f"{each:.2f}" for each in seconds),
            f"{row['speed']:.2f}",
            f"{speed}",
            *(f"{each / 1e6:.0f}" for each in row["peaks"]),
            f"{row['share']:.2f}",
            f"{share}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
