"""The small parts that layers are made of: projections, RMSNorm and embedding.

Shapes use one letter table: B batch, T query length, D model width, N query heads, H head width, F feed-forward
width, V vocabulary. Parameters are float32 and are cast to the compute type where they are used; norms and rotations
are computed in float32.

Chapters: 4.
"""

import itertools
import math
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

from minitext import kernels
from minitext.config.quantization import QuantizationRule
from minitext.errors import UserError
from minitext.kernels.linear.xla import Specs, plain_linear
from minitext.models import quantization, quantized_gather, quantized_storage
from minitext.models.quantized_storage import StoredWeight
from minitext.sharding.rules import STORAGE_AXES, ShardingRules


def make_param(
    key: jax.Array,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    fan_in: int,
    scale: float = 1.0,
    rules: ShardingRules,
) -> nnx.Param:
    """Makes a float32 weight with named dimensions.

    Args:
      key: PRNG key.
      shape: the weight's shape.
      axes: one name per dimension, for `ShardingRules`.
      fan_in: number of inputs that are summed into one output.
      scale: factor on the standard deviation 1/sqrt(fan_in).
      rules: the sharding rules; each device draws only its own part and needs no memory for the rest.

    Returns:
      A parameter drawn from a normal distribution truncated at two standard deviations and rescaled to keep its
      variance.
    """
    # A standard normal cut at +-2 has standard deviation 0.8796; dividing by it restores the requested one.
    std = scale / math.sqrt(fan_in) / 0.87962566
    drawn = jax.random.truncated_normal(
        key, -2.0, 2.0, shape, jnp.float32, out_sharding=rules.out(*axes)
    )
    return nnx.Param(std * drawn, axes=axes)


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Returns x [..., D] divided by its root mean square, times scale_D: `kernels.rms_norm` has the details."""
    # XLA fuses this with the sums and products around it, which a separate kernel would prevent.
    return kernels.rms_norm(x, scale_D, eps, impl="xla")


class _Keys:
    """Gives the keys that `nnx.Rngs.params` would, which it derives many at once.

    Each derivation is a loop of its own for XLA. One for each parameter would take a third of the time in which the
    program that draws a model compiles.
    """

    def __init__(self, key: jax.Array):
        derive = jax.vmap(jax.random.fold_in, (None, 0))
        blocks = (
            derive(key, jnp.arange(n, n + 16, dtype=jnp.uint32)) for n in itertools.count(0, 16)
        )
        self.keys = (block[i] for block in blocks for i in range(16))

    def params(self) -> jax.Array:
        return next(self.keys)


def keys_of(rngs: nnx.Rngs) -> nnx.Rngs:
    """Returns what a block takes in place of new `rngs`: the same keys, from a smaller program."""
    return cast(nnx.Rngs, _Keys(rngs.params.key[...]))


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale per feature.

    Args:
      width: features.
      eps: added to the mean square.
      rules: the sharding rules.
      axis: the features' dimension name, for the rules.
      offset: multiply by 1 + scale, as Gemma does; an untrained scale is then 0.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        rules: ShardingRules,
        axis: str = "embed",
        offset: bool = False,
    ):
        start = jnp.zeros if offset else jnp.ones
        self.scale = nnx.Param(start((width,), jnp.float32), axes=(axis,))
        self.eps, self.rules, self.axis, self.offset = eps, rules, axis, offset

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last dimension of x [..., D]."""
        scale_D = self.rules.gather(self.scale.get_value(), self.axis)
        return rms_norm(x, 1 + scale_D if self.offset else scale_D, self.eps)


