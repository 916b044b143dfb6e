"""Feed-forward layers.

Chapters: 4.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from minitext.config.model import ModelConfig
from minitext.models.layers import Linear
from minitext.sharding.rules import ShardingRules

CLAMP = 7.0  # bound of the clamped activation's inputs


class SwiGLU(nnx.Module):
    """The gated layer `(silu(x @ gate) * (x @ up)) @ down` (Shazeer 2020), or with another activation."""

    def __init__(self, cfg: ModelConfig, *, rules: ShardingRules, rngs: nnx.Rngs):
        D, F, self.activation = cfg.embed, cfg.mlp, cfg.ffn.activation
        linear = partial(Linear, rules=rules, bias=cfg.ffn.bias)
        self.gate = linear(D, F, ("embed", "mlp"), key=rngs.params())
        self.up = linear(D, F, ("embed", "mlp"), key=rngs.params())
        # Each layer adds two outputs to the residual stream; this keeps its variance from growing with depth
        # (Radford et al. 2019).
        self.down = linear(
            F, D, ("mlp", "embed"), key=rngs.params(), scale=(2 * cfg.layers) ** -0.5
        )

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        """Maps tokens [X, D] to [X, D]."""
        gate_XF, up_XF = checkpoint_name((self.gate(x_XD, "mlp"), self.up(x_XD, "mlp")), "gate_up")
        return self.down(checkpoint_name(gated(gate_XF, up_XF, self.activation), "hidden"))

    @jax.named_scope("ffn")
    def routed(self, x_XD: jax.Array, rows: int) -> tuple[jax.Array, None]:
        """Does the same as `__call__`, with the signature of `minitext.models.moe.MoE.routed`."""
        return self(x_XD), None

    @staticmethod
    def count(cfg: ModelConfig, *, active: bool = False) -> int:
        """Returns the number of parameters of one layer, 3*D*F and biases; `active` leaves the biases out."""
        biases = 2 * cfg.mlp + cfg.embed if cfg.ffn.bias and not active else 0
        return 3 * cfg.embed * cfg.mlp + biases


# Recomputed in the backward pass. Otherwise autodiff would keep two more arrays [X, F] for each layer, a fifth of a
# step's temporary memory, and XLA would write each of them in a separate pass.
@partial(jax.checkpoint, static_argnums=2)
def gated(gate_XF: jax.Array, up_XF: jax.Array, activation: str = "silu") -> jax.Array:
    """Returns `activation(gate) * up`."""
    match activation:
        case "silu":
            return jax.nn.silu(gate_XF) * up_XF
        case "clamped":  # OpenAI 2025, gpt-oss: bounded inputs, a steeper sigmoid, and up around 1
            gate_XF = jnp.minimum(gate_XF, CLAMP)
            up_XF = jnp.clip(up_XF, -CLAMP, CLAMP)
            return gate_XF * jax.nn.sigmoid(1.702 * gate_XF) * (up_XF + 1)
    return jax.nn.gelu(gate_XF, approximate=activation == "gelu_tanh") * up_XF
