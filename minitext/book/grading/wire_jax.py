"""JAX's own values as data: arrays with their shardings, meshes, tracers, and jaxprs with all they hold.

`wire.Codec` asks `encode` about each value that isn't plain, and `READERS` for what it doesn't know how to read.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, config, core, effects, source_info_util, tree_util
from jax._src import mesh as meshes
from jax._src.named_sharding import UNSPECIFIED, UnspecifiedValue
from jax._src.sharding_impls import SingleDeviceSharding
from jax._src.state.types import AbstractRef
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from minitext.book.grading.wire import (
    Codec,
    Derivative,
    Reader,
    Unfit,
    dtype_name,
    dtype_of,
    is_key_dtype,
    lookup,
)

_UNFIT = ("callback", "ffi_call", "custom_call", "call_exported", "infeed", "outfeed", "triton")


_CONTEXT = [n for n in core.JaxprEqnContext.__slots__ if n not in ("configs", "__weakref__")]


def _bounds(index: Any, shape: Any) -> tuple:
    return tuple(
        (i.start or 0, n if i.stop is None else i.stop) for i, n in zip(index, shape, strict=True)
    )


_PRIMITIVES: dict[int, tuple[str, str]] = {}


def _operations() -> dict[int, tuple[str, str]]:
    """Where each of JAX's operations is defined: (module, name) by identity."""
    if not _PRIMITIVES or len(sys.modules) != _PRIMITIVES.get(-1, (0,))[0]:
        for module in [name for name in sys.modules if name.startswith("jax._src.")]:
            for name, value in list(vars(sys.modules[module]).items()):
                if isinstance(value, Primitive):
                    _PRIMITIVES.setdefault(id(value), (module, name))
        _PRIMITIVES[-1] = (len(sys.modules), "")  # pyright: ignore
    return _PRIMITIVES


@contextlib.contextmanager
def _shard_map_of(avals: Any) -> Iterator[None]:
    """What is set within the `shard_map` in which values have these types; a jaxpr is read outside of it."""
    around = (aval.sharding.mesh for aval in avals if aval.sharding.mesh.manual_axes)
    mesh = next(around, None)
    if mesh is None:
        yield
        return
    varying = any(aval.manual_axis_type.varying for aval in avals)
    axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
    with core.extend_axis_env_nd(axes), meshes.use_abstract_mesh(mesh), config._check_vma(varying):
        yield


