"""How long the Pallas kernels of a compiled step take, from their machine code.

XLA's dump has the whole kernel: Mosaic's program is part of the custom call. Compiled alone, with libtpu dumping its
bundles (`minitext.compiler.llo`), it gives the cycles of one step of its grid. The program also gives the number of
steps; for causal flash attention, whose grid lists only the blocks that the mask leaves, that is about half of them.

A step's code has branches, such as one for blocks that the mask cuts and one for the others. They exclude each other,
or run in few steps: only the longest is counted, in each step. Waiting for copies is not included.

Chapters: 22.
"""

import base64
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from minitext.compiler import llo
from minitext.compiler.llo_compiler import write_dump
from minitext.compiler.schedule import KERNEL, Operation
from minitext.errors import UserError
from minitext.files import read_cache, write_cache
from minitext.hardware import CHIPS

_CONFIG = re.compile(r"backend_config=(\{.*\})\s*$")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}, (?:\w+=|$)")
_TYPES = {
    "pred": "i1", "bf16": "bf16", "f32": "f32", "f16": "f16", "f8e4m3fn": "f8E4M3FN", "f8e5m2": "f8E5M2",
} | {f"{sign}{bits}": f"{'u' * (sign == 'u')}i{bits}" for sign in "su" for bits in (4, 8, 16, 32, 64)}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(_TYPES)})\[([\d,]*)\]")
# Where the whole program keeps the kernel's arrays; alone, it may have them elsewhere.
_PLACES = "input_memory_space_colors", "output_memory_space_colors"
_JUMP = re.compile(r"\bsbr\.rel \(!?%p\w+\) target")


def kernel_seconds(schedule: Iterable[Operation], chip: str) -> dict[str, float]:
    """Returns the seconds of each Pallas kernel of a schedule, by the operation's name.

    Args:
      schedule: all operations, as `minitext.compiler.schedule.operations` yields them.
      chip: the name of a TPU in `minitext.hardware.CHIPS`.

    Raises:
      UserError: if a kernel's grid depends on values but no table, or the kernel cannot be compiled alone.
    """
    codes = {call.name: _Code(call.opcode) for call in schedule if call.queue == KERNEL}
    cycles = _step_cycles({code.key: code for code in codes.values()}, chip)
    row = CHIPS[chip]
    return {
        name: code.steps * cycles[code.key] / row.clock / row.device_cores
        for name, code in codes.items()
    }


class _Code:
    """A kernel, parsed from its custom call: arrays, Mosaic's program, its grid."""

    def __init__(self, line: str):
        config = _CONFIG.search(line)
        if config is None:
            raise UserError(
                "a kernel's custom call has no backend_config: is libtpu newer than 0.0.51?"
            )
        found: dict[str, Any] = json.loads(config[1])
        self.body: str = found["custom_call_config"]["body"]
        # With the vector memory that the kernel may use: the default can be less than it needs.
        kept = ("custom_call_config", "scoped_memory_configs")
        self.config = {name: found[name] for name in kept if name in found}
        for name in _PLACES:
            self.config["custom_call_config"].pop(name, None)
        operands = _OPERANDS.search(line)
        self.operands = _ARRAY.findall(operands[1] if operands else "")
        self.results = _ARRAY.findall(line.split(" custom-call(")[0])
        self.key = hashlib.sha256(self.module().encode()).hexdigest()[:32]
        tables = [int(dims) for kind, dims in self.operands if kind == "s32" and dims.isdigit()]
        self.steps = math.prod(_grid(self.body, max(tables, default=0)))

    def module(self) -> str:
        """Returns the StableHLO text of a program with only this kernel."""
        operands = [_tensor(*array) for array in self.operands]
        results = ", ".join(_tensor(*array) for array in self.results)
        count = len(self.results)
        names = ", ".join(f"%a{i}" for i in range(len(operands)))
        arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(operands))
        assigned = f"%r:{count}" if count > 1 else "%r"
        returned = ", ".join(f"%r#{i}" for i in range(count)) if count > 1 else "%r"
        config = json.dumps(json.dumps(self.config))
        read, written = (
            ", ".join(_layout(dims) for _, dims in arrays)
            for arrays in (self.operands, self.results)
        )
        return f"""module @kernel {{
  func.func public @main({arguments}) -> ({results}) {{
    {assigned} = stablehlo.custom_call @tpu_custom_call({names}) {{backend_config = {config},
      operand_layouts = [{read}], result_layouts = [{written}]}} : ({", ".join(operands)}) -> ({results})
    return {returned} : {results}
  }}
}}
"""


