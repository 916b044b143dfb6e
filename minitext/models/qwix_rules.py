"""Qwix, the stack's library for quantization, on our models: its rules from ours, and a check of what it leaves wide.

Qwix (`minitext[qwix]`) replaces the products that it sees while `model(tokens)` runs, by rules on module paths. What
it doesn't see stays as it was, without a word: the backward pass of a custom_vjp, and operations that it has no version
of.
Our models need no change for `PtqProvider`, for `QtProvider` (without a type of gradients it is quantization-aware
training), and for `LoraProvider` with or without stored weights, scanned or unrolled. The limits of Qwix 0.1.8:

- Experts without slots can be trained with quantized products, and nothing else. With
  `model.ffn.capacity_factor` = experts / experts_per_token they have slots, and nothing is dropped.
- Of the experts' weights that are stored narrow, `down` alone gets adapters.
- On a mesh of several devices, weights that are stored narrow are whole on each device, and `QtProvider` fails:
  `model.quantization` is for that.
- Products in `model.hidden`, which our own train step calls, are replaced with `methods=("hidden",)` alone.
- XLA's CPU backend (JAX 0.10.2) has no product of two matrices of int4, and says so when it compiles. A rule with int4
  for weights and activations needs a `tile_size` that gives several tiles there. TPUs need none.

Chapters: 25.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxprs_in_params

from minitext.config.quantization import QuantizationRule
from minitext.errors import UserError
from minitext.models.layers import Embedding
from minitext.models.moe import MoE
from minitext.models.transformer import Transformer

PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
LEAST_BLOCK = 128  # of numbers that share a scale: Qwix turns shorter ones back into wide numbers before it multiplies
OPERATION = re.compile(r"operation\[(\w+)\]")


class WideProduct(NamedTuple):
    """A product, or a stored weight, that a rule names and that isn't of narrow numbers.

    Attributes:
      module: the path of its module.
      what: `forward` or `backward` for a product, or the weight's name.
      types: of the product's factors, or of the weight.
    """

    module: str
    what: str
    types: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module} {self.what} ({' x '.join(self.types)})"


def to_qwix(rules: Sequence[QuantizationRule], model: Transformer) -> list[Any]:
    """Returns `model.quantization`'s rules as Qwix's, for its `QtProvider`, one for each module that they quantize.

    Ours name modules whose products have a weight. Qwix's name every product that runs inside a module, such as
    attention's and the router's, which therefore get no rule here.

    Args:
      rules: ours; the first that matches a module's path counts.
      model: the model, whose paths are matched.

    Raises:
      UserError: for a rule that Qwix has no equal of.
    """
    import qwix

    found = []
    for path, module in nnx.iter_modules(model):
        name = "/".join(map(str, path))
        looked_up = isinstance(module, Embedding) and not model.cfg.tie_embeddings
        if not hasattr(module, "quantization") or looked_up:
            continue
        rule = next((rule for rule in rules if re.fullmatch(rule.module, name)), None)
        if rule is None or rule.dtype == "none":
            continue
        forward, backward = _types(rule)
        tile = rule.block if rule.granularity == "block" else None
        if tile and tile < LEAST_BLOCK:
            raise UserError(
                f"model.quantization: block={tile}: Qwix multiplies blocks of less than {LEAST_BLOCK} as wide numbers: "
                f"set {LEAST_BLOCK} or more, or use minitext's own products"
            )
        found.append(
            qwix.QtRule(
                module_path=re.escape(name),
                # The router's product is an einsum.
                op_names=("dot_general", "ragged_dot") if isinstance(module, MoE) else (),
                weight_qtype=forward,
                act_qtype=forward,
                bwd_qtype=backward,
                tile_size=tile,
                bwd_weight_grad_tile_size=tile,
                disable_channelwise_axes=rule.granularity == "tensor",
                bwd_stochastic_rounding="uniform" if rule.stochastic else None,
                additional_qt_config=_blocks_backward(forward, tile) if tile else None,
            )
        )
    return found


def _types(rule: QuantizationRule) -> tuple[Any, Any]:
    """Returns the types of factors and of gradients."""
    if rule.dtype == "int8":
        return jnp.int8, jnp.int8
    return jnp.float8_e4m3fn, jnp.float8_e4m3fn if rule.gradients == "e4m3" else jnp.float8_e5m2


def _blocks_backward(dtype: Any, tile: int) -> dict[str, Any]:
    """Returns what Qwix's backward products need: by default they take the wide factors where scales are by block."""
    return {"dlhs_residual_qtype": dtype, "drhs_residual_qtype": dtype, "dlhs_tile_size": tile}


