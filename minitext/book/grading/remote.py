"""One end of the pipe between the process that decides and the process that answers.

An `End` calls the other side's functions and serves calls of its own. What a call passes is data (`wire`); a function
or any other object is lent and stays at home. So nothing of an answer ever runs where its verdict is made.

A call whose arguments are traced is traced on the other side, and comes back as a jaxpr, which the caller evaluates on
its own tracers: the answer can stand under `jit`, `grad`, `vmap`, `scan` and `shard_map`, and it is the caller who
compiles it. A mutable object that both sides know is kept the same: each message carries what has changed.
"""

import builtins
import dataclasses
import inspect
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

from minitext.book.grading import wire
from minitext.book.grading.evaluate import Gone, Refused
from minitext.book.grading.wire import Codec, Unfit

KEPT = 32  # results whose later changes are still passed on
_CLOSED = "the answer closed its connection to the grader"
DEEPEST = 60  # calls within calls

# Methods that an object's class may have and its stand-in then has too; never `__eq__`, `__array__`, `__bool__`, ...
_METHODS = (
    "__call__",
    "__iter__",
    "__next__",
    "__len__",
    "__getitem__",
    "__contains__",
    "__enter__",
    "__exit__",
)
# What the deciding side's objects can do besides; it never asks this of the answer's.
_MORE = (
    "__float__",
    "__int__",
    "__index__",
    "__bool__",
    "__setitem__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
)
_READY_MADE = {
    name: cls for name, cls in vars(builtins).items() if isinstance(cls, type) and issubclass(cls, BaseException)
}  # fmt: skip


