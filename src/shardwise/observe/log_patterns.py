"""Regular expressions over the lines that a run prints into a log, for services that make metrics of logs.

SageMaker's metric definitions and HyperPod's log monitoring take the first group of a match as the value. The lines are
those of `shardwise.observe.display` where it is no terminal; a test holds the two together.
"""

from __future__ import annotations

_NUMBER = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)"
_STEP = r"step [0-9]+/[0-9]+ "

METRIC_PATTERNS = {
    "train:loss": rf"{_STEP} loss {_NUMBER}",
    "train:grad_norm": rf"{_STEP}.* norm {_NUMBER}",
    "train:learning_rate": rf"{_STEP}.* lr {_NUMBER}",
    "train:tokens_per_second": rf"{_STEP}.* tokens/s {_NUMBER}",
    "train:tflops_per_rank": rf"{_STEP}.* TFLOPs/rank {_NUMBER}",
    "train:mfu_percent": rf"{_STEP}.* MFU {_NUMBER}%",
    "train:step": r"step ([0-9]+)/[0-9]+  loss",
    "validation:loss": rf"{_STEP} validation loss {_NUMBER}",
}
STEP_LINE = METRIC_PATTERNS["train:step"]  # one comes every `observe.log_every` steps while a run is alive
END_LINE = r"report           |stopped after step "  # the last words of a run that ends well