def custom_params(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a `custom_jvp` or `custom_vjp` equation whose derivative is asked of the other side."""
    from minitext.book.grading.tracing import trace

    rule, inner = given["rule"], given["call_jaxpr"]

    def call(*args: Any) -> list[Any]:
        return core.jaxpr_as_fun(inner)(*args)

    if name == "custom_jvp_call":
        made: Any = jax.custom_jvp(call)
        made.defjvp(lambda primals, tangents: tuple(rule.jvp(list(primals), list(tangents))))
    else:
        made = jax.custom_vjp(call)
        made.defvjp(
            lambda *args: tuple(rule.forward(*args)),
            lambda kept, g: tuple(rule.backward(kept, list(g))),
        )
    with _shard_map_of(inner.in_avals):
        jaxpr, _ = trace(lambda *args: made(*args), inner.in_avals)
    (eqn,) = jaxpr.eqns
    return eqn.params


_POLICIES = ("save_only_these_names", "save_any_names_but_these")


def _tree(c: Codec, x: Any) -> list:
    data = x.node_data()
    node = None if data is None else [c.encode(data[0]), c.encode(data[1])]
    return ["tree", node, [_tree(c, child) for child in x.children()]]


def _tracer(c: Codec, x: Any) -> Any:
    if not c.tracing:
        raise Unfit("a traced value where none can be")
    place = c.places.get(id(x))
    if place is None:
        place = c.places[id(x)] = len(c.tracers)
        c.tracers.append(x)
    return ["tracer", place, c.encode(core.typeof(x))]


def _jax_array(c: Codec, x: Any) -> Any:
    known = c.end.array_number(x)
    if known is not None:
        return ["same", known]
    aval = core.typeof(x)
    number = c.end.share(x)
    c.met.append(number)
    sharding = x.sharding if getattr(x, "_committed", True) else None
    if isinstance(sharding, SingleDeviceSharding) and x.sharding.device_set == {jax.devices()[0]}:
        sharding = None
    if x.is_deleted():
        value: Any = None
    elif not x.is_fully_addressable:
        value = [
            [list(_bounds(s.index, x.shape)), c.array(np.asarray(s.data))]
            for s in x.addressable_shards
        ]
        return [
            "new",
            number,
            ["global", dtype_name(x.dtype), list(x.shape), c.encode(sharding), value],
        ]
    elif is_key_dtype(x.dtype):
        value = c.array(np.asarray(jax.random.key_data(x)))
    else:
        value = c.array(np.asarray(x))
    weak = bool(getattr(aval, "weak_type", False))
    fields = [dtype_name(x.dtype), list(x.shape), weak, c.encode(sharding), value]
    return ["new", number, ["jax", *fields]]


def _primitive(c: Codec, x: Any) -> Any:
    place = _operations().get(id(x))
    if place is None:
        raise Unfit(f"the operation {x.name!r}, which JAX does not have")
    return ["primitive", *place]


def _device(c: Codec, x: Any) -> Any:
    if x in jax.devices():
        return ["device", x.id]
    return c.end.lend(x)


def _mesh(c: Codec, x: Any) -> Any:
    if isinstance(x, Mesh) and not x.empty and all(d in jax.devices() for d in x.devices.flat):
        devices = [[d.id for d in x.devices.flat], list(x.devices.shape)]
    else:
        devices = None
    kinds = [kind.name for kind in x.axis_types] if x.axis_types else None
    names, sizes = [c.encode(n) for n in x.axis_names], list(x.axis_sizes)
    device = getattr(x if isinstance(x, AbstractMesh) else x.abstract_mesh, "abstract_device", None)
    if devices is None and isinstance(x, Mesh) and x.empty:
        return ["mesh", [[], [0]], names, [], kinds, None]
    return ["mesh", devices, names, sizes, kinds, c.encode(device)]


def _sharding(c: Codec, x: NamedSharding) -> Any:
    kind = x._memory_kind
    return ["sharding", _mesh(c, x.mesh), _spec(c, x.spec), kind]


def _spec(c: Codec, x: Any) -> Any:
    marks = [c.encode(tuple(sorted(getattr(x, name, ())))) for name in ("unreduced", "reduced")]
    return ["spec", [c.encode(part) for part in x], *marks]


def _shaped(c: Codec, x: core.ShapedArray) -> Any:
    if type(x) is not core.ShapedArray:
        raise Unfit(f"a {type(x).__name__}")
    mat = x.manual_axis_type
    marks = [c.encode(frozenset(getattr(mat, n))) for n in ("varying", "unreduced", "reduced")]
    shape = [c.encode(n) for n in x.shape]
    rest = [bool(x.weak_type), _sharding(c, x.sharding), marks, c.encode(x.memory_space)]
    return ["shaped", shape, dtype_name(x.dtype), *rest]


def _ref(c: Codec, x: AbstractRef) -> Any:
    kind = None if x.kind is None else c.encode(x.kind)
    return ["ref", c.encode(x.inner_aval), c.encode(x.memory_space), kind]


def _closed(c: Codec, x: Any) -> Any:
    return ["closed", _jaxpr(c, x.jaxpr), [c.encode(const) for const in x.consts]]


def _jaxpr(c: Codec, x: core.Jaxpr) -> Any:
    known = c.jaxprs.get(id(x))
    if known is not None:
        return ["again", known[0]]
    numbers: dict[Any, int] = {}
    avals: list[Any] = []

    def number(v: Any) -> int:
        if v not in numbers:
            numbers[v] = len(numbers)
            avals.append(c.encode(v.aval))
        return numbers[v]

    def atom(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return ["literal", _literal(c, v.val), c.encode(v.aval)]
        return number(v)

    def bound(v: Any) -> Any:
        return ["drop", c.encode(v.aval)] if isinstance(v, core.DropVar) else number(v)

    heads = [number(v) for v in x.constvars], [number(v) for v in x.invars]
    body = []
    for eqn in x.eqns:
        if "debug" in eqn.primitive.name and "callback" in eqn.primitive.name:
            continue  # somebody's print; it gives nothing
        ins = [atom(v) for v in eqn.invars]
        body.append([*_equation(c, eqn), ins, [bound(v) for v in eqn.outvars]])
    outs = [atom(v) for v in x.outvars]
    shown = x.debug_info
    paths = shown.result_paths if isinstance(shown.result_paths, tuple) else None
    about = [
        str(shown.traced_for),
        str(shown.func_src_info),
        c.encode(shown.arg_names),
        c.encode(paths),
    ]
    result = ["jaxpr", *heads, body, outs, avals, c.encode(frozenset(x.effects)), about]
    c.jaxprs[id(x)] = (len(c.jaxprs), x)
    return result


def _literal(c: Codec, x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        data = np.asarray(x)
        return [
            "literal",
            type(x) is np.ndarray,
            dtype_name(data.dtype),
            list(data.shape),
            data.tobytes(),
        ]
    return c.encode(x)


def _equation(c: Codec, eqn: Any) -> list:
    ctx = [getattr(eqn.ctx, name) for name in _CONTEXT]
    stack = [[type(part).__name__, part.name] for part in eqn.source_info.name_stack.stack]
    name = eqn.primitive.name
    if name in ("custom_jvp_call", "custom_vjp_call"):
        params = _custom(c, eqn)
    else:
        params = [[k, c.encode(v)] for k, v in eqn.params.items()]
    effs = c.encode(frozenset(eqn.effects))
    return [_primitive(c, eqn.primitive), params, effs, [c.encode(x) for x in ctx], stack]


def _custom(c: Codec, eqn: Any) -> list:
    """A function with a derivative of its own: its jaxpr, and the derivative's, asked for when it is needed."""
    rule = c.end.lend(Derivative(eqn))
    kept = ("call_jaxpr", "symbolic_zeros")
    return [["rule", rule], *([k, c.encode(eqn.params[k])] for k in kept)]


def _read_jax(c: Codec, *fields: Any) -> Any:
    with core.eval_context():  # its data is here, whatever is traced at the moment
        return _jax(c, *fields)


def _jax(c: Codec, dtype: str, shape: list, weak: bool, sharding: Any, value: Any) -> Any:
    where = c.decode(sharding)
    if value is None:
        found = jax.device_put(np.zeros(shape, dtype_of(dtype)), where)
        found.delete()
        return found
    plain = c.read_array(*value[1:])
    if dtype.startswith("key<"):
        return jax.device_put(
            jax.random.wrap_key_data(jax.numpy.asarray(plain), impl=dtype[4:-1]), where
        )
    if weak:
        from jax._src.lax.lax import _convert_element_type

        found = _convert_element_type(plain, dtype_of(dtype), weak_type=True)
        return found if where is None else jax.device_put(found, where)
    with jax.enable_x64(plain.dtype.itemsize == 8 or jax.config.read("jax_enable_x64")):
        return jax.device_put(plain, where)


def _read_global(c: Codec, dtype: str, shape: list, sharding: Any, shards: list) -> Any:
    pieces = {tuple(map(tuple, where)): c.read_array(*data[1:]) for where, data in shards}
    with core.eval_context():
        return jax.make_array_from_callback(
            tuple(shape), c.decode(sharding), lambda index: pieces[_bounds(index, shape)], dtype=dtype_of(dtype)
        )  # fmt: skip


def _read_tree(c: Codec, node: Any, children: list) -> Any:
    try:
        return _tree_of(c, jax.tree_util.default_registry, node, children)
    except RuntimeError:  # views of references are nodes while tracing only
        return _tree_of(c, tree_util.tracing_registry, node, children)


def _tree_of(c: Codec, registry: Any, node: Any, children: list) -> Any:
    data = None if node is None else (c.decode(node[0]), c.decode(node[1]))
    below = [_tree_of(c, registry, *child[1:]) for child in children]
    if data is not None and hasattr(data[0], "_fields"):  # a named tuple is in no registry
        inner = [jax.tree_util.tree_unflatten(t, [object()] * t.num_leaves) for t in below]
        return jax.tree_util.tree_structure(tuple.__new__(data[0], inner))
    return jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, below)


