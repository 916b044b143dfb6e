"""Values as data: what the deciding and the answering process send each other, and never a pickle.

`Codec` turns values into nested lists of numbers, strings and bytes, and back. It knows the containers of Python,
NumPy and JAX arrays with their shardings, dtypes, meshes, jaxprs with all they hold, and data classes of JAX and
minitext. Anything else stays where it is and is lent: the other side gets a reference. Decoding builds data and calls
nothing of the sender's.
"""

import collections
import contextlib
import dataclasses
import enum
import fractions
import importlib
import operator
import pathlib
import struct
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import msgpack
import numpy as np
from jax._src import ad_checkpoint, config, core, effects, source_info_util, tree_util
from jax._src import mesh as meshes
from jax._src.named_sharding import UNSPECIFIED, UnspecifiedValue
from jax._src.sharding_impls import SingleDeviceSharding
from jax._src.state.types import AbstractRef
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding

LARGEST = 2**30  # bytes of one message
_MUTABLE = (list, dict, set, bytearray, np.ndarray, collections.deque)
# Classes of these packages may be named in a message; those of others are lent.
_KNOWN = ("jax", "jaxlib", "ml_dtypes", "minitext", "optax", "flax")
_SIMPLE = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, range)
_BUILTINS = {cls.__name__: cls for cls in (*_SIMPLE, type(None), slice)}  # fmt: skip
# They run Python, or something that isn't in the jaxpr.
_UNFIT = ("callback", "ffi_call", "custom_call", "call_exported", "infeed", "outfeed", "triton")


class Unfit(Exception):
    """A value that can't be sent, or a message that isn't what it should be."""


def pack(value: Any) -> bytes:
    """A frame: its length, then the message."""
    data = msgpack.packb(value, unicode_errors="surrogatepass")
    assert data is not None
    if len(data) > LARGEST:
        raise Unfit(f"a value of {len(data) / 2**30:.1f} GiB, want at most {LARGEST / 2**30:g} GiB")
    return struct.pack("<Q", len(data)) + data


def unpack(data: bytes) -> Any:
    """The message in a frame without its length.

    Raises:
        Unfit: if it isn't one.
    """
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, use_list=True, unicode_errors="surrogatepass"
        )
    except Exception as error:
        raise Unfit(f"an unreadable message: {type(error).__name__}") from None


def _home(thing: Any) -> tuple[str, str]:
    return getattr(thing, "__module__", "") or "", getattr(thing, "__qualname__", "")


def _trusted(module: str) -> bool:
    return module.split(".")[0] in _KNOWN


def lookup(module: str, name: str) -> Any:
    """The class or function that a message names; only from packages that both sides have.

    Raises:
        Unfit: if it may not be named, or isn't loaded here.
    """
    if module == "builtins" and name in _BUILTINS:
        return _BUILTINS[name]
    if module.startswith("minitext.book") and name != "BoundMethod":
        raise Unfit(f"a message names {module}.{name}")
    if not (_trusted(module) or module.split(".")[0] in ("numpy", "fractions", "pathlib")):
        raise Unfit(f"a message names {module}.{name}")
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if part.startswith("__") or found is None:
            raise Unfit(f"a message names {module}.{name}")
        found = vars(found).get(part)
    return found


def dtype_of(name: str) -> Any:
    """The dtype with this name; `key<...>` is the dtype of random keys."""
    if name.startswith("key<"):
        return jax.random.key(0, impl=name[4:-1]).dtype
    if "sem" in name:
        return _semaphores()[name]()
    try:
        return np.dtype(name)
    except TypeError:
        return jax.numpy.dtype(name)


def _semaphores() -> dict[str, type]:
    """The dtypes of Pallas's semaphores by name."""
    from jax._src.pallas.core import AbstractSemaphoreTy

    found, rest = {}, [AbstractSemaphoreTy]
    while rest:
        cls = rest.pop()
        rest += cls.__subclasses__()
        found[getattr(cls, "name", "")] = cls
    return found


def dtype_name(dtype: Any) -> str:
    """A name from which `dtype_of` makes the dtype again."""
    if _is_key_dtype(dtype):
        return f"key<{dtype._impl.name}>"
    if isinstance(dtype, np.dtype):
        if dtype.kind in "US" or not dtype.isnative:
            return dtype.str
        if dtype.names is not None or dtype.kind in "OmM":
            raise Unfit(f"an array of dtype {dtype}")
    return str(dtype)


def _is_mutable(x: Any) -> bool:
    return type(x) in _MUTABLE