class Remote:
    """Stands for an object of the other process."""

    def __init__(self, end: "End", number: int, name: str):
        state = self.__dict__
        state["_end"], state["_number"] = end, number
        state["__name__"] = state["__qualname__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.startswith("_jax") or name.startswith("_tree"):
            raise AttributeError(name)
        return self._end.ask(self._number, "getattr", (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._end.ask(self._number, "setattr", (name, value), {})

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def _forward(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._end.ask(self._number, name, args, kwargs)

    method.__name__ = name
    return method


class RemoteFunction(Remote):
    """Stands for a function of the other process."""

    watched = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function there."""
        return self._end.ask(self._number, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"


class RemoteType(type):
    """Stands for a class of the other process: calling it makes an object there."""

    _end: "End"
    _number: int

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object there."""
        return cls._end.ask(cls._number, "__call__", args, kwargs)


class Node:
    """Stands for an object of a class of the other process that is registered as a pytree: its children and its rest.

    The other process makes the object again, by its own `unflatten`, whenever something is asked of it.
    """

    children: tuple = ()
    rest: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        cls: Any = type(self)
        found = cls._end.ask(cls._number, "attribute", (self, name), {})
        if not isinstance(found, BoundMethod):
            return found
        return lambda *args, **kwargs: cls._end.ask(
            cls._number, "method", (self, name, *args), kwargs
        )


@dataclasses.dataclass
class BoundMethod:
    """What is sent for an attribute that is a method."""

    name: str


class RemoteJitted(RemoteFunction):
    """Stands for a function that `jax.jit` returned; it is lowered here."""

    watched = False

    def _cache_size(self) -> int:
        return int(self._end.ask(self._number, "_cache_size", (), {}))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program as this process lowers it, with the donations and shardings of the other's `jit`."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The program as this process traces it."""
        from minitext.book.grading import tracing

        return tracing.trace_jitted(self, args, kwargs)


@dataclasses.dataclass
class _Shared:
    thing: Any
    seen: Any


class End:
    """One side of the connection.

    Args:
        connection: a connected stream socket.
        trusted: whether this side decides; then the other may only call what it was lent.
        readable: names of attributes of this side's objects that the other may read.
        line_of: the answer's line in which an exception was raised, or 0.
    """

    def __init__(
        self,
        connection: socket.socket,
        trusted: bool,
        readable: Callable[[str], bool] = lambda name: False,
        line_of: Callable[[BaseException], int] = lambda error: 0,
    ):
        self.connection = connection
        self.trusted = trusted
        self._readable, self._line_of = readable, line_of
        self._lent: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._borrowed: dict[int, Remote] = {}
        self._shared: dict[int, _Shared] = {}
        self._shared_numbers: dict[int, int] = {}
        self._next_shared = 0 if trusted else 1
        self._kept: list[list[int]] = []
        self.outer: Any = None
        self.captured: dict[int, Any] = {}
        self.tracers: list[Any] = []
        self._depth = 0
        self._classes: dict[tuple, type] = {}
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------ what is shared

    def lend(self, x: Any) -> Any:
        """A reference to an object of this side."""
        number = self._numbers.get(id(x))
        if number is None:
            number = self._numbers[id(x)] = len(self._lent)
            self._lent[number] = x
        if hasattr(x, "lower") and hasattr(x, "_cache_size"):
            kind = "jitted"
        elif isinstance(x, type) and not self.trusted:
            kind = "class"
        elif isinstance(x, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)) or (
            callable(x) and not _plain_object(x)
        ):  # fmt: skip
            kind = "function"
        else:
            kind = "object"
        name = str(getattr(x, "__name__", "") or type(x).__name__)
        methods = [m for m in self._served() if hasattr(type(x), m)] if kind == "object" else []
        return ["lent", number, kind, name, type(x).__name__, methods, _argument_names(x)]

    def borrow(
        self, number: int, kind: str, name: str, cls: str, methods: list, names: list
    ) -> Any:
        """The stand-in for an object of the other side; always the same for the same object."""
        if number not in self._borrowed:
            made: Any = {"jitted": RemoteJitted, "function": RemoteFunction}.get(kind)
            if kind == "class":
                body = {"_end": self, "_number": number, "argument_names": [str(n) for n in names]}
                self._borrowed[number] = RemoteType(str(name), (Node,), body)  # pyright: ignore
                return self._borrowed[number]
            if made is None:
                wanted = _METHODS if self.trusted else _METHODS + _MORE
                allowed = tuple(m for m in wanted if m in methods)
                key = (str(cls), allowed)
                if key not in self._classes:
                    body = {m: _forward(m) for m in allowed}
                    self._classes[key] = type(key[0], (Remote,), body)
                made = self._classes[key]
            self._borrowed[number] = made(self, number, str(name))
            self._borrowed[number].__dict__["argument_names"] = [str(n) for n in names]
        return self._borrowed[number]

    def mine(self, number: int) -> Any:
        """This side's own object, which the other side refers to.

        Raises:
            Unfit: if it was never lent.
        """
        if number not in self._lent:
            raise Unfit("a reference to nothing")
        return self._lent[number]

    def is_theirs(self, x: Any) -> bool:
        """Whether an object stands for one of the other side."""
        return isinstance(x, (Remote, RemoteType)) and x._end is self

    def node_of(self, x: Any) -> tuple[type, tuple, Any] | None:
        """Class, children and rest of an object of a class that the answer registered as a pytree, else None."""
        if isinstance(x, Node):
            return type(x), x.children, x.rest
        if self.trusted or "jax" not in sys.modules:
            return None
        from jax._src import tree_util

        entry = tree_util._registry.get(type(x))
        if entry is None or type(x).__module__.split(".")[0] in (
            "jax",
            "flax",
            "optax",
            "minitext",
        ):
            return None
        children, rest = entry.to_iter(x)
        return type(x), tuple(children), rest

    def make_node(self, cls: Any, children: tuple, rest: Any) -> Any:
        """The object of a class with these children."""
        import jax
        from jax._src import tree_util

        if not self.trusted:
            return tree_util._registry[cls].from_iter(rest, children)
        if not isinstance(cls, RemoteType):
            raise Unfit("an object of an unknown class")

        def make(rest: Any, children: Any) -> Any:
            made: Any = object.__new__(cls)
            made.children, made.rest = tuple(children), rest
            return made

        if cls not in tree_util._registry:
            kind: Any = cls
            jax.tree_util.register_pytree_node(kind, lambda x: (x.children, x.rest), make)
        return make(rest, children)

    def of_jax(self) -> Any:
        """The module that writes and reads JAX's own values; it imports JAX."""
        from minitext.book.grading import wire_jax

        return wire_jax

    def reference_of(self, x: Remote) -> int:
        """The number by which the other side knows its object."""
        return x._number

    def shared_number(self, x: Any) -> int | None:
        """The number of an object that both sides have, or None."""
        number = self._shared_numbers.get(id(x))
        return number

    array_number = shared_number

    def share(self, x: Any) -> int:
        """Gives an object a number, under which the other side will have a copy."""
        number, self._next_shared = self._next_shared, self._next_shared + 2
        self._remember(number, x)
        return number

    def take(self, number: int, x: Any) -> None:
        """Remembers the copy of an object that the other side has given a number."""
        if not isinstance(number, int) or number in self._shared or number % 2 != self.trusted:
            raise Unfit("a number twice")
        self._remember(number, x)

    def known(self, number: int) -> Any:
        """The object with this number."""
        if number not in self._shared:
            raise Unfit("a reference to nothing")
        return self._shared[number].thing

    def _remember(self, number: int, x: Any) -> None:
        self._shared[number] = _Shared(x, None)
        self._shared_numbers[id(x)] = number

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            shared = self._shared.pop(number, None)
            if shared is not None:
                self._shared_numbers.pop(id(shared.thing), None)

    def _keep(self, numbers: list[int]) -> None:
        """Results stay known to both sides for a while."""
        if numbers:
            self._kept.append(numbers)
        while len(self._kept) > KEPT:
            self._forget(self._kept.pop(0))

    def _settle(self, numbers: list[int]) -> None:
        """Notes how these objects look now, when both sides have them alike."""
        for number in numbers:
            shared = self._shared.get(number)
            if shared is not None:
                shared.seen = wire.snapshot(shared.thing)

    def _changes(self, codec: Codec) -> list:
        """What this side has changed since both had it alike; the other will have applied it."""
        found = []
        for number, shared in list(self._shared.items()):
            if shared.seen is not None and not wire.is_as(shared.thing, shared.seen):
                found.append([number, codec.content(shared.thing)])
                shared.seen = wire.snapshot(shared.thing)
        return found

    def _apply(self, codec: Codec, changes: list) -> None:
        for number, content in changes:
            codec.fill(self.known(number), content)
            self._settle([number])

    # -------------------------------------------------------------------------------- asking

    def ask(self, number: int, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Has the other side do something with one of its objects, and returns what comes of it.

        Raises:
            Gone: if the other side has ended.
        """
        with self._lock:
            return self._ask(number, what, args, kwargs)

    def _ask(self, number: int, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        codec = Codec(self, tracing=True)
        changes = self._changes(codec)
        given = [[codec.encode(a) for a in args], [[k, codec.encode(v)] for k, v in kwargs.items()]]
        avals, around = [], None
        if "jax" in sys.modules:
            from minitext.book.grading import tracing

            avals, around = tracing.encode_context(codec)
        self._settle(codec.met)
        self._send(["ask", number, what, changes, given, avals, around])
        kind, changes, *rest = self._answer()
        back = Codec(self)
        try:
            self._apply(back, changes)
            error = self._error(back, *rest) if kind == "raise" else None
            result, said = None, []
            if error is None:
                value, jaxpr, said = rest
                if jaxpr is not None:
                    from minitext.book.grading import tracing

                    back.values = tracing.evaluate(back, jaxpr, codec.tracers)
                result = back.decode(value)
        except (Unfit, LookupError, TypeError, ValueError, AttributeError) as broken:
            if not self.trusted:
                raise
            raise Gone(f"its answer can't be read: {broken}") from broken
        self._settle(back.met)
        self._forget(codec.met)
        if error is not None:
            raise error
        self._keep(back.met)
        for category, text in said:
            cls = getattr(builtins, str(category), UserWarning)
            warnings.warn(
                str(text),
                cls if isinstance(cls, type) and issubclass(cls, Warning) else UserWarning,
                stacklevel=4,
            )
        return result

    def _answer(self) -> list:
        while True:
            message = self._receive()
            if message[0] != "ask":
                return message
            self._serve(message)

    def loaded(self) -> Any:
        """The answer's function, once its file has been run.

        Raises:
            Refused: if it couldn't be.
            Gone: if the answering process ended.
        """
        kind, what = self._receive()
        if kind == "refused":
            raise Refused(str(what))
        try:
            return Codec(self).decode(what)
        except Unfit as error:
            raise Gone(f"its answer can't be read: {error}") from None

    def serve(self) -> None:
        """Serves the other side's calls until it closes the connection."""
        while True:
            self._serve(self._receive())

    def _serve(self, message: list) -> None:
        if self._depth >= DEEPEST:
            raise Gone("calls within calls without end")
        self._depth += 1
        try:
            self._send(self._reply(*message[1:]))
        finally:
            self._depth -= 1

    def _reply(
        self, number: int, what: str, changes: list, given: list, avals: list, around: Any
    ) -> list:
        taken: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                thing = self.mine(number)
                into = Codec(self)
                self._apply(into, changes)
                jaxpr = None
                if around is None:
                    args, kwargs = _arguments(into, given)
                    taken = into.met
                    self._settle(taken)
                    out = Codec(self)
                    value = out.encode(self._do(thing, what, args, kwargs))
                else:
                    from minitext.book.grading import tracing

                    def call(codec: Codec, thing: Any = thing) -> Any:
                        args, kwargs = _arguments(codec, given)
                        self._settle(codec.met)
                        return self._do(thing, what, args, kwargs)

                    call.__name__ = getattr(thing, "__name__", "answer")
                    value, jaxpr, out = tracing.trace_call(call, into, avals, around)
                    taken = into.met
            except Gone:
                raise
            except BaseException as error:
                out = Codec(self)
                reply = ["raise", self._changes(out), *self._encode_error(out, error)]
                self._settle(out.met)
                self._forget(taken)
                return reply
        said = [] if self.trusted else [[w.category.__name__, str(w.message)] for w in caught[:20]]
        changes = self._changes(out)
        self._settle(out.met)
        self._forget(taken)
        self._keep(out.met)
        return ["return", changes, value, jaxpr, said]

    def _do(self, thing: Any, what: str, args: list, kwargs: dict[str, Any]) -> Any:
        if what == "__call__":
            return thing(*args, **kwargs)
        if what == "getattr":
            (name,) = args
            if name.startswith("_") or not self._may_read(thing, name):
                raise AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}")
            return getattr(thing, name)
        if what == "attribute" and not self.trusted:
            found = getattr(*args)
            bound = isinstance(found, types.MethodType) and found.__self__ is args[0]
            return BoundMethod(args[1]) if bound else found
        if what == "method" and not self.trusted:
            return getattr(*args[:2])(*args[2:], **kwargs)
        if what == "setattr" and not self.trusted:
            setattr(thing, *args)
            return None
        if what == "setattr":
            raise AttributeError(f"your answer changes {args[0]!r} of its argument")
        if what == "_cache_size" and not self.trusted:
            return thing._cache_size()
        if what in ("jvp", "forward", "backward") and isinstance(thing, wire.Derivative):
            return getattr(thing, what)(*args)
        if what in self._served():
            return getattr(type(thing), what)(thing, *args, **kwargs)
        raise Unfit("a request of an unknown form")

    def _served(self) -> tuple[str, ...]:
        return _METHODS + _MORE if self.trusted else _METHODS

    def _may_read(self, thing: Any, name: str) -> bool:
        if isinstance(thing, wire.Derivative):
            return name in ("jvp", "forward", "backward")
        plain = not isinstance(
            thing, (types.FunctionType, types.MethodType, types.ModuleType, type)
        )
        return not self.trusted or (plain and self._readable(name))

    # -------------------------------------------------------------------------------- errors

    def _encode_error(self, codec: Codec, error: BaseException) -> list:
        origin = getattr(error, "origin", None) if isinstance(error, _FromAfar) else None
        if origin is not None:
            return [["yours", origin]]
        try:
            parts = [codec.encode(part) for part in error.args]
            wire.pack(parts)
        except Exception:
            parts = None
        cls = type(error)
        base = next(c.__name__ for c in cls.__mro__ if c.__module__ == "builtins")
        try:
            text = str(error)
        except Exception:
            text = ""
        line = self._line_of(error)
        reference = None
        if self.trusted:
            reference = codec.end.lend(error)[1]
        return [["new", cls.__name__, base, parts, text, line, reference]]

    def _error(self, codec: Codec, described: list) -> BaseException:
        if described[0] == "yours":
            found = self.mine(described[1])
            if not isinstance(found, BaseException):
                raise Unfit("an exception that is none")
            return found
        name, base, parts, text, line, reference = described[1:]
        cls: Any = _READY_MADE.get(base, Exception)
        if cls in (KeyboardInterrupt, GeneratorExit):
            cls = Exception
        if name != base:
            cls = type(str(name), (_FromAfar, cls), {"__str__": lambda self: self.text})
        else:
            cls = type(str(name), (_FromAfar, cls), {})
        try:
            error = cls(*(codec.decode(part) for part in parts)) if parts is not None else cls(text)
        except (Unfit, TypeError):
            error = cls(text)
        error.text, error.line, error.origin = str(text), int(line), reference
        return error

    # ----------------------------------------------------------------------------- the pipe

    def _send(self, message: list) -> None:
        try:
            self.connection.sendall(wire.pack(message))
        except OSError:
            raise Gone(_CLOSED) from None

    def _receive(self) -> list:
        size = int.from_bytes(self._exactly(8), "little")
        if size > wire.LARGEST:
            raise Gone(
                f"its answer is {size / 2**30:.1f} GiB, want at most {wire.LARGEST / 2**30:g} GiB"
            )
        try:
            message = wire.unpack(self._exactly(size))
        except Unfit as error:
            raise Gone(f"its answer can't be read: {error}") from None
        lengths = {"ask": (7,), "return": (5,), "raise": (3,), "loaded": (2,), "refused": (2,)}
        if (
            not isinstance(message, list)
            or not message
            or len(message) not in lengths.get(str(message[0]), ())
        ):
            raise Gone("its answer can't be read: a message of an unknown form")
        return message

    def _exactly(self, size: int) -> bytes:
        pieces, missing = [], size
        while missing:
            try:
                piece = self.connection.recv(min(missing, 2**20))
            except OSError:
                piece = b""
            if not piece:
                raise Gone(_CLOSED)
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


class _FromAfar:
    """An exception of the other process: its text, the answer's line, and its number there."""

    text = ""
    line = 0
    origin: int | None = None


def _plain_object(x: Any) -> bool:
    return not hasattr(x, "__wrapped__") and bool(getattr(x, "__dict__", None))


def _argument_names(x: Any) -> list[str]:
    try:
        return list(inspect.signature(x).parameters)[:50] if callable(x) else []
    except (TypeError, ValueError):
        return []


def _arguments(codec: Codec, given: list) -> tuple[list, dict[str, Any]]:
    args = [codec.decode(a) for a in given[0]]
    return args, {str(k): codec.decode(v) for k, v in given[1]}


def line_in(source: str) -> Callable[[BaseException], int]:
    """A function that finds the line of a file in which an exception was raised, or 0."""

    def find(error: BaseException) -> int:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if source and frame.filename == source]
        return (lines[-1] or 0) if lines else 0

    return find