def _read_tracer(c: Codec, place: int, aval: Any) -> Any:
    if c.values is None:
        from minitext.book.grading.tracing import captured

        return captured(c.end, place, c.decode(aval))
    return c.values[place]


def _read_primitive(c: Codec, module: str, name: str) -> Any:
    found = lookup(module, name) if module.startswith("jax.") else None
    if not isinstance(found, Primitive) or any(word in found.name for word in _UNFIT):
        raise Unfit(f"the operation {name!r}, which an answer may not use")
    return found


def _read_device(c: Codec, number: int) -> Any:
    return next(d for d in jax.devices() if d.id == number)


def _read_mesh(c: Codec, devices: Any, names: list, sizes: list, kinds: Any, device: Any) -> Any:
    found = tuple(c.decode(n) for n in names)
    types_ = kinds and tuple(meshes.AxisType[kind] for kind in kinds)
    if devices is None:
        return AbstractMesh(
            tuple(sizes), found, axis_types=types_ or None, abstract_device=c.decode(device)
        )
    if not devices[0]:
        return meshes.empty_concrete_mesh
    by_id = {d.id: d for d in jax.devices()}
    grid = np.array([by_id[i] for i in devices[0]], dtype=object).reshape(devices[1])
    return Mesh(grid, found, axis_types=types_)