def snapshot(x: Any) -> Any:
    """What `is_as` needs to tell later whether a mutable object was changed in place."""
    if isinstance(x, jax.Array):
        return x.is_deleted()
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype, list(x.flat) if x.dtype.kind == "O" else x.tobytes()
    if isinstance(x, dict):
        return list(x), list(x.values())
    return bytes(x) if isinstance(x, bytearray) else x.copy()


def is_as(x: Any, seen: Any) -> bool:
    """Whether a mutable object is as it was at its `snapshot`: the same objects in the same places."""
    if isinstance(x, (jax.Array, bytearray)):
        return snapshot(x) == seen
    if isinstance(x, np.ndarray):
        shape, dtype, items = seen
        if (x.shape, x.dtype) != (shape, dtype):
            return False
        return _same(x.flat, items) if dtype.kind == "O" else x.tobytes() == items
    if isinstance(x, dict):
        return len(x) == len(seen[0]) and _same(x, seen[0]) and _same(x.values(), seen[1])
    if isinstance(x, set):
        return len(x) == len(seen) and set(map(id, x)) == set(map(id, seen))
    return len(x) == len(seen) and _same(x, seen)


def _same(x: Iterable[Any], y: Iterable[Any]) -> bool:
    return all(map(operator.is_, x, y))


