"""Code of a user's own that works, and code that does not, for jobs to name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.observe.callback import Callback


class CountsInGroup(torch.optim.Optimizer):
    """Momentum in bf16, whose steps grow with a number of the group, and halve by turns with one of the parameter."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
                momentum.mul_(group["momentum"]).add_(parameter.grad.to(torch.bfloat16))
                factor = (1.0, 0.5)[state.setdefault("taken", 0) % 2]
                assert state.setdefault("is_new", True) is (state["taken"] == 0)
                state["taken"], state["is_new"] = state["taken"] + 1, False
                parameter.sub_(factor * group["lr"] * group["count"] * momentum.to(parameter.dtype))


class Calls(Callback):
    """Keeps the names of its hooks in the order in which they are called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.names.append(name)
        return super().__getattribute__(name)


class FailsInTheMiddle(Callback):
    """Raises after step 3 on rank 1."""

    def on_step_end(self, session: Any, record: Any) -> None:
        if dist.get_rank() == 1 and record["step"] == 3:
            raise ValueError("the sky fell")


class FailsAtTheStart(Callback):
    """Raises before the first step on rank 0."""

    rank_zero_only = True

    def on_start(self, session: Any) -> None:
        raise KeyError("no such place")


class MisspeltHook(Callback):
    """Has a hook that nobody would call."""

    def on_step_ended(self, session: Any, record: Any) -> None:
        """Do nothing."""


class TakesTooLittle(Callback):
    """Has a hook that cannot be called."""

    def on_step_end(self, session: Any) -> None:  # type: ignore[override]
        """Do nothing."""


class NoCallback:
    """Has the hooks and is no callback."""

    def on_start(self, session: Any) -> None:
        """Do nothing."""


def loss_of_one_argument(output: Any) -> Any:
    return output


def loss_that_raises(output: Any, batch: Any) -> Any:
    return output.no_such_attribute


def loss_that_is_a_mean(output: Any, batch: Any) -> torch.Tensor:
    mean: torch.Tensor = output.mean()
    return mean


ANSWER = 42


class SignDescent(torch.optim.Optimizer):
    """Moves each element by the learning rate against the sign of its gradient."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3, slack: float = 0.0) -> None:
        if slack < 0:
            raise ValueError(f"slack {slack} is negative")
        super().__init__(params, {"lr": lr, "slack": slack})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        moved = parameter.grad.abs() > group["slack"]
                        parameter.sub_(group["lr"] * parameter.grad.sign() * moved)


class WholeTensors(SignDescent):
    """Says nothing of its elements."""

    elementwise = False


class FailingStep(SignDescent):
    """Cannot update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("no way forward")


class WithoutRate(torch.optim.Optimizer):
    """Takes no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def halved(step: int, steps: int) -> float:
    return 0.5 ** (step + 1)


def schedule_of_one_argument(step: int) -> float:
    return 1.0


def schedule_that_raises(step: int, steps: int) -> float:
    return [1.0][step]


def schedule_below_zero(step: int, steps: int) -> float:
    return 1.0 - 2 * step