def _read_sharding(c: Codec, mesh: Any, spec: Any, kind: Any) -> Any:
    return NamedSharding(c.decode(mesh), c.decode(spec), memory_kind=kind)


def _read_spec(c: Codec, parts: list, unreduced: Any, reduced: Any) -> Any:
    marks: dict[str, Any] = {}
    marks["unreduced"], marks["reduced"] = map(frozenset, c.read_items([unreduced, reduced]))
    return jax.P(*c.read_items(parts), **{k: v for k, v in marks.items() if v})


def _read_shaped(c: Codec, shape, dtype, weak, sharding, marks, space) -> Any:
    names = ("varying", "unreduced", "reduced")
    mat = core.ManualAxisType(**dict(zip(names, c.read_items(marks), strict=True)))
    sizes = tuple(c.decode(n) for n in shape)
    return core.ShapedArray(sizes, dtype_of(dtype), weak, sharding=c.decode(sharding),
                            manual_axis_type=mat, memory_space=c.decode(space))  # fmt: skip


def _read_ref(c: Codec, inner: Any, space: Any, kind: Any) -> Any:
    return AbstractRef(c.decode(inner), c.decode(space), c.decode(kind))


def _read_closed(c: Codec, jaxpr: Any, consts: list) -> Any:
    return core.ClosedJaxpr(c.decode(jaxpr), c.read_items(consts))


def _read_again(c: Codec, number: int) -> Any:
    return c.built[number]


def _read_jaxpr(c: Codec, constvars, invars, body, outs, avals, effs, about) -> Any:
    variables = [core.Var(c.decode(aval)) for aval in avals]

    def atom(v: Any) -> Any:
        if isinstance(v, list):
            return core.Literal(c.decode(v[1]), c.decode(v[2]))
        return variables[v]

    def bound(v: Any) -> Any:
        return core.DropVar(c.decode(v[1])) if isinstance(v, list) else variables[v]

    eqns = []
    for primitive, params, eqn_effects, ctx, stack, ins, results in body:
        arguments = [atom(v) for v in ins]
        eqns.append(
            _read_equation(
                c,
                primitive,
                params,
                eqn_effects,
                ctx,
                stack,
                arguments,
                [bound(v) for v in results],
            )
        )
    shown = core.DebugInfo(about[0], about[1], c.decode(about[2]), c.decode(about[3]))
    made = core.Jaxpr(
        [variables[i] for i in constvars], [variables[i] for i in invars], [atom(v) for v in outs],
        eqns, frozenset(c.decode(effs)) or effects.no_effects, shown,
    )  # fmt: skip
    c.built.append(made)
    return made