class Codec:
    """One message in one direction, of one end of the connection (`remote.End`), which knows what isn't data.

    Attributes:
        end: lends this side's objects, and borrows the other's.
        tracers: the tracers met while encoding, in order; the message has their numbers.
        values: what stands for the other side's tracers while decoding.
        met: numbers of the shared objects that this message introduced.
    """

    def __init__(self, end: Any, values: list[Any] | None = None, tracing: bool = False):
        self.end = end
        self.values = values
        self.tracing = tracing
        self.tracers: list[Any] = []
        self.met: list[int] = []
        self._places: dict[int, int] = {}
        self._jaxprs: dict[int, tuple[int, Any]] = {}
        self._built: list[Any] = []

    # ------------------------------------------------------------------------------ encoding

    def encode(self, x: Any) -> Any:
        """A value as nested lists.

        Raises:
            Unfit: if it is no data and can't be lent.
        """
        kind = type(x)
        if x is None or kind in (bool, float, bytes):
            return x
        if kind is str:
            return x
        if kind is int:
            return x if -(2**63) <= x < 2**63 else ["int", hex(x)]
        if kind is tuple:
            return ["tuple", [self.encode(item) for item in x]]
        if _is_mutable(x):
            return self._encode_mutable(x)
        writer = _WRITERS.get(kind)
        if writer is not None:
            return writer(self, x)
        return self._encode_other(x)

    def _encode_mutable(self, x: Any) -> Any:
        number = self.end.shared_number(x)
        if number is not None:
            return ["same", number]
        number = self.end.share(x)
        self.met.append(number)
        return ["new", number, self.content(x)]

    def content(self, x: Any) -> Any:
        """What a mutable object holds now."""
        if isinstance(x, jax.Array):
            return ["deleted"]  # nothing else can change in it
        if isinstance(x, np.ndarray):
            return self._array(x)
        if isinstance(x, dict):
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in list(x.items())]]
        if isinstance(x, bytearray):
            return ["bytearray", bytes(x)]
        return [type(x).__name__, [self.encode(item) for item in list(x)]]

    def _array(self, x: np.ndarray) -> list:
        if x.dtype.kind == "O":
            return ["objects", list(x.shape), [self.encode(item) for item in x.flat]]
        return [
            "array",
            dtype_name(x.dtype),
            list(x.shape),
            np.ascontiguousarray(x).tobytes(),
            x.flags.writeable,
        ]

    def _encode_other(self, x: Any) -> Any:
        if isinstance(x, core.Tracer):
            return self._tracer(x)
        if isinstance(x, jax.Array):
            return self._jax_array(x)
        if isinstance(x, np.generic):
            return ["scalar", dtype_name(x.dtype), np.asarray(x).tobytes()]
        if isinstance(x, np.ndarray):
            return self._encode_mutable(np.asarray(x).view(np.ndarray))
        if self.end.is_theirs(x):
            return ["yours", self.end.reference_of(x)]
        node = self.end.node_of(x)
        if node is not None:
            return ["node", *(self.encode(part) for part in node)]
        if isinstance(x, enum.Enum):
            module, name = _home(type(x))
            if _trusted(module):
                return ["enum", module, name, x.name]
        if isinstance(x, (np.dtype, jax.numpy.dtype)) or _is_key_dtype(x):
            return ["dtype", dtype_name(x)]
        if isinstance(x, np.random.Generator):
            return self._generator(x)
        if isinstance(x, type):
            return self._class(x)
        if isinstance(x, Primitive):
            return self._primitive(x)
        if isinstance(x, types.ModuleType) and _trusted(x.__name__):
            return ["module", x.__name__]
        if isinstance(x, pathlib.PurePath):
            return ["path", str(x)]
        if isinstance(x, jax.tree_util.PyTreeDef):
            return self._tree(x)
        if isinstance(x, jax.Device):
            return self._device(x)
        for cls, writer in _BASES:
            if isinstance(x, cls):
                return writer(self, x)
        return self._structure(x)

    def _tree(self, x: Any) -> list:
        data = x.node_data()
        node = None if data is None else [self.encode(data[0]), self.encode(data[1])]
        return ["tree", node, [self._tree(child) for child in x.children()]]

    def _structure(self, x: Any) -> Any:
        """A named tuple, a data class or a model of settings by its fields, or a reference."""
        cls = type(x)
        module, name = _home(cls)
        single = _SINGLE.get(name)
        if single and module == "jax._src.pallas.core":
            return ["single", name]
        if _trusted(module) and "<locals>" not in name:
            if isinstance(x, tuple) and hasattr(cls, "_fields"):
                return ["named", module, name, [self.encode(item) for item in x]]
            if dataclasses.is_dataclass(cls):
                fields = [f.name for f in dataclasses.fields(cls) if hasattr(x, f.name)]
                return ["data", module, name, [[f, self.encode(getattr(x, f))] for f in fields]]
            if hasattr(cls, "model_fields"):
                values = [[f, self.encode(getattr(x, f))] for f in cls.model_fields]
                return ["model", module, name, values]
        if isinstance(x, tuple) and type(x).__init__ is tuple.__init__ and not self.end.trusted:
            return ["tuple", [self.encode(item) for item in x]]
        if isinstance(x, (int, float, str)) and not isinstance(x, enum.Enum):
            base = next(b for b in (int, float, str) if isinstance(x, b))
            return self.encode(base(x))
        if callable(x) and _trusted(module):
            module, name = _home(x)
            if isinstance(x, types.FunctionType) and "<" not in name:
                try:
                    if lookup(module, name) is x:
                        return ["function", module, name]
                except Unfit:
                    pass
        return self.end.lend(x)

    def _class(self, x: type) -> Any:
        module, name = _home(x)
        try:
            if lookup(module, name) is x:
                return ["class", module, name]
        except Unfit:
            pass
        return self.end.lend(x)

    def _tracer(self, x: Any) -> Any:
        if not self.tracing:
            raise Unfit("a traced value where none can be")
        place = self._places.get(id(x))
        if place is None:
            place = self._places[id(x)] = len(self.tracers)
            self.tracers.append(x)
        return ["tracer", place, self.encode(core.typeof(x))]

    def _jax_array(self, x: Any) -> Any:
        known = self.end.array_number(x)
        if known is not None:
            return ["same", known]
        aval = core.typeof(x)
        number = self.end.share(x)
        self.met.append(number)
        sharding = x.sharding if getattr(x, "_committed", True) else None
        if isinstance(sharding, SingleDeviceSharding) and x.sharding.device_set == {
            jax.devices()[0]
        }:
            sharding = None
        if x.is_deleted():
            value: Any = None
        elif not x.is_fully_addressable:
            value = [
                [list(_bounds(s.index, x.shape)), self._array(np.asarray(s.data))]
                for s in x.addressable_shards
            ]
            return [
                "new",
                number,
                ["global", dtype_name(x.dtype), list(x.shape), self.encode(sharding), value],
            ]
        elif _is_key_dtype(x.dtype):
            value = self._array(np.asarray(jax.random.key_data(x)))
        else:
            value = self._array(np.asarray(x))
        weak = bool(getattr(aval, "weak_type", False))
        fields = [dtype_name(x.dtype), list(x.shape), weak, self.encode(sharding), value]
        return ["new", number, ["jax", *fields]]

    def _generator(self, x: np.random.Generator) -> Any:
        return self.end.lend(x)

    def _primitive(self, x: Any) -> Any:
        place = _operations().get(id(x))
        if place is None:
            raise Unfit(f"the operation {x.name!r}, which JAX does not have")
        return ["primitive", *place]

    def _device(self, x: Any) -> Any:
        if x in jax.devices():
            return ["device", x.id]
        return self.end.lend(x)

    def _mesh(self, x: Any) -> Any:
        if isinstance(x, Mesh) and not x.empty and all(d in jax.devices() for d in x.devices.flat):
            devices = [[d.id for d in x.devices.flat], list(x.devices.shape)]
        else:
            devices = None
        kinds = [kind.name for kind in x.axis_types] if x.axis_types else None
        names, sizes = [self.encode(n) for n in x.axis_names], list(x.axis_sizes)
        device = getattr(
            x if isinstance(x, AbstractMesh) else x.abstract_mesh, "abstract_device", None
        )
        if devices is None and isinstance(x, Mesh) and x.empty:
            return ["mesh", [[], [0]], names, [], kinds, None]
        return ["mesh", devices, names, sizes, kinds, self.encode(device)]

    def _sharding(self, x: NamedSharding) -> Any:
        kind = x._memory_kind
        return ["sharding", self._mesh(x.mesh), self._spec(x.spec), kind]

    def _spec(self, x: Any) -> Any:
        marks = [
            self.encode(tuple(sorted(getattr(x, name, ())))) for name in ("unreduced", "reduced")
        ]
        return ["spec", [self.encode(part) for part in x], *marks]

    def _shaped(self, x: core.ShapedArray) -> Any:
        if type(x) is not core.ShapedArray:
            raise Unfit(f"a {type(x).__name__}")
        mat = x.manual_axis_type
        marks = [
            self.encode(frozenset(getattr(mat, n))) for n in ("varying", "unreduced", "reduced")
        ]
        shape = [self.encode(n) for n in x.shape]
        rest = [bool(x.weak_type), self._sharding(x.sharding), marks, self.encode(x.memory_space)]
        return ["shaped", shape, dtype_name(x.dtype), *rest]

    def _ref(self, x: AbstractRef) -> Any:
        kind = None if x.kind is None else self.encode(x.kind)
        return ["ref", self.encode(x.inner_aval), self.encode(x.memory_space), kind]

    def _closed(self, x: Any) -> Any:
        return ["closed", self._jaxpr(x.jaxpr), [self.encode(c) for c in x.consts]]

    def _jaxpr(self, x: core.Jaxpr) -> Any:
        known = self._jaxprs.get(id(x))
        if known is not None:
            return ["again", known[0]]
        numbers: dict[Any, int] = {}
        avals: list[Any] = []

        def number(v: Any) -> int:
            if v not in numbers:
                numbers[v] = len(numbers)
                avals.append(self.encode(v.aval))
            return numbers[v]

        def atom(v: Any) -> Any:
            if isinstance(v, core.Literal):
                return ["literal", self._literal(v.val), self.encode(v.aval)]
            return number(v)

        def bound(v: Any) -> Any:
            return ["drop", self.encode(v.aval)] if isinstance(v, core.DropVar) else number(v)

        heads = [number(v) for v in x.constvars], [number(v) for v in x.invars]
        body = []
        for eqn in x.eqns:
            if "debug" in eqn.primitive.name and "callback" in eqn.primitive.name:
                continue  # somebody's print; it gives nothing
            ins = [atom(v) for v in eqn.invars]
            body.append([*self._equation(eqn), ins, [bound(v) for v in eqn.outvars]])
        outs = [atom(v) for v in x.outvars]
        shown = x.debug_info
        paths = shown.result_paths if isinstance(shown.result_paths, tuple) else None
        about = [
            str(shown.traced_for),
            str(shown.func_src_info),
            self.encode(shown.arg_names),
            self.encode(paths),
        ]
        result = ["jaxpr", *heads, body, outs, avals, self.encode(frozenset(x.effects)), about]
        self._jaxprs[id(x)] = (len(self._jaxprs), x)
        return result

    def _literal(self, x: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic, jax.Array)):
            data = np.asarray(x)
            return [
                "literal",
                type(x) is np.ndarray,
                dtype_name(data.dtype),
                list(data.shape),
                data.tobytes(),
            ]
        return self.encode(x)

    def _equation(self, eqn: Any) -> list:
        ctx = [getattr(eqn.ctx, name) for name in _CONTEXT]
        stack = [[type(part).__name__, part.name] for part in eqn.source_info.name_stack.stack]
        name = eqn.primitive.name
        if name in ("custom_jvp_call", "custom_vjp_call"):
            params = self._custom(eqn)
        else:
            params = [[k, self.encode(v)] for k, v in eqn.params.items()]
        effs = self.encode(frozenset(eqn.effects))
        return [self._primitive(eqn.primitive), params, effs, [self.encode(c) for c in ctx], stack]

    def _custom(self, eqn: Any) -> list:
        """A function with a derivative of its own: its jaxpr, and the derivative's, asked for when it is needed."""
        rule = self.end.lend(Derivative(eqn))
        kept = ("call_jaxpr", "symbolic_zeros")
        return [["rule", rule], *([k, self.encode(eqn.params[k])] for k in kept)]

    # ------------------------------------------------------------------------------ decoding

    def decode(self, x: Any) -> Any:
        """The value of nested lists.

        Raises:
            Unfit: if they aren't what `encode` makes.
        """
        if not isinstance(x, list):
            if x is None or isinstance(x, (bool, int, float, str, bytes)):
                return x
            raise Unfit("a message of an unknown form")
        reader = _READERS.get(x[0]) if x and isinstance(x[0], str) else None
        if reader is None:
            raise Unfit("a message of an unknown form")
        return reader(self, *x[1:])

    def _read_items(self, items: list) -> list:
        return [self.decode(item) for item in items]

    def _read_new(self, number: int, content: list) -> Any:
        kind = content[0]
        if kind in ("list", "dict", "set", "bytearray", "deque"):
            made: Any = {"list": list, "dict": dict, "set": set, "bytearray": bytearray,
                         "deque": collections.deque}[kind]()  # fmt: skip
            self.end.take(number, made)
            self.met.append(number)
            self.fill(made, content)
            return made
        made = self._read_content(content)
        self.end.take(number, made)
        self.met.append(number)
        return made

    def _read_content(self, content: list) -> Any:
        kind, *rest = content
        reader = {"array": self._read_array, "objects": self._read_objects, "jax": self._read_jax,
                  "global": self._read_global}.get(kind)  # fmt: skip
        if reader is None:
            raise Unfit("a message of an unknown form")
        return reader(*rest)

    def fill(self, x: Any, content: list) -> None:
        """Makes a mutable object hold what a message says."""
        kind, *rest = content
        if isinstance(x, jax.Array):
            if kind != "deleted":
                raise Unfit("a message changes an array of JAX")
            x.delete()
        elif isinstance(x, np.ndarray):
            new = self._read_content(content)
            if new.shape != x.shape or new.dtype != x.dtype:
                raise Unfit("a message changes the shape of an array")
            x[...] = new
        elif kind != type(x).__name__:
            raise Unfit("a message changes the type of an object")
        elif isinstance(x, dict):
            pairs = [(self.decode(k), self.decode(v)) for k, v in rest[0]]
            x.clear()
            x.update(pairs)
        elif isinstance(x, bytearray):
            x[:] = rest[0]
        else:
            items = self._read_items(rest[0])
            x.clear()
            (x.update if isinstance(x, set) else x.extend)(items)

    def _read_array(
        self, dtype: str, shape: list, data: bytes, writeable: bool = True
    ) -> np.ndarray:
        found = np.frombuffer(data, dtype_of(dtype)).reshape(shape).copy()
        found.flags.writeable = bool(writeable)
        return found

    def _read_objects(self, shape: list, items: list) -> np.ndarray:
        found = np.empty(len(items), object)
        for index, item in enumerate(items):
            found[index] = self.decode(item)
        return found.reshape(shape)

    def _read_jax(self, *fields: Any) -> Any:
        with core.eval_context():  # its data is here, whatever is traced at the moment
            return self._jax(*fields)

    def _jax(self, dtype: str, shape: list, weak: bool, sharding: Any, value: Any) -> Any:
        where = self.decode(sharding)
        if value is None:
            found = jax.device_put(np.zeros(shape, dtype_of(dtype)), where)
            found.delete()
            return found
        plain = self._read_array(*value[1:])
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

    def _read_global(self, dtype: str, shape: list, sharding: Any, shards: list) -> Any:
        pieces = {tuple(map(tuple, where)): self._read_array(*data[1:]) for where, data in shards}
        with core.eval_context():
            return jax.make_array_from_callback(
                tuple(shape), self.decode(sharding), lambda index: pieces[_bounds(index, shape)], dtype=dtype_of(dtype)
            )  # fmt: skip

    def _read_named(self, module: str, name: str, items: list) -> Any:
        cls = lookup(module, name)
        if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
            raise Unfit(f"a message names {module}.{name}")
        values = self._read_items(items)
        if len(values) != len(cls._fields):  # pyright: ignore[reportAttributeAccessIssue]
            raise Unfit(f"a {name} of {len(values)} fields")
        return tuple.__new__(cls, values)

    def _read_data(self, module: str, name: str, fields: list) -> Any:
        cls = lookup(module, name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)) or name == "Trial":
            raise Unfit(f"a message names {module}.{name}")
        known = {field.name for field in dataclasses.fields(cls)}
        made = object.__new__(cls)
        for key, value in fields:
            if key not in known:
                raise Unfit(f"a {name} with {key!r}")
            object.__setattr__(made, key, self.decode(value))
        return made

    def _read_model(self, module: str, name: str, fields: list) -> Any:
        cls = lookup(module, name)
        if not (isinstance(cls, type) and hasattr(cls, "model_construct")):
            raise Unfit(f"a message names {module}.{name}")
        return cls.model_construct(**{str(k): self.decode(v) for k, v in fields})  # pyright: ignore

    def _read_enum(self, module: str, name: str, member: str) -> Any:
        cls = lookup(module, name)
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            raise Unfit(f"a message names {module}.{name}")
        return cls[member]

    def _read_class(self, module: str, name: str) -> Any:
        cls = lookup(module, name)
        if not isinstance(cls, type):
            raise Unfit(f"a message names {module}.{name}")
        return cls

    def _read_function(self, module: str, name: str) -> Any:
        found = lookup(module, name)
        if not isinstance(found, types.FunctionType) or not module.startswith("jax"):
            raise Unfit(f"a message names {module}.{name}")
        return found

    def _read_module(self, name: str) -> Any:
        if not _trusted(name) or name not in sys.modules:
            raise Unfit(f"a message names {name}")
        return sys.modules[name]

    def _read_tree(self, node: Any, children: list) -> Any:
        try:
            return self._tree_of(jax.tree_util.default_registry, node, children)
        except RuntimeError:  # views of references are nodes while tracing only
            return self._tree_of(tree_util.tracing_registry, node, children)

    def _tree_of(self, registry: Any, node: Any, children: list) -> Any:
        data = None if node is None else (self.decode(node[0]), self.decode(node[1]))
        below = [self._tree_of(registry, *child[1:]) for child in children]
        if data is not None and hasattr(data[0], "_fields"):  # a named tuple is in no registry
            inner = [jax.tree_util.tree_unflatten(t, [object()] * t.num_leaves) for t in below]
            return jax.tree_util.tree_structure(tuple.__new__(data[0], inner))
        return jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, below)

    def _read_tracer(self, place: int, aval: Any) -> Any:
        if self.values is None:
            return self.end.captured(place, self.decode(aval))
        return self.values[place]

    def _read_primitive(self, module: str, name: str) -> Any:
        found = lookup(module, name) if module.startswith("jax.") else None
        if not isinstance(found, Primitive) or any(word in found.name for word in _UNFIT):
            raise Unfit(f"the operation {name!r}, which an answer may not use")
        return found

    def _read_device(self, number: int) -> Any:
        return next(d for d in jax.devices() if d.id == number)

    def _read_mesh(self, devices: Any, names: list, sizes: list, kinds: Any, device: Any) -> Any:
        found = tuple(self.decode(n) for n in names)
        types_ = kinds and tuple(meshes.AxisType[kind] for kind in kinds)
        if devices is None:
            return AbstractMesh(
                tuple(sizes), found, axis_types=types_ or None, abstract_device=self.decode(device)
            )
        if not devices[0]:
            return meshes.empty_concrete_mesh
        by_id = {d.id: d for d in jax.devices()}
        grid = np.array([by_id[i] for i in devices[0]], dtype=object).reshape(devices[1])
        return Mesh(grid, found, axis_types=types_)

    def _read_sharding(self, mesh: Any, spec: Any, kind: Any) -> Any:
        return NamedSharding(self.decode(mesh), self.decode(spec), memory_kind=kind)

    def _read_spec(self, parts: list, unreduced: Any, reduced: Any) -> Any:
        marks: dict[str, Any] = {}
        marks["unreduced"], marks["reduced"] = map(
            frozenset, self._read_items([unreduced, reduced])
        )
        return jax.P(*self._read_items(parts), **{k: v for k, v in marks.items() if v})

    def _read_shaped(self, shape, dtype, weak, sharding, marks, space) -> Any:
        names = ("varying", "unreduced", "reduced")
        mat = core.ManualAxisType(**dict(zip(names, self._read_items(marks), strict=True)))
        sizes = tuple(self.decode(n) for n in shape)
        return core.ShapedArray(sizes, dtype_of(dtype), weak, sharding=self.decode(sharding),
                                manual_axis_type=mat, memory_space=self.decode(space))  # fmt: skip

    def _read_ref(self, inner: Any, space: Any, kind: Any) -> Any:
        return AbstractRef(self.decode(inner), self.decode(space), self.decode(kind))

    def _read_closed(self, jaxpr: Any, consts: list) -> Any:
        return core.ClosedJaxpr(self.decode(jaxpr), self._read_items(consts))

    def _read_again(self, number: int) -> Any:
        return self._built[number]

    def _read_jaxpr(self, constvars, invars, body, outs, avals, effs, about) -> Any:
        variables = [core.Var(self.decode(aval)) for aval in avals]

        def atom(v: Any) -> Any:
            if isinstance(v, list):
                return core.Literal(self.decode(v[1]), self.decode(v[2]))
            return variables[v]

        def bound(v: Any) -> Any:
            return core.DropVar(self.decode(v[1])) if isinstance(v, list) else variables[v]

        eqns = []
        for primitive, params, eqn_effects, ctx, stack, ins, results in body:
            arguments = [atom(v) for v in ins]
            eqns.append(
                self._read_equation(
                    primitive,
                    params,
                    eqn_effects,
                    ctx,
                    stack,
                    arguments,
                    [bound(v) for v in results],
                )
            )
        shown = core.DebugInfo(about[0], about[1], self.decode(about[2]), self.decode(about[3]))
        made = core.Jaxpr(
            [variables[i] for i in constvars], [variables[i] for i in invars], [atom(v) for v in outs],
            eqns, frozenset(self.decode(effs)) or effects.no_effects, shown,
        )  # fmt: skip
        self._built.append(made)
        return made

    def _read_literal(self, is_array: bool, dtype: str, shape: list, data: bytes) -> Any:
        found = self._read_array(dtype, shape, data)
        return found if is_array else found[()]

    def _read_equation(self, primitive, params, effs, ctx, stack, arguments, results) -> Any:
        operation = self.decode(primitive)
        given = {str(k): self.decode(v) for k, v in params}
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
        context = core.JaxprEqnContext._create(*self._read_items(ctx))
        return core.JaxprEqn(
            arguments, results, operation, given, frozenset(self.decode(effs)), where, context
        )