def wide_products(model: nnx.Module, provider: Any, *inputs: Any) -> list[WideProduct]:
    """Returns what a provider of Qwix leaves wide although its rules name it.

    The products of a forward pass and, for rules with a type of gradients, of a backward pass are those of the
    program that JAX makes. In a rule without a type of activations only the stored weights count.

    Args:
      model: ours, before or after Qwix took it.
      provider: of the kind `qwix.QtProvider` or `qwix.PtqProvider`, LoRA's included; one that has taken no model.
      *inputs: the model's, such as tokens [B, T].

    Raises:
      UserError: on a mesh of several devices for a `QtProvider`, whose weight gradients have no sharding there.
    """
    import qwix

    trains = isinstance(provider, qwix.QtProvider)
    mesh = jax.sharding.get_abstract_mesh()
    if trains and mesh.size > 1:
        raise UserError(
            f"Qwix {qwix.__version__} gives its weight gradients no sharding, and JAX refuses them on the mesh of "
            f"{mesh.size} devices: use model.quantization"
        )
    kind = type(provider)
    scoped = type(kind.__name__, (kind,), {"get_intercept_map": _marked(kind)})
    marked: Any = copy.copy(provider)
    marked.__class__ = scoped

    def take(model: nnx.Module) -> nnx.Module:
        rngs = {"rngs": nnx.Rngs(0)} if isinstance(provider, qwix.LoraProvider) else {}
        return qwix.quantize_model(model, marked, *inputs, **rngs)

    taken = nnx.eval_shape(take, model)  # nothing is computed
    found = []
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(taken)}
    if isinstance(provider, qwix.PtqProvider):
        for name, module in modules.items():
            found += _wide_weights(name, module, provider._rules)
    for module in modules.values():
        if module is not taken:
            module.__class__ = _scoped(type(module))
    differentiable = nnx.DiffState(0, nnx.Param)

    def loss(model: Any) -> jax.Array:
        return jnp.sum(model(*inputs).astype(jnp.float32))

    graphdef, state = nnx.split(taken)
    run: Callable = nnx.grad(loss, argnums=differentiable) if trains else loss
    program = jax.make_jaxpr(lambda state: jax.tree.leaves(run(nnx.merge(graphdef, state))))(state)
    for where, types in traced_products(program.jaxpr):
        *_, inside = where.split("module[")
        module, operation = inside.partition("]")[0], OPERATION.search(inside)
        rule = _rule_of(module, operation and operation[1], provider._rules)
        back = "transpose(" in where
        named = rule is not None and rule.weight_qtype is not None and rule.act_qtype is not None
        if named and back:
            named = getattr(rule, "bwd_qtype", None) is not None
        if named and any(jnp.dtype(kind).itemsize > 1 for kind in types):
            found.append(WideProduct(module, "backward" if back else "forward", types))
    return found


def refuse_wide(model: nnx.Module, provider: Any, *inputs: Any) -> None:
    """Raises a `UserError` that names what `wide_products` finds, if it finds anything."""
    if found := wide_products(model, provider, *inputs):
        places = dict.fromkeys(map(str, found))
        raise UserError(
            f"Qwix's rules name {len(found)} products and weights that would stay wide: {', '.join(places)}: exempt "
            "these modules from the rules, or use model.quantization"
        )


def _rule_of(path: str, operation: str | None, rules: Sequence[Any]) -> Any:
    """Returns the first rule for an operation in a module; None stands for one that Qwix doesn't see."""
    for rule in rules:
        ours = operation is None or not rule.op_names or operation in rule.op_names
        if re.fullmatch(rule.module_path, path) and ours:
            return rule
    return None


def _wide_weights(name: str, module: nnx.Module, rules: Sequence[Any]) -> Iterator[WideProduct]:
    """Yields a module's matrices that its rule would store narrow and that are stored as they were."""
    rule = _rule_of(name, None, rules)
    if rule is None or rule.weight_qtype is None:
        return
    for key, value in vars(module).items():
        matrix = isinstance(value, nnx.Param) and not isinstance(value, nnx.LoRAParam)
        if key == "router" and rule.op_names and "einsum" not in rule.op_names:
            continue
        if matrix and len(getattr(value, "axes", ())) > 1:
            yield WideProduct(name, key, (str(value.get_value().dtype),))
    if hasattr(rule, "rank"):
        # Qwix knows a stored weight by its shape, and gives those of one shape no adapters.
        stored = {k: v.shape for k, v in vars(module).items() if type(v).__name__ == "WithAux"}
        for key, shape in stored.items():
            if list(stored.values()).count(shape) > 1:
                yield WideProduct(name, f"{key}'s adapter", ("none",))


def _marked(kind: type) -> Callable:
    """Returns a provider's `get_intercept_map`, which names in the program the operations that Qwix sees."""

    def get_intercept_map(self) -> dict[str, Callable]:
        def marks(name: str, replaced: Callable) -> Callable:
            def run(*args, **options):
                with jax.named_scope(f"operation[{name.rpartition('.')[2]}]"):
                    return replaced(*args, **options)

            return run

        replaced = kind.get_intercept_map(self)
        ops = ("jax.lax.dot_general", "jax.numpy.einsum", "jax.lax.ragged_dot")
        return replaced | {name: marks(name, replaced[name]) for name in ops if name in replaced}

    return get_intercept_map


def _scoped(kind: Any) -> Any:
    """Returns a class of modules whose calls' operations have the module's path in their names."""

    def scoped(method: Callable) -> Callable:
        def run(self, *args, **options):
            with jax.named_scope(f"module[{'/'.join(map(str, self.qwix_path))}]"):
                return method(self, *args, **options)

        return run

    methods = [name for name in ("__call__", "routed", "attend") if hasattr(kind, name)]
    return type(kind.__name__, (kind,), {name: scoped(getattr(kind, name)) for name in methods})


def traced_products(jaxpr: Any, outside: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the names and the factors' types of a program's products, also of those in its loops and functions."""
    for eqn in jaxpr.eqns:
        where = f"{outside}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in PRODUCTS:
            types: Any = (str(x.aval.dtype) for x in eqn.invars[:2])
            yield where, tuple(types)
        for inner in jaxprs_in_params(eqn.params):
            yield from traced_products(inner, where)
