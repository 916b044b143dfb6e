"""Adapters of low rank: y = x W + (alpha / r) (x A) B, of which only A [D, r] and B [r, F] are trained.

B is zero at the start, so the model is then the one without adapters (Hu et al. 2021, "LoRA"). W may be stored in 4 or
8 bits (Dettmers et al. 2023, "QLoRA"): its gradient is never needed, only its product with the output's.

`merge` adds A B to W, after which there are no adapters. `Bank` has several adapters of one projection, of which each
token uses its own.

Chapters: 26.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from minitext import kernels
from minitext.config.lora import LoraConfig
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.kernels.linear.xla import Specs
from minitext.models.layers import Linear, make_param
from minitext.models.quantized_storage import StoredWeight
from minitext.sharding.rules import STORAGE_AXES, ShardingRules

# Of the first numbers of A: those of peft, uniform in +-1/sqrt(D), have this standard deviation times 1/sqrt(D).
SPREAD = 3**-0.5


class Adapter(nnx.Module):
    """What is added to a projection: scale * (x A) B.

    Args:
      a: [D, r], or [L, D, r] of stacked layers; float32.
      b: [r, F], or [L, r, F].
      axes: the names of D and F.
      scale: alpha / r.
      rules: sharding rules.
    """

    def __init__(
        self,
        a: jax.Array,
        b: jax.Array,
        axes: tuple[str, str],
        scale: float,
        rules: ShardingRules,
    ):
        self.a = nnx.LoRAParam(a, axes=(axes[0], "rank"))
        self.b = nnx.LoRAParam(b, axes=("rank", axes[1]))
        self.axes, self.scale, self.rules = axes, scale, rules

    def __call__(self, x: jax.Array, specs: Specs) -> jax.Array:
        """Returns what is added to the projection of tokens x [..., D], in x's type.

        Args:
          x: tokens.
          specs: how the projection wants x and its result sharded.
        """
        rules, (inputs, outputs) = self.rules, self.axes
        narrow = None if specs.y is None else PartitionSpec(*specs.y[:-1], None)
        into = Specs(specs.x, rules.out(inputs, "rank", drop=STORAGE_AXES), narrow)
        out = Specs(narrow, rules.out("rank", outputs, drop=STORAGE_AXES), specs.y)
        h = kernels.linear(x, self.a.get_value(), into)
        return kernels.linear(h * jnp.asarray(self.scale, h.dtype), self.b.get_value(), out)

    def product(self) -> jax.Array:
        """Returns what is added to the weight, scale * A B, [D, F] or [L, D, F] in float32."""
        a, b = self.a.get_value(), self.b.get_value()
        names = ("layers",) * (a.ndim - 2) + self.axes
        where = self.rules.out(*names)
        return self.scale * jnp.einsum("...DR,...RF->...DF", a, b, out_sharding=where)


class Bank(nnx.Module):
    """Adapters of one projection for tokens that each use another one; number 0 adds nothing.

    Args:
      adapter: gives their shape.
      count: how many, besides number 0.

    Attributes:
      a: [n, D, r].
      b: [n, r, F].
      number_X: each token's adapter; the program that calls the model sets it first.
    """

    def __init__(self, adapter: Adapter, count: int):
        def zeros(param: nnx.LoRAParam) -> nnx.LoRAParam:
            shape, axes = (count + 1, *param.get_value().shape), (None, *param.axes)
            where = adapter.rules.out(*axes)
            return nnx.LoRAParam(jnp.zeros(shape, jnp.float32, out_sharding=where), axes=axes)

        self.a, self.b = zeros(adapter.a), zeros(adapter.b)
        self.axes, self.scale, self.rules = adapter.axes, adapter.scale, adapter.rules
        self.number_X: Any = nnx.data(None)

    def __call__(self, x_XD: jax.Array, specs: Specs) -> jax.Array:
        """Returns what is added to the projection of tokens x [X, D], in x's type."""
        rules, (inputs, outputs), dtype = self.rules, self.axes, x_XD.dtype
        a_nDR, b_nRF = (param.get_value().astype(dtype) for param in (self.a, self.b))
        if len(x_XD) <= len(a_nDR):  # each token's own matrices are then the fewest to read
            a_XDR = a_nDR.at[self.number_X].get(out_sharding=rules.out(None, inputs, None))
            b_XRF = b_nRF.at[self.number_X].get(out_sharding=rules.out(None, None, outputs))
            h_XR = jnp.einsum("XD,XDR->XR", x_XD, a_XDR, out_sharding=rules.out("batch", None))
            h_XR = h_XR * jnp.asarray(self.scale, dtype)
            return jnp.einsum("XR,XRF->XF", h_XR, b_XRF, out_sharding=specs.y)
        # All adapters as one of n times the rank, of which a token keeps its own part.
        where = rules.out("batch", None, None)
        h_XnR = jnp.einsum("XD,nDR->XnR", x_XD, a_nDR, out_sharding=where)
        own_Xn = self.number_X[:, None] == jnp.arange(len(a_nDR))
        h_XnR = jnp.where(own_Xn[..., None], h_XnR * jnp.asarray(self.scale, dtype), 0)
        return jnp.einsum("XnR,nRF->XF", h_XnR, b_nRF, out_sharding=specs.y)


