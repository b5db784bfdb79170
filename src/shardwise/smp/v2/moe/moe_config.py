"""SMP's settings of experts: each acts, or is refused by name where nothing here does the same."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError

BALANCED, UNBALANCED = "aux_loss", "none"
WHERE = "tsm.transform: MoEConfig"


@dataclass
class MoEConfig:
    """The `config` that `tsm.transform` takes for a model of experts.

    Attributes:
        smp_moe: False leaves the experts to transformers; then nothing else here acts.
        random_seed: of the initial weights of experts that `DelayedParamIniter` draws.
        moe_load_balancing: `aux_loss`, or `none`. `sinkhorn` and `balanced` route in other ways, and are refused.
        global_token_shuffle: False.
        moe_all_to_all_dispatcher: True.
        moe_aux_loss_coeff: factor of each layer's balancing loss, Megatron's over all ranks' tokens of a forward: 1
            where experts are evenly used. Not used with `none`.
        moe_z_loss_coeff: factor of the mean squared log-sum-exp of each layer's router.
        use_cpu_initialization: False.
    """

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    @property
    def balancing(self) -> float:
        """Factor of the balancing loss."""
        return self.moe_aux_loss_coeff if self.moe_load_balancing == BALANCED else 0.0

    def check(self) -> None:
        """Raise ConfigError for a value without a counterpart here."""
        if self.moe_load_balancing not in (BALANCED, UNBALANCED):
            raise ConfigError(
                f"{WHERE}.moe_load_balancing={self.moe_load_balancing!r} routes in a way that the model's own router "
                "does not; use 'aux_loss' or 'none'"
            )
        for name, value in (("global_token_shuffle", True), ("moe_all_to_all_dispatcher", False)):
            if getattr(self, name) == value:
                raise ConfigError(
                    f"{WHERE}.{name}={value}: tokens go to their experts by all_to_all, unshuffled; use {not value}"
                )
        if self.use_cpu_initialization:
            raise ConfigError(
                f"{WHERE}.use_cpu_initialization=True: weights are those that the model has, or are drawn on the "
                "device that FSDP gives; use False"
            )
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if (getattr(self, name) or 0.0) < 0:
                raise ConfigError(f"{WHERE}.{name}={getattr(self, name)} must be at least 0; use 0 to leave it out")