def _read_literal(c: Codec, is_array: bool, dtype: str, shape: list, data: bytes) -> Any:
    found = c.read_array(dtype, shape, data)
    return found if is_array else found[()]


def _read_equation(c: Codec, primitive, params, effs, ctx, stack, arguments, results) -> Any:
    operation = c.decode(primitive)
    given = {str(k): c.decode(v) for k, v in params}
    if given.get("compiler_options_kvs"):
        raise Unfit("compiler options, which an answer may not set")
    if "interpret" in given:  # how a kernel is simulated is for this side to say
        forced = config.pallas_tpu_interpret_mode_context_manager.value
        given["interpret"] = forced or given["interpret"] is True
    if operation.name in ("custom_jvp_call", "custom_vjp_call"):
        given = custom_params(operation.name, given)
    parts = {"Scope": source_info_util.Scope, "Transform": source_info_util.Transform}
    names = source_info_util.NameStack(tuple(parts[kind](str(name)) for kind, name in stack))
    where = source_info_util.new_source_info().replace(name_stack=names)
    context = core.JaxprEqnContext._create(*c.read_items(ctx))
    return core.JaxprEqn(
        arguments, results, operation, given, frozenset(c.decode(effs)), where, context
    )


_WRITERS: dict[type, Callable[[Codec, Any], Any]] = {
    core.Jaxpr: _jaxpr,
    core.ClosedJaxpr: _closed,
    core.ShapedArray: _shaped,
    jax.ShapeDtypeStruct: lambda c, x: [
        "struct",
        list(x.shape),
        dtype_name(x.dtype),
        c.encode(x.sharding),
        bool(x.weak_type),
    ],
    UnspecifiedValue: lambda c, x: ["unspecified"],
}
_BASES: tuple[tuple[Any, Callable[[Codec, Any], Any]], ...] = (
    (core.Tracer, _tracer),
    (jax.Array, _jax_array),
    (Primitive, _primitive),
    (jax.tree_util.PyTreeDef, _tree),
    (jax.Device, _device),
    (NamedSharding, _sharding),
    (SingleDeviceSharding, lambda c, x: ["one", c.encode(next(iter(x.device_set)))]),
    (meshes.BaseMesh, _mesh),
    (jax.P, _spec),
    (AbstractRef, _ref),
    (core.AbstractToken, lambda c, x: ["token"]),
    (
        ad_checkpoint.SaveOnlyTheseNames,
        lambda c, x: ["policy", "save_only_these_names", sorted(x.saveable_names)],
    ),
)


def encode(c: Codec, x: Any) -> list | None:
    """A value of JAX's as nested lists, or None for any other."""
    writer = _WRITERS.get(type(x))
    if writer is None:
        writer = next((writer for cls, writer in _BASES if isinstance(x, cls)), None)
    return writer and writer(c, x)


READERS: dict[str, Reader] = {
    "jax": _read_jax,
    "global": _read_global,
    "tree": _read_tree,
    "tracer": _read_tracer,
    "primitive": _read_primitive,
    "device": _read_device,
    "mesh": _read_mesh,
    "one": lambda c, device: SingleDeviceSharding(c.decode(device)),
    "sharding": _read_sharding,
    "spec": _read_spec,
    "shaped": _read_shaped,
    "ref": _read_ref,
    "token": lambda c: core.abstract_token,
    "policy": lambda c, name, names: getattr(
        jax.checkpoint_policies, _POLICIES[_POLICIES.index(name)]
    )(*map(str, names)),
    "closed": _read_closed,
    "jaxpr": _read_jaxpr,
    "again": _read_again,
    "literal": _read_literal,
    "struct": lambda c, shape, dtype, sharding, weak: jax.ShapeDtypeStruct(
        tuple(shape), dtype_of(dtype), sharding=c.decode(sharding), weak_type=weak
    ),
    "unspecified": lambda c: UNSPECIFIED,
}
