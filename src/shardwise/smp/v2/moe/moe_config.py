"""SMP's settings of experts: kept and shown, since Mixtral's experts are transformers' own here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MoEConfig:
    """The `config` that `tsm.transform` takes for a Mixtral; without effect."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False
