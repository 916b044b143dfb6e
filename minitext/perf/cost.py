"""What a function costs: FLOPs and bytes of every operation, counted in its jaxpr.

A scan's body counts once per iteration and a Pallas kernel's once per grid point; the compiler's own `cost_analysis`
counts each once. Bytes depend on what the compiler fuses, which a jaxpr does not show. This model is the simplest that
predicts well: an elementwise result is written only if something needs it as an array, because it enters a product, is
returned, or is used twice and is no larger than its inputs; everything else is recomputed where it is used.

Chapters: 3.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from minitext.compiler.hlo import show_type

PARTS: tuple[str, ...] = ("forward", "backward", "optimizer")

# The result is the operand under another shape or name; a barrier's must be an array.
_BARRIER = "optimization_barrier"
_ALIAS = {
    "reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "reshard", "mesh_cast", "pvary",
    "name", "stop_gradient", _BARRIER,
}  # fmt: skip
# Elements are moved or created: no arithmetic.
_MOVES = {
    "broadcast_in_dim", "transpose", "convert_element_type", "iota", "rev", "concatenate", "pad", "slice",
    "dynamic_slice", "select_n", "bitcast_convert_type", "split", "stack", "unstack",
}  # fmt: skip
_PARTIAL_READ = {"slice", "dynamic_slice", "split", "unstack"}
_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "cos", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", "xor",
    "random_wrap", "random_unwrap", "reduce_precision",
}  # fmt: skip
# The input is fused into these; other operations need it as an array.
_FUSES_INPUT = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
    "reduce_xor", "dynamic_update_slice",
}  # fmt: skip
_PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general"}
_INLINED = {"jit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


@dataclass(frozen=True)
class Operation:
    """One operation, or a chain of elementwise ones, assumed to be fused.

    Attributes:
      name: the primitive, such as `dot_general`; the last one of a fused chain.
      result: type of the result, such as `f32[2048,384]`.
      where: JAX's name stack, such as `transpose(jvp(blocks))`.
      dtype: type of the operands, which decides a product's peak.
      flops: floating-point operations of one run; an elementwise operation has one per element.
      bytes: bytes read and written by one run.
      runs: how often it runs in one call of the function.
    """

    name: str
    result: str
    where: str
    dtype: str
    flops: float
    bytes: float
    runs: float = 1

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(self.bytes, 1.0)

    @property
    def is_product(self) -> bool:
        """Whether the matrix unit computes it."""
        return self.name in _PRODUCTS

    @property
    def part(self) -> str:
        """The part of a train step: `forward`, `backward` (with recomputation) or `optimizer` (the rest)."""
        if "transpose(" in self.where:
            return "backward"
        return "forward" if "jvp(" in self.where else "optimizer"


def count(fn: Callable, *args: Any) -> list[Operation]:
    """Counts the operations of a function.

    Args:
      fn: a function of arrays, jitted or not; differentiate it first to count its gradient too.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      Its operations in order; on a mesh, those of all devices together, without collectives. A loop whose trip count
      tracing does not know (`while`) counts once.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return list(_operations(closed.jaxpr, "", 1.0))


@dataclass(eq=False)
class _Value:
    """An array of a jaxpr.

    Attributes:
      aval: its shape and type.
      uses: how many needed operations use it, directly or through aliases.
      array: whether it must exist in memory.
      reads: what is read to compute it: itself once it exists, before that the inputs of its chain.
      flops: operations of the chain so far.
    """

    aval: Any
    alias: "_Value | None" = None
    uses: int = 0
    array: bool = False
    live: bool = False
    reads: dict["_Value", float] = field(default_factory=dict)
    flops: float = 0.0

    @property
    def root(self) -> "_Value":
        return self if self.alias is None else self.alias.root

    @property
    def bytes(self) -> float:
        shape, dtype = getattr(self.aval, "shape", ()), getattr(self.aval, "dtype", None)
        return float(math.prod(shape) * getattr(dtype, "itemsize", 0))

    def store(self) -> None:
        """Makes it an array in memory."""
        self.reads, self.flops = {self: self.bytes}, 0.0