def _tensor(kind: str, dims: str) -> str:
    return f"tensor<{''.join(f'{n}x' for n in dims.split(',') if n)}{_TYPES[kind]}>"


def _layout(dims: str) -> str:
    order = range(len([n for n in dims.split(",") if n]) - 1, -1, -1)
    return f"dense<[{', '.join(map(str, order))}]> : tensor<{len(order)}xindex>"


def _grid(body: str, table: int) -> list[int]:
    """Returns the sizes of a grid, parsed from Mosaic's program; `table` replaces one that depends on values.

    Raises:
      UserError: if one depends on values, and there is no table.
    """
    # JAX has no public way to parse the program: these calls are those of its own lowering.
    from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context:
        text = str(ir.Module.parse(base64.b64decode(body)))
    found = re.search(r"iteration_bounds = array<i64(?:: ([\d, \-]+))?>", text)
    sizes = [int(n) for n in found[1].split(",")] if found and found[1] else []
    if min(sizes, default=0) < 0 and not table:
        raise UserError("a kernel's grid depends on values: its number of steps is unknown")
    return [size if size >= 0 else table for size in sizes]


def _step_cycles(codes: dict[str, _Code], chip: str) -> dict[str, float]:
    """Returns the cycles of one step of each kernel, compiled now or cached on disk."""
    # What a step takes depends on who compiles it, and on how its branches are counted here.
    versions = "-".join(f"{name}{metadata.version(name)}" for name in ("libtpu", "minitext"))
    name = f"step_cycles-{chip}-{versions}.json"
    known = read_cache(name)
    found = {key: known[key] for key in codes if isinstance(known.get(key), int | float)}
    for key in codes.keys() - found.keys():
        found[key] = _compile(codes[key], chip)
        write_cache(name, known | found)
    return found


def _compile(code: _Code, chip: str) -> float:
    with mlir.make_ir_context():
        module = mlir.module_to_bytecode(ir.Module.parse(code.module()))
    with tempfile.TemporaryDirectory(prefix="minitext-llo-") as folder:
        write_dump(module, chip, Path(folder))
        (kernel,) = llo.read_dump(Path(folder), chip)
        text = sorted(Path(folder).glob(f"*-{kernel.name}*-[0-9][0-9]-final_bundles.txt"))[-1]
        return step_cycles(kernel.step_cycles, text.read_text(errors="replace"))


def step_cycles(cycles: int, text: str) -> float:
    """Returns the cycles of one step of a kernel's grid: what runs in every step, and the longest of its branches.

    Args:
      cycles: of all the bundles of a step, including all branches.
      text: the kernel's final bundles; lines in a loop have a `>` for each, a branch begins with a jump over it and
        ends at a line with `PF`. A jump back, to a loop's start, has no such line in its loop.
    """
    lengths: list[int] = []
    inside, start, loops = 0, None, 0
    for line in re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines():
        bundle = llo.BUNDLE.match(line)
        if bundle is None:
            continue
        depth = bundle[2].count(">")
        inside += depth > 0
        if bundle[1] == "PF" and start is not None:
            if depth == loops:
                lengths.append(inside - start)
            start = None
        if depth and start is None and _JUMP.search(line):
            start, loops = inside, depth
    seldom = sum(lengths) - max(lengths, default=0)
    return cycles * (1 - seldom / inside) if inside else float(cycles)
