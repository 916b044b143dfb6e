"""Feed-forward layers.

Chapters: 4.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext.config.model import ModelConfig
from minitext.models.layers import Linear
from minitext.sharding.rules import ShardingRules


class SwiGLU(nnx.Module):
    """The gated layer `(silu(x @ gate) * (x @ up)) @ down` (Shazeer 2020)."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        D, F = cfg.embed, cfg.mlp
        self.gate = Linear(D, F, ("embed", "mlp"), key=rngs.params(), rules=rules)
        self.up = Linear(D, F, ("embed", "mlp"), key=rngs.params(), rules=rules)
        # Each layer adds two outputs to the residual stream; this keeps its variance from growing with depth
        # (Radford et al. 2019).
        self.down = Linear(
            F, D, ("mlp", "embed"), key=rngs.params(), rules=rules, scale=(2 * cfg.layers) ** -0.5
        )

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        """Maps tokens [X, D] to [X, D]."""
        gate_XF, up_XF = checkpoint_name((self.gate(x_XD, "mlp"), self.up(x_XD, "mlp")), "gate_up")
        return self.down(checkpoint_name(gated(gate_XF, up_XF), "hidden"))

    @jax.named_scope("ffn")
    def routed(self, x_XD: jax.Array, rows: int) -> tuple[jax.Array, None]:
        """Does the same as `__call__`, with the signature of `minitext.models.moe.MoE.routed`."""
        return self(x_XD), None

    @staticmethod
    def count(cfg: ModelConfig, *, active: bool = False) -> int:
        """Returns the number of parameters of one layer, 3*D*F; a token uses them all."""
        return 3 * cfg.embed * cfg.mlp


# Recomputed in the backward pass. Otherwise autodiff would keep two more arrays [X, F] for each layer, a fifth of a
# step's temporary memory, and XLA would write each of them in a separate pass.
@jax.checkpoint
def gated(gate_XF: jax.Array, up_XF: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up`."""
    return jax.nn.silu(gate_XF) * up_XF
