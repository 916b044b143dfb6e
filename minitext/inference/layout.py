"""A model's parameters as an engine's programs take them, with those of its adapters apart.

An engine lays them out once: it takes layers out of their stacks and casts matrices to the compute type, so that no
program does it again for each token. That's a second copy of the model. A `Borrowed` layout has none: its programs take
the parameters' own arrays, and cut out each layer when they come to it.

Chapters: 24, 26.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minitext.config.model import ModelConfig
from minitext.inference.cpu_decode import split_projections, unstack_layers
from minitext.models.lora import apply_lora, is_adapter, use_banks, without_lora
from minitext.models.quantized_storage import StoredNumbers
from minitext.models.transformer import Transformer
from minitext.sharding.rules import ShardingRules


class Layout:
    """A model's parameters as an engine's programs take them: layers apart, matrices in the compute type.

    Args:
      cfg: the model.
      parts: that of `split_projections`.
      rules: sharding rules.
      adapters: how many the engine can have, `EngineOptions.adapters`.
    """

    def __init__(self, cfg: ModelConfig, parts: int, rules: ShardingRules, adapters: int):
        self.cfg, self.parts, self.rules, self.adapters = cfg, parts, rules, adapters
        self.whole = nnx.eval_shape(self._new)
        # With adapters that requests name, the engine's own parameters are those of the model without.
        self.base = nnx.eval_shape(lambda: self._new(without_lora(cfg))) if adapters else self.whole
        self.graphdef, abstract = nnx.split(nnx.eval_shape(lambda: self._arranged(self._new())))
        self.treedef = jax.tree.structure(abstract)
        self.places = tuple(i for i, (v, _) in enumerate(_parts(abstract)) if is_adapter(v))

    def _new(self, cfg: ModelConfig | None = None) -> Transformer:
        return Transformer(cfg or self.cfg, rules=self.rules, rngs=nnx.Rngs(0))

    def _arranged(self, model: Transformer) -> Transformer:
        apart = unstack_layers(model)
        if self.adapters:
            use_banks(apart, self.adapters)
        return split_projections(apart, self.parts) if self.parts > 1 else apart

    def _cast(self, variable: Any, x: jax.Array) -> jax.Array:
        # Matrices are cast where they are used. Casting them once halves what each step reads.
        wide = x.ndim < 2 or isinstance(variable, StoredNumbers)
        return x if wide else x.astype(self.cfg.dtype)

    def lay_out(self, params: Any) -> list[jax.Array]:
        """Returns the arrays of the programs; those of adapters that requests name are zero."""
        model = nnx.merge(nnx.graphdef(self.base), params)
        if self.adapters:
            apply_lora(list(nnx.iter_modules(model)), self.cfg.lora, nnx.Rngs(0))
        return [self._cast(*part) for part in _parts(nnx.state(self._arranged(model)))]

    def lay_out_adapters(self, params: Any) -> list[jax.Array]:
        """Returns those of the arrays that are one adapter's, from its parameters alone."""
        others = nnx.state(self.whole, nnx.Not(nnx.LoRAParam))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)  # never computed
        model = unstack_layers(nnx.merge(nnx.graphdef(self.whole), zeros, params))
        parts = _parts(nnx.state(model))
        return [self._cast(variable, x) for variable, x in parts if is_adapter(variable)]

    def model(self, arrays: Sequence[jax.Array]) -> Transformer:
        """Returns the model that computes with the arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, arrays))


class Borrowed(Layout):
    """A model's parameters as they are."""

    def __init__(self, cfg: ModelConfig, parts: int, rules: ShardingRules):
        super().__init__(cfg, parts, rules, 0)
        self.graphdef, self.abstract = nnx.split(self.whole)
        self.treedef = jax.tree.structure(self.abstract)

    def lay_out(self, params: Any) -> list[jax.Array]:
        """Returns the parameters' own arrays."""
        arrays, wanted = (jax.tree.leaves(tree) for tree in (params, self.abstract))
        if [x.shape for x in arrays] != [x.shape for x in wanted]:
            raise ValueError("these are the parameters of another model")
        return arrays

    def model(self, arrays: Sequence[jax.Array]) -> Transformer:
        """Returns the model that computes with the arrays, its layers taken apart."""
        return self._arranged(super().model(arrays))


def _parts(state: Any) -> list[tuple[Any, Any]]:
    """Returns each array of a state, beside its variable."""
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [(variable, x) for variable in variables for x in jax.tree.leaves(variable)]