class Linear(nnx.Module):
    """A projection of the last dimension, `y_XF = x_XD @ w_DF` with all leading dimensions in X; a bias is optional.

    The caller flattens [B, T, D] to [B*T, D] once per layer (`flatten_tokens`) where rows are whole. XLA's CPU backend
    then sees plain two-dimensional products in the forward and the backward pass; with two leading dimensions the
    gradient of the weight contracts over both and is preceded by a transposed copy. On TPU and GPU the reshape is free.
    """

    quantization: QuantizationRule | None = None
    adapter: Any = None  # of `minitext.models.lora`
    storable: ClassVar[dict[str, int]] = {"w": -2}

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        key: jax.Array,
        rules: ShardingRules,
        scale: float = 1.0,
        heads: int | None = None,
        bias: bool = False,
    ):
        if bias:
            self.b = nnx.Param(jnp.zeros((outputs,), jnp.float32), axes=(axes[1],))
        # `model.storage` puts a `StoredWeight` in its place.
        self.w: Any = make_param(
            key, (inputs, outputs), axes, fan_in=inputs, scale=scale, rules=rules
        )
        self.axes, self.rules, self.heads = axes, rules, heads

    def by_head(self) -> jax.Array:
        """Returns the weight [D, N*H] of a projection onto `heads` N heads as [N, D, H]."""
        if not isinstance(self.w, nnx.Variable | StoredWeight):
            raise UserError(
                f"Qwix stores a projection onto {self.heads} heads in 8 bits or fewer, and generation with "
                "model.attention.kind=mla also multiplies it head by head: exempt it from Qwix's rules"
            )
        w_DF, N, rules = self.weight(), self.heads or 1, self.rules
        w_DF = rules.gather(w_DF, *self.axes)
        where = rules.out(None, self.axes[1], None)
        w_DNH = jax.lax.reshape(w_DF, (len(w_DF), N, w_DF.shape[1] // N), out_sharding=where)
        return jnp.swapaxes(w_DNH, 0, 1)

    def cannot_quantize(self, _rule: QuantizationRule) -> str | None:
        """Returns why a rule would leave a product as it is, or None."""
        if self.heads is None:
            return None
        return "generation also multiplies it head by head; exempt it by an earlier rule with dtype=none"

    def gathered(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the weight [D, F] in `dtype`, whole but for what computes in parts."""
        return self.rules.gather(self.weight().astype(dtype), *self.axes)

    def weight(self) -> jax.Array:
        """Returns the weight [D, F] in float32, with what an adapter adds to it; of stacked layers [L, D, F]."""
        w = self.w.get_value()
        return w if self.adapter is None else w + self.adapter.product()

    def __call__(self, x: jax.Array, out: str = "act") -> jax.Array:
        """Projects x [X, D] or [B, T, D] to [..., F] in x's type; `out` names the output's last dimension."""
        rules, features = self.rules, "act" if self.axes[0] == "embed" else self.axes[0]
        specs = Specs(
            rules.out(*_token_names(x), features),
            rules.out(*self.axes, drop=STORAGE_AXES),
            rules.out(*_token_names(x, residual=out == "act"), out),
        )
        if isinstance(self.w, StoredWeight):
            y = quantized_storage.project(x, self.w, specs)
        elif is_qwixed(self):
            # Not `get_value()`: Qwix puts stored weights in the parameter's place, which lack it. Its adapters add in
            # their own type.
            y = plain_linear(x, self.w[...], specs).astype(x.dtype)
        elif rules.gather_dtype == "int8" and "embed" in self.axes:
            y = self._project_rounded(x, specs)
        else:
            y = project(x, self.w.get_value(), specs, self.quantization)
        if self.adapter is not None:
            y = y + self.adapter(x, specs)
        if not hasattr(self, "b"):
            return y
        b_F = rules.gather(self.b.get_value().astype(y.dtype), self.axes[1])
        return y + rules.shard(b_F, out)

    def _project_rounded(self, x: jax.Array, specs: Specs) -> jax.Array:
        """Returns the product with the weight as it is sent in int8."""
        product = partial(project, specs=specs, rule=self.quantization)
        dimension = self.axes.index("embed")
        return quantized_gather.multiply(product, x, self.w.get_value(), dimension, specs.w)


def is_qwixed(module: nnx.Module) -> bool:
    """Whether the module is part of a model that Qwix has taken.

    Its products must then be plain ones: Qwix replaces those that it sees, makes its parameters in the module where
    they are, and sees neither the backward pass of a custom_vjp nor a way out of a checkpointed function.
    """
    return hasattr(module, "qwix_path")


def project(
    x: jax.Array, w_DF: jax.Array, specs: Specs, rule: QuantizationRule | None
) -> jax.Array:
    """Returns `kernels.linear`, or with a rule the quantized product."""
    if rule is None:
        return kernels.linear(x, w_DF, specs)
    return quantization.linear(x, w_DF, specs, rule)


def _token_names(x: jax.Array, residual: bool = False) -> tuple[str, ...]:
    return ("batch",) if x.ndim == 2 else ("batch", "residual" if residual else "seq")


class Embedding(nnx.Module):
    """A table of token vectors, which can also serve as the output layer."""

    quantization: QuantizationRule | None = None
    storable: ClassVar[dict[str, int]] = {"table": -1}

    def __init__(self, vocab: int, width: int, *, key: jax.Array, rules: ShardingRules):
        # With fan_in 1, token vectors have unit variance per feature, as RMSNorm expects of the residual stream.
        self.table: Any = make_param(key, (vocab, width), ("vocab", "embed"), fan_in=1, rules=rules)
        self.rules = rules

    @jax.named_scope("embed")
    def __call__(self, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Looks up tokens [B, T] and returns [B, T, D] in `dtype`."""
        if isinstance(self.table, StoredWeight):
            x_BTD = self.table.rows(tokens_BT).astype(dtype)
        elif not isinstance(self.table, nnx.Variable):
            x_BTD = self._stored_rows(tokens_BT).astype(dtype)
        else:
            table_VD = self.gathered(dtype)
            x_BTD = kernels.lookup(table_VD, tokens_BT, self.rules.out("batch", "seq", "act"))
        return self.rules.shard(x_BTD, "batch", "residual", "act")

    def _stored_rows(self, tokens_BT: jax.Array) -> jax.Array:
        """Looks up tokens in a table that Qwix stores, whose rows have scales of their own, as numbers [B, T, D]."""
        import qwix

        stored: Any = self.table
        return qwix.dequantize(stored[tokens_BT].array)

    def gathered(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the table [V, D] in `dtype`, split at most by vocabulary."""
        return self.rules.gather(jnp.asarray(self.table[...], dtype), "vocab", "embed")

    def cannot_quantize(self, _rule: QuantizationRule) -> str | None:
        """Returns why a rule would leave the output layer's product as it is: None, for there is no reason."""
        return None

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns the products of x [..., D] with every token vector, [..., V]."""
        rules, names = self.rules, _token_names(x)
        if self.quantization is not None:
            specs = Specs(
                rules.out(*names, "act"),
                rules.out("embed", "vocab", drop=STORAGE_AXES),
                rules.out(*names, "vocab"),
            )
            return quantization.linear(x, self.table.get_value().T, specs, self.quantization)
        x = rules.shard(x, *names, "act")
        if isinstance(self.table, StoredWeight) and self.table.by_channel:
            values_VD, scale_V = self.table.channels()
            values_VD = rules.gather(values_VD, "vocab", "embed")
            return quantized_storage.scaled_product(
                "...D,VD->...V", x, values_VD, scale_V, rules.out(*names, "vocab")
            )
        table_VD = self.gathered(x.dtype)
        return jnp.einsum("...D,VD->...V", x, table_VD, out_sharding=rules.out(*names, "vocab"))