_CONTEXT = [n for n in core.JaxprEqnContext.__slots__ if n not in ("configs", "__weakref__")]


def _bounds(index: Any, shape: Any) -> tuple:
    return tuple(
        (i.start or 0, n if i.stop is None else i.stop) for i, n in zip(index, shape, strict=True)
    )


def _is_key_dtype(x: Any) -> bool:
    return str(x).startswith("key<") and hasattr(x, "type")


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


class Derivative:
    """The derivative that a jaxpr's `custom_jvp` or `custom_vjp` equation has, as functions that can be traced."""

    def __init__(self, eqn: Any):
        self.eqn = eqn
        self.tree: Any = None

    def call(self, *args: Any) -> list[Any]:
        """The equation's own results."""
        params = self.eqn.primitive.get_bind_params(self.eqn.params)
        return list(self.eqn.primitive.bind(*args, **params))

    def jvp(self, primals: list, tangents: list) -> tuple[list, list]:
        """The results and their tangents."""
        return jax.jvp(lambda *xs: self.call(*xs), tuple(primals), tuple(tangents))

    def forward(self, *args: Any) -> tuple[list, list]:
        """The results, and the residuals of the pullback."""
        out, pullback = jax.vjp(lambda *xs: self.call(*xs), *args)
        residuals, self.tree = jax.tree_util.tree_flatten(pullback)
        return out, residuals

    def backward(self, residuals: list, cotangents: list) -> list:
        """The cotangents of the arguments."""
        return list(jax.tree_util.tree_unflatten(self.tree, residuals)(cotangents))