@dataclass(eq=False)
class _Node:
    eqn: Any
    where: str
    inputs: list[_Value]
    outputs: list[_Value]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def fuses(self) -> bool:
        return self.name in _ELEMENTWISE or self.name in _MOVES

    @property
    def needed(self) -> bool:
        """Whether something uses its results, or it writes to a kernel's memory."""
        return bool(self.eqn.effects) or any(value.live for value in self.outputs)


def _operations(jaxpr: Any, where: str, runs: float) -> Iterator[Operation]:
    """Yields the operations of a jaxpr whose arguments and results are arrays in memory."""
    nodes: list[_Node] = []
    for value in _inline(jaxpr, _arrays((*jaxpr.constvars, *jaxpr.invars)), where, nodes):
        value.live = True
        value.root.array = True
    _mark(nodes)
    for node in nodes:
        if node.needed:
            yield from _cost(node, runs)


def _arrays(variables: Iterable[Any]) -> dict[Any, _Value]:
    values = {var: _Value(var.aval) for var in variables}
    for value in values.values():
        value.store()
    return values


def _inline(jaxpr: Any, env: dict[Any, _Value], where: str, nodes: list[_Node]) -> list[_Value]:
    """Appends a jaxpr's equations to `nodes`, with those of called functions inlined."""

    def read(atom: Any) -> _Value:  # a literal is part of the program
        return _Value(atom.aval) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        stack = "/".join(part for part in (where, str(eqn.source_info.name_stack)) if part)
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _INLINED:
            called = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            called = getattr(called, "jaxpr", called)
            scope = dict(zip(called.invars, inputs, strict=True)) | _arrays(called.constvars)
            results = _inline(called, scope, stack, nodes)
        else:
            aliases = inputs if eqn.primitive.name in _ALIAS else [None] * len(eqn.outvars)
            results = [_Value(v.aval, a) for v, a in zip(eqn.outvars, aliases, strict=True)]
            nodes.append(_Node(eqn, stack, inputs, results))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _mark(nodes: list[_Node]) -> None:
    """Finds which values are needed, how often each is used, and which must be arrays."""
    for node in reversed(nodes):
        if not node.needed:
            continue
        as_array = node.name == _BARRIER or not (node.fuses or node.name in _FUSES_INPUT | _ALIAS)
        for value in node.inputs:
            value.live = value.root.live = True
            value.root.array |= as_array
            value.root.uses += node.name not in _ALIAS


def _cost(node: _Node, runs: float) -> Iterator[Operation]:
    """Yields a node's operations, and sets its results' `reads`."""
    if node.name in _ALIAS:
        return
    reads: dict[_Value, float] = {}
    for value in node.inputs:
        for source, size in value.root.reads.items():
            reads[source] = max(size, reads.get(source, 0.0))
    flops = sum(value.root.flops for value in node.inputs)
    if node.fuses:
        for result in node.outputs:
            yield from _fuse(node, result, reads, flops, runs)
        return
    for result in node.outputs:
        result.store()
    if inner := list(_inner(node, runs)):
        yield from inner
    elif node.outputs:
        size = _traffic(node, reads)
        yield _operation(node, node.outputs[0], flops + _flops(node), size, runs)


def _fuse(
    node: _Node, result: _Value, reads: dict[_Value, float], flops: float, runs: float
) -> Iterator[Operation]:
    """Adds an elementwise operation to the chain that leads to it, and ends the chain where it must be stored."""
    size = result.bytes
    if node.name in _PARTIAL_READ:
        reads = {source: min(amount, size) for source, amount in reads.items()}
    if node.name in _ELEMENTWISE:
        flops += math.prod(result.aval.shape)
    total = sum(reads.values())
    if result.array or (result.uses > 1 and flops and total >= size):
        yield _operation(node, result, flops, total + size, runs)
        result.store()
    else:
        result.reads, result.flops = reads, flops


