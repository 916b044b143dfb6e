"""A language model as two functions of arrays, for an artefact: prefill reads prompts, decode adds a token to each.

Batch, length of the prompts and length of the cache are symbols, and prompts of one batch may have different lengths.
The cache is an argument and a result, as arrays by name. The functions return logits, and the caller chooses tokens.

Chapters: 27.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext.config.model import ModelConfig, MoEConfig
from minitext.errors import UserError
from minitext.inference.artefact import Function
from minitext.inference.cpu_decode import unstack_cache, unstack_layers
from minitext.inference.generate import switch_lengths
from minitext.models.transformer import PatternCache, Transformer, make_cache

LONGEST = 2**31 - 1  # tokens: what int32 counts


def text_functions(cfg: ModelConfig, params: Any) -> tuple[dict[str, Function], dict[str, Any]]:
    """Returns the functions `prefill` and `decode` of a model, and its weights by name.

    Both return `logits` [b, V] float32 for the token after the last one, and the cache with the tokens in it.

    - `prefill` takes `tokens` [b, t] int32, padded at the end with any token; `lengths` [b] int32, the tokens of each
      prompt, at least 1; and a cache with room for s >= t tokens, whose content doesn't matter.
    - `decode` takes `tokens` [b] int32; `lengths` [b] int32, the tokens of each text before this one, less than s; and
      the cache that the call before returned.

    Args:
      cfg: the model's configuration. With `scan_layers` the programs are smaller and, on a CPU, slower.
      params: `nnx.State` of its parameters.

    Raises:
      UserError: for experts with a capacity, which depends on the length of a text.
    """
    _check(cfg)
    params = jax.tree.map(np.asarray, params)  # unstacking NumPy's arrays copies nothing
    stacked = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    model = nnx.merge(stacked, params)
    graphdef, state = nnx.split(model if cfg.scan_layers else unstack_layers(model))
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    weights = {_name(path): x for path, x in paths}

    def model_of(weights: Mapping[str, jax.Array]) -> Transformer:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, [*weights.values()]))

    def empty(batch: Any, length: Any) -> Any:
        cache = make_cache(cfg, batch, length)
        return cache if cfg.scan_layers else unstack_cache(cache)

    def cache_of(inputs: Mapping[str, jax.Array], length: Any) -> Any:
        like = _without_lengths(jax.eval_shape(lambda: empty(1, 1)))
        names, structure = _cache_names(like)
        return jax.tree.unflatten(structure, [inputs[n] for n in names])._replace(length=length)

    def outputs(model: Transformer, x_B1D: jax.Array, cache: Any) -> dict[str, jax.Array]:
        kept = _without_lengths(cache)
        arrays = dict(zip(_cache_names(kept)[0], jax.tree.leaves(kept), strict=True))
        return {"logits": model.logits(x_B1D)[:, 0], **arrays}

    def prefill(weights: Any, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        model, tokens_BT = model_of(weights), inputs["tokens"]
        (B, T), lengths_B1 = tokens_BT.shape, inputs["lengths"][:, None]
        # Padding stays within the prompt's positions, and out of states, as in `generate.make_programs`.
        positions_BT = jnp.minimum(jnp.arange(T), lengths_B1 - 1)
        real_BT = (jnp.arange(T) < lengths_B1).astype(jnp.int32)
        x_BTD, new, _ = model.hidden(tokens_BT, positions_BT, real_BT, empty(B, 0))
        last_B1D = jnp.take_along_axis(x_BTD, lengths_B1[:, :, None] - 1, axis=1)
        # Of what isn't attended to, decode still multiplies values by 0, and NaN would stay NaN.
        blank = {name: jnp.zeros_like(inputs[name]) for name in caches}
        return outputs(model, last_B1D, cache_of(blank, jnp.int32(0)).append(new))

    def decode(weights: Any, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        model, cache = model_of(weights), cache_of(inputs, inputs["lengths"])
        x_B1D, new, _ = model.hidden(
            inputs["tokens"][:, None], inputs["lengths"][:, None], None, cache
        )
        return outputs(model, x_B1D, cache.append(new))

    caches = _cache_inputs(empty)
    longest = max_length(cfg)
    limits = [] if longest == LONGEST else [f"s <= {longest}"]
    lengths = {"lengths": ("b", "int32")}
    functions = {
        "prefill": Function(
            prefill, {"tokens": ("b, t", "int32"), **lengths, **caches}, ["s >= t", *limits], "b"
        ),
        "decode": Function(decode, {"tokens": ("b", "int32"), **lengths, **caches}, limits, "b"),
    }
    return functions, weights


def max_length(cfg: ModelConfig) -> int:
    """Returns how many tokens a text can have: with LongRoPE, those before all keys would have to change."""
    return min(switch_lengths(cfg), default=LONGEST)


def _check(cfg: ModelConfig) -> None:
    for stack in cfg.stacks.values():
        for layer in stack.layers:
            ffn = layer.ffn
            if isinstance(ffn, MoEConfig) and ffn.capacity_factor is not None:
                raise UserError(
                    f"model.ffn.capacity_factor={ffn.capacity_factor} drops tokens by the length of a text, which this "
                    "format leaves open: export a model without it"
                )


def _name(path: tuple[Any, ...]) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")


def _without_lengths(cache: Any) -> Any:
    """Returns a cache without its length, and those of its parts, which don't count."""
    if isinstance(cache, PatternCache):
        parts = tuple(tuple(map(_without_lengths, part)) for part in cache.parts)
        return PatternCache(parts, None)  # pyright: ignore[reportArgumentType]
    return cache._replace(length=None)


def _cache_names(cache: Any) -> tuple[list[str], Any]:
    """Returns the names of a cache's arrays, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(cache)
    return [f"cache.{_name(path).removeprefix('parts.')}" for path, _ in paths], structure


def _cache_inputs(empty: Any) -> dict[str, tuple[str, Any]]:
    """Returns the shapes and types of a cache's arrays, with the symbols b and s."""
    batch, length = jax.export.symbolic_shape("b, s")
    cache = _without_lengths(jax.eval_shape(lambda: empty(batch, length)))
    names, _ = _cache_names(cache)
    leaves = jax.tree.leaves(cache)
    return {n: (", ".join(map(str, x.shape)), x.dtype) for n, x in zip(names, leaves, strict=True)}