def custom_params(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a `custom_jvp` or `custom_vjp` equation whose derivative is asked of the other side."""
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
    jaxpr = jax.make_jaxpr(made)(*inner.in_avals)
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn.params


# Objects of which there is one, by the name of its class; Pallas compares them by identity.
_SINGLE = {"DynamicGridDim": "dynamic_grid_dim", "NoBlockSpec": "no_block_spec"}


def _read_single(codec: Codec, name: str) -> Any:
    from jax._src.pallas import core as pallas

    return getattr(pallas, _SINGLE[name])


Reader = Callable[..., Any]
_WRITERS: dict[type, Callable[[Codec, Any], Any]] = {
    frozenset: lambda c, x: ["frozenset", [c.encode(item) for item in sorted(x, key=repr)]],
    complex: lambda c, x: ["complex", x.real, x.imag],
    fractions.Fraction: lambda c, x: ["fraction", hex(x.numerator), hex(x.denominator)],
    slice: lambda c, x: ["slice", c.encode(x.start), c.encode(x.stop), c.encode(x.step)],
    range: lambda c, x: ["range", x.start, x.stop, x.step],
    type(...): lambda c, x: ["..."],
    type(NotImplemented): lambda c, x: ["NotImplemented"],
    core.Jaxpr: Codec._jaxpr,
    core.ClosedJaxpr: Codec._closed,
    core.ShapedArray: Codec._shaped,
    jax.ShapeDtypeStruct: lambda c, x: [
        "struct",
        list(x.shape),
        dtype_name(x.dtype),
        c.encode(x.sharding),
        bool(x.weak_type),
    ],
    UnspecifiedValue: lambda c, x: ["unspecified"],
    types.SimpleNamespace: lambda c, x: ["simple", c.encode(tuple(vars(x).items()))],
    types.MappingProxyType: lambda c, x: c.encode(dict(x)),
    collections.OrderedDict: lambda c, x: c.encode(dict(x)),
    collections.Counter: lambda c, x: c.encode(dict(x)),
    collections.defaultdict: lambda c, x: c.encode(dict(x)),
}
_BASES: tuple[tuple[Any, Callable[[Codec, Any], Any]], ...] = (
    (NamedSharding, Codec._sharding),
    (SingleDeviceSharding, lambda c, x: ["one", c.encode(next(iter(x.device_set)))]),
    (meshes.BaseMesh, Codec._mesh),
    (jax.P, Codec._spec),
    (AbstractRef, Codec._ref),
    (core.AbstractToken, lambda c, x: ["token"]),
    (
        ad_checkpoint.SaveOnlyTheseNames,
        lambda c, x: ["policy", "save_only_these_names", sorted(x.saveable_names)],
    ),
)
_POLICIES = ("save_only_these_names", "save_any_names_but_these")
_READERS: dict[str, Reader] = {
    "int": lambda c, text: int(text, 16),
    "tuple": lambda c, items: tuple(c._read_items(items)),
    "frozenset": lambda c, items: frozenset(c._read_items(items)),
    "complex": lambda c, real, imag: complex(real, imag),
    "fraction": lambda c, a, b: fractions.Fraction(int(a, 16), int(b, 16)),
    "slice": lambda c, a, b, s: slice(c.decode(a), c.decode(b), c.decode(s)),
    "range": lambda c, a, b, s: range(a, b, s),
    "...": lambda c: ...,
    "NotImplemented": lambda c: NotImplemented,
    "same": lambda c, number: c.end.known(number),
    "new": Codec._read_new,
    "scalar": lambda c, dtype, data: np.frombuffer(data, dtype_of(dtype))[0],
    "yours": lambda c, number: c.end.mine(number),
    "lent": lambda c, *rest: c.end.borrow(*rest),
    "node": lambda c, *parts: c.end.make_node(*c._read_items(list(parts))),
    "enum": Codec._read_enum,
    "dtype": lambda c, name: dtype_of(name),
    "class": Codec._read_class,
    "function": Codec._read_function,
    "module": Codec._read_module,
    "path": lambda c, text: pathlib.Path(text),
    "tree": Codec._read_tree,
    "simple": lambda c, fields: types.SimpleNamespace(**dict(c.decode(fields))),
    "single": _read_single,
    "named": Codec._read_named,
    "data": Codec._read_data,
    "model": Codec._read_model,
    "tracer": Codec._read_tracer,
    "primitive": Codec._read_primitive,
    "device": Codec._read_device,
    "mesh": Codec._read_mesh,
    "one": lambda c, device: SingleDeviceSharding(c.decode(device)),
    "sharding": Codec._read_sharding,
    "spec": Codec._read_spec,
    "shaped": Codec._read_shaped,
    "ref": Codec._read_ref,
    "token": lambda c: core.abstract_token,
    "policy": lambda c, name, names: getattr(
        jax.checkpoint_policies, _POLICIES[_POLICIES.index(name)]
    )(*map(str, names)),
    "closed": Codec._read_closed,
    "jaxpr": Codec._read_jaxpr,
    "again": Codec._read_again,
    "literal": Codec._read_literal,
    "struct": lambda c, shape, dtype, sharding, weak: jax.ShapeDtypeStruct(
        tuple(shape), dtype_of(dtype), sharding=c.decode(sharding), weak_type=weak
    ),
    "unspecified": lambda c: UNSPECIFIED,
}