def _inner(node: _Node, runs: float) -> Iterator[Operation]:
    """Yields the operations inside a loop, a conditional, a `shard_map` or a kernel."""
    params, where = node.eqn.params, node.where
    match node.name:
        case "scan":
            yield from _operations(params["jaxpr"].jaxpr, where, runs * params["length"])
        case "while":
            yield from _operations(params["body_jaxpr"].jaxpr, where, runs)
        case "cond":
            branches = [list(_operations(b.jaxpr, where, runs)) for b in params["branches"]]
            yield from max(branches, key=lambda ops: sum(op.flops + op.bytes for op in ops))
        case "shard_map":
            ways = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
            yield from _operations(params["jaxpr"], where, runs * ways)
        case "pallas_call":
            yield _kernel(node, runs)


def _kernel(node: _Node, runs: float) -> Operation:
    """Returns a Pallas kernel as one operation: its body at each grid point, and its blocks' bytes.

    A block is fetched again at each grid point, unless it is the whole array. Of a grid whose size hangs on the data,
    as that of experts' products, the kernel's own estimate is taken.
    """
    mapping = node.eqn.params["grid_mapping"]
    body = list(_operations(node.eqn.params["jaxpr"], node.where, 1.0))
    products = [op for op in body if op.is_product]
    estimate = node.eqn.params.get("cost_estimate")
    if estimate is not None and not all(isinstance(n, int) for n in mapping.grid):
        size = float(estimate.bytes_accessed)
        kernel = _operation(node, node.outputs[0], float(estimate.flops), size, runs)
        return (
            replace(kernel, name=products[0].name, dtype=products[0].dtype) if products else kernel
        )
    points = math.prod(int(n) for n in mapping.grid)
    size = 0.0
    for block in mapping.block_mappings:
        sizes = (getattr(n, "block_size", n) for n in block.block_shape)
        elements = math.prod(n if isinstance(n, int) else 1 for n in sizes)  # 1: squeezed
        fetched = 1 if elements >= math.prod(block.array_aval.shape) else points
        size += fetched * elements * block.array_aval.dtype.itemsize
    flops = points * sum(op.runs * op.flops for op in products or body)
    kernel = _operation(node, node.outputs[0], flops, size, runs)
    return replace(kernel, name=products[0].name, dtype=products[0].dtype) if products else kernel


def _flops(node: _Node) -> float:
    result = math.prod(node.outputs[0].aval.shape)
    shapes = [value.aval.shape for value in node.inputs]
    match node.name:
        case "dot_general":
            (contracted, _), _ = node.eqn.params["dimension_numbers"]
            return 2.0 * result * math.prod(shapes[0][axis] for axis in contracted)
        case "ragged_dot" | "ragged_dot_general":  # each row of the left meets one group's matrix
            numbers = node.eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batch) = numbers.dot_dimension_numbers
            met = {*contracted, *batch, *numbers.rhs_group_dimensions}
            columns = math.prod(n for axis, n in enumerate(shapes[1]) if axis not in met)
            return 2.0 * math.prod(shapes[0]) * columns
        case name if name in _FUSES_INPUT and name != "dynamic_update_slice":
            return float(math.prod(shapes[0]))
        case "scatter-add" | "scatter_add":
            return float(math.prod(shapes[2]))
    return 0.0


def _traffic(node: _Node, reads: dict[_Value, float]) -> float:
    """Returns the bytes that an operation reads and writes."""
    written = sum(value.bytes for value in node.outputs)
    match node.name:
        case "gather":  # only the rows it picks
            return sum(value.bytes for value in node.inputs[1:]) + 2 * written
        case "dynamic_update_slice":  # in place
            return 2 * node.inputs[1].bytes
        case name if name.startswith("scatter"):
            # The array is written, then rows are read, changed and written.
            return written + 3 * node.inputs[2].bytes + node.inputs[1].bytes
    return sum(reads.values()) + written


def _operation(node: _Node, result: _Value, flops: float, size: float, runs: float) -> Operation:
    operand = node.inputs[0].aval if node.inputs else result.aval
    dtype = getattr(getattr(operand, "dtype", None), "name", "float32")
    return Operation(node.name, show_type(result.aval), node.where, dtype, flops, size, runs)