def apply_lora(
    modules: Iterable[tuple[tuple[Any, ...], Any]], cfg: LoraConfig, rngs: nnx.Rngs
) -> None:
    """Gives adapters to the projections whose paths match.

    Args:
      modules: paths and modules, as of `nnx.iter_modules`, with float32 weights.
      cfg: of the adapters.
      rngs: draws A from a normal distribution with variance 1 / (3 D), which is that of peft's; B is zero.

    Raises:
      UserError: if none matches, or the rank is more than a projection has inputs or outputs.
    """
    if not cfg.rank:
        return
    able = {"/".join(map(str, path)): m for path, m in modules if isinstance(m, Linear)}
    matched = [path for path in able if re.fullmatch(cfg.modules, path)]
    if not matched:
        raise UserError(
            f"model.lora.modules={cfg.modules} matches no projection: choose among {', '.join(able)}"
        )
    for path in matched:
        linear = able[path]
        *layers, inputs, outputs = linear.w.get_value().shape
        if cfg.rank > min(inputs, outputs):
            raise UserError(
                f"model.lora.rank={cfg.rank} is more than {path}, which projects {inputs} features to {outputs}, can "
                f"have: choose {min(inputs, outputs)} at most, or other model.lora.modules"
            )
        names, rules = ("layers",) * len(layers), linear.rules
        a = make_param(
            rngs.params(), (*layers, inputs, cfg.rank), (*names, linear.axes[0], "rank"),
            fan_in=inputs, scale=SPREAD, rules=rules,
        )  # fmt: skip
        where = rules.out(*names, "rank", linear.axes[1])
        b = jnp.zeros((*layers, cfg.rank, outputs), jnp.float32, out_sharding=where)
        linear.adapter = Adapter(a.get_value(), b, linear.axes, cfg.scale, rules)


def merge(model: nnx.Module) -> None:
    """Adds each adapter's product to its weight, in float32, and takes the adapters away.

    All weights that are stored in fewer bits are float32 from then on.
    """
    for _, module in list(nnx.iter_modules(model)):
        for name in getattr(module, "storable", ()):
            if isinstance(stored := getattr(module, name), StoredWeight):
                setattr(module, name, nnx.Param(stored.get_value(), axes=stored.axes))
        if isinstance(module, Linear) and module.adapter is not None:
            module.w = nnx.Param(module.weight(), axes=module.axes)
            del module.adapter


def use_banks(model: nnx.Module, count: int) -> None:
    """Replaces each adapter by a `Bank` of so many.

    Args:
      model: with layers in lists.
      count: of adapters.

    Raises:
      UserError: if a projection is also multiplied head by head.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and isinstance(module.adapter, Adapter):
            if module.heads is not None:
                raise UserError(
                    f"{'/'.join(map(str, path))} is also multiplied head by head in generation, which texts with "
                    "different adapters can't share: train adapters of other model.lora.modules, or merge them"
                )
            module.adapter = Bank(module.adapter, count)


def choose_adapters(model: nnx.Module, number_X: jax.Array) -> None:
    """Tells the model's banks which adapter each token uses."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Bank):
            module.number_X = number_X


def is_adapter(variable: Any) -> bool:
    """Whether a variable is part of an adapter."""
    return isinstance(variable, nnx.LoRAParam)


def without_lora(cfg: ModelConfig) -> ModelConfig:
    """Returns the model without adapters."""
    return cfg.model_copy(update={"lora": LoraConfig()})


def merged_config(cfg: ModelConfig) -> ModelConfig:
    """Returns the model that `merge` makes."""
    return without_lora(cfg).model_copy(update={"storage": ()}) if cfg.lora.rank else cfg
