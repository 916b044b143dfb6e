"""Calls between the two processes under JAX's transformations: what is traced on one side is a jaxpr on the other."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config, core, linear_util
from jax._src import mesh as meshes
from jax._src.frozen_dict import FrozenDict
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive

from minitext.book.grading.wire import Codec, Unfit

# Settings of JAX that tracing reads.
_SETTINGS = (
    "enable_x64",
    "_check_vma",
    "default_matmul_precision",
    "remove_size_one_mesh_axis_from_type",
    "pallas_tpu_interpret_mode_context_manager",
)
captured_p = Primitive("captured")
captured_p.def_abstract_eval(lambda *, number, aval: aval)


def trace(function: Callable, avals: list[Any]) -> tuple[core.Jaxpr, list[Any]]:
    """The jaxpr of a function of flat lists, and its constants."""
    debug = linear_util.DebugInfo("answer", function.__name__, None, None)
    wrapped = linear_util.wrap_init(lambda *xs: function(*xs), debug_info=debug)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return jaxpr, list(consts)


def encode_context(codec: Codec) -> tuple[list, list | None]:
    """Types of the tracers that a message has met, and what JAX's operations read besides; None if nothing is traced.

    They read the mesh, named axes and the precision.
    """
    avals = [codec.encode(core.typeof(x)) for x in codec.tracers]
    if not avals and isinstance(core.trace_ctx.trace, core.EvalTrace):
        return avals, None
    axes = core.trace_ctx.axis_env
    names = [[codec.encode(k), v] for k, v in axes.axis_sizes.items()]
    explicit = codec.encode(frozenset(axes.explicit_mesh_axis_names))
    mesh = [codec.encode(meshes.get_abstract_mesh()), codec.encode(meshes.get_concrete_mesh())]
    settings = [codec.encode(getattr(config, name).value) for name in _SETTINGS]
    return avals, [names, explicit, mesh, settings]


@contextlib.contextmanager
def _within(codec: Codec, around: list) -> Iterator[None]:
    names, explicit, (abstract, concrete), settings = around
    sizes = {codec.decode(k): v for k, v in names}
    env = core.AxisEnv(FrozenDict(sizes), frozenset(), codec.decode(explicit))
    previous = core.trace_ctx.axis_env
    found = codec.decode(concrete)
    with contextlib.ExitStack() as stack:
        for name, value in zip(_SETTINGS, settings, strict=True):
            setting = getattr(config, name)
            stack.callback(setting.set_local, setting.swap_local(codec.decode(value)))
        if isinstance(found, jax.sharding.Mesh) and not found.empty:
            mesh = config.device_context  # `jax.set_mesh` refuses inside of `jit`
            stack.callback(mesh.set_local, mesh.swap_local(found))
        stack.enter_context(meshes.use_abstract_mesh(codec.decode(abstract)))
        core.trace_ctx.set_axis_env(env)
        try:
            yield
        finally:
            core.trace_ctx.set_axis_env(previous)


def trace_call(call: Callable, into: Codec, avals: list, around: list) -> tuple[Any, list, Codec]:
    """Traces a call of this side's: its result and its jaxpr as data, and the codec that made them.

    Args:
        call: the call, as a function of `into`.
        into: the codec that reads the arguments.
        avals: types of the traced values among them.
        around: the caller's `encode_context`.
    """
    end = into.end
    types_ = [into.decode(aval) for aval in avals]
    outs: list[Any] = []
    before = end.outer, end.captured

    def flat(*xs: Any) -> list[Any]:
        if before[0] is None:
            end.outer, end.captured = core.trace_ctx.trace, {}
        into.values = list(xs)
        found = call(into)
        out = Codec(end, tracing=True)
        outs[:] = [out, out.encode(found)]
        return out.tracers

    flat.__name__ = call.__name__
    try:
        with _within(into, around):
            jaxpr, consts = trace(flat, types_)
    finally:
        end.outer, end.captured = before
    out, value = outs
    inner = [e for e in jaxpr.eqns if e.primitive is captured_p]
    if inner:
        jaxpr = jaxpr.replace(
            eqns=[e for e in jaxpr.eqns if e.primitive is not captured_p],
            invars=[*jaxpr.invars, *(e.outvars[0] for e in inner)],
            debug_info=jaxpr.debug_info._replace(arg_names=None),
        )
    closed = ["closed", out.encode(jaxpr), [_constant(out, c) for c in consts]]
    return value, [closed, [e.params["number"] for e in inner]], out


def _constant(codec: Codec, x: Any) -> Any:
    if isinstance(x, core.Tracer):
        codec.end.tracers.append(x)
        return ["tracer", len(codec.end.tracers) - 1, codec.encode(core.typeof(x))]
    return codec.encode(x)


def evaluate(codec: Codec, jaxpr: list, tracers: list) -> list:
    """The values of the other side's jaxpr of tracers of this side's."""
    closed, outer = codec.decode(jaxpr[0]), [codec.end.tracers[i] for i in jaxpr[1]]
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *tracers, *outer)


def captured(end: Any, number: int, aval: Any) -> Any:
    """A traced value that stands for one of the other side's, from outside of the traced call."""
    if end.outer is None:
        raise Unfit("a traced value where none can be")
    if number not in end.captured:
        end.captured[number] = captured_p.bind_with_trace(
            end.outer, (), (), {"number": number, "aval": aval}
        )
    return end.captured[number]


def trace_jitted(jitted: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A jitted function of the other side's, traced here with its donations."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    settings: dict[str, Any] = {}

    def flat(*xs: Any) -> Any:
        full = list(leaves)
        for place, x in zip(places, xs, strict=True):
            full[place] = x
        positional, named = jax.tree_util.tree_unflatten(tree, full)
        return jitted(*positional, **named)

    arrays = [leaves[i] for i in places]
    closed = jax.make_jaxpr(flat)(*arrays)
    if len(closed.eqns) == 1 and closed.eqns[0].primitive.name == "jit":
        (eqn,) = closed.eqns
        given = {
            v: flag
            for v, flag in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
            if isinstance(v, core.Var)
        }
        donated = [i for i, v in enumerate(closed.jaxpr.invars) if given.get(v, False)]
        settings["donate_argnums"] = tuple(donated)
    return jax.jit(flat, **settings).trace(*arrays)
