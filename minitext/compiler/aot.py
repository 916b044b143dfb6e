"""Ahead-of-time compilation: any program, compiled for named chips on a machine without them.

The real TPU compiler (libtpu) or GPU compiler (JAX's CUDA plugin) runs on this machine's CPU. `compile_step` reports
whether the program fits, what it keeps in memory and which collectives it runs.

Chapters: 15, 16, 22.
"""

import contextlib
import inspect
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from minitext import terminal
from minitext.compiler import hlo
from minitext.compiler.buffers import (
    Buffer,
    OutOfMemory,
    allocated,
    argument_names,
    op_names,
    parse_out_of_memory,
    read_buffers,
)
from minitext.compiler.options import refusals_named
from minitext.compiler.report import LISTED, Report
from minitext.compiler.targets import parse_target, topology_devices
from minitext.errors import UserError
from minitext.hardware import CHIPS, find_chip
from minitext.sharding.mesh import make_mesh

# Called with the lowered and the compiled program and the folder of the compiler's dump, which is removed afterwards.
Keep = Callable[[jax.stages.Lowered, jax.stages.Compiled, str], None]


def compile_step(
    fn: Callable, args: tuple, mesh: Mesh, *, target: str = "", keep: Keep | None = None
) -> Report:
    """Compiles a function for the devices of a mesh and reports what the compiler says.

    Args:
      fn: a jitted function, or one to jit.
      args: its arguments, ShapeDtypeStructs with NamedShardings on `mesh`.
      mesh: of ahead-of-time devices (`topology_mesh`), or of real ones.
      target: the target's name for the report; by default the kind of device.
      keep: see `Keep`; not called for a program that does not fit.

    Returns:
      The report; one with `fits=False` if the compiler says that HBM is too small.

    Raises:
      UserError: if `minitext.hardware.CHIPS` does not have the mesh's devices; if the compiler has no such option.
      JaxRuntimeError: if the compiler refuses the program for any other reason.
    """
    device = mesh.devices.flat[0]
    chip = find_chip(device)
    if chip is None:
        raise UserError(
            f"no chip in minitext.hardware.CHIPS is a {device.device_kind!r}: its memory is unknown"
        )
    target = target or device.device_kind
    start = time.perf_counter()
    with jax.set_mesh(mesh), _spinner(f"lowering for {target}"):
        lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args)
    lower_seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="minitext-aot-") as folder:
        compiled, refusal = None, None
        start = time.perf_counter()
        waiting = _spinner(f"compiling for {target}")
        with jax.set_mesh(mesh), no_cache(), waiting, refusals_named():
            try:
                compiled = lowered.compile(compiler_options=dump_to(folder))
            except jax.errors.JaxRuntimeError as error:
                refusal = parse_out_of_memory(str(error))
                if refusal is None:
                    raise
        compile_seconds = time.perf_counter() - start
        traced, module, assignment = read_dump(folder)
        if keep is not None and compiled is not None:
            keep(lowered, compiled, folder)
    links = hlo.sum_by_kind(hlo.Module(module).collectives())
    buffers = read_buffers(assignment, op_names(module), argument_names(traced))
    if not buffers:  # the compiler left no dump: use its message, and the arguments as requested
        buffers = [*(refusal.buffers if refusal else ()), *_abstract_buffers(fn, args)]
        buffers.sort(key=lambda buffer: -buffer.bytes)
    sizes: dict[str, Any] = (
        _refused_sizes(refusal, assignment, buffers) if refusal else compiled_sizes(compiled)
    )
    available = refusal.available if refusal else chip.usable_bytes
    return Report(
        target=target,
        devices=mesh.size,
        mesh={name: size for name, size in mesh.shape.items() if size > 1},
        # The TPU compiler decides; the GPU compiler accepts a program of any size.
        fits=refusal is None and (chip.platform == "tpu" or sizes["total_bytes"] <= available),
        hbm_bytes=chip.hbm_bytes // chip.devices,
        available_bytes=available,
        **sizes,
        vector_bytes=allocated(assignment)["vector"],
        arguments=_by_part(buffers),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        collectives={kind: (count, size) for kind, (count, size, _) in links.items()},
        sent={kind: sent for kind, (_, _, sent) in links.items()},
        largest=tuple(buffers[:LISTED]),
        advice=(),
        changed={},
    )


def compiles_for(chip: str, fn: Callable, *args: Any) -> str | None:
    """Compiles a function, with its kernels, for one chip that this machine need not have.

    Args:
      chip: its name in `minitext.hardware.CHIPS`, such as `v5e`.
      fn: a function of arrays, jitted or not.
      args: arrays, or ShapeDtypeStructs in their place.

    Returns:
      None, or the reason in one line why Pallas, Mosaic or XLA refuses the function.

    Raises:
      UserError: for an unknown chip, or a compiler that is not installed.
      Exception: what `fn` raises when JAX traces it.
    """
    from jax._src.pallas.mosaic.error_handling import MosaicError

    known = chip in CHIPS and CHIPS[chip].platform == "tpu"
    target = parse_target(f"{chip}:{'x'.join('1' * (CHIPS[chip].links // 2 if known else 3))}")
    mesh = make_mesh(None, topology_devices(target)[:1])  # a chip of tpu7x is two devices
    replicated = jax.NamedSharding(mesh, jax.P())
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in args]
    refusals = (MosaicError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError)
    with jax.set_mesh(mesh), no_cache():
        traced = jax.jit(fn).trace(*specs)
        try:
            traced.lower().compile()
        except refusals as error:
            return _one_line(str(error))
    return None


_VMEM_REFUSALS = (
    r"Scoped allocation with size (\S+) and limit (\S+) exceeded",
    r"Used (\S+) of (\S+) vmem",
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) .*space=vmem",
)


def _one_line(refusal: str) -> str:
    """Returns the compiler's reason without its boilerplate."""
    for wording in _VMEM_REFUSALS:
        if vmem := re.search(wording, refusal):
            size, limit = (f"{int(n) / 2**20:.2f}M" if n.isdigit() else n for n in vmem.groups())
            return f"its arrays or blocks take {size} of VMEM, and the limit is {limit}"
    text = re.sub(r"^.*?(HLO name `.*?`|Error details): ", "", refusal, flags=re.S)
    text = re.sub(r"Blocked\(block_size=(\d+)\)", r"\1", text.strip().split("\n")[0])
    text = re.sub(r", and index_map .*| at \S+:\d+|\s*Please (file|cast).*", "", text)
    return text.removeprefix("The Pallas TPU lowering currently requires that ").rstrip(" .")


def dump_to(folder: str) -> dict[str, Any]:
    """Returns the compiler options with which XLA writes what `read_dump` reads."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def read_dump(folder: str) -> tuple[str, str, str]:
    """Returns texts from XLA's dump: the module before and after optimizations, and its buffer assignment.

    `compiled.as_text()` would fail on some v5p programs (RET_CHECK async-update), and a program that does not fit has
    none.
    """
    return (
        read_largest(folder, "before_optimizations.txt"),
        read_largest(folder, "after_optimizations.txt"),
        read_largest(folder, "after_optimizations-buffer-assignment.txt"),
    )


def read_largest(folder: str, ending: str) -> str:
    """Returns the whole program's text from a dump, or ""; smaller files are of parts that XLA compiles separately."""
    found = sorted(Path(folder).glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return found[-1].read_text(errors="replace") if found else ""


def compiled_sizes(compiled: Any) -> dict[str, int]:
    """Returns the bytes on one device that a compiled program needs, as `Report` names them."""
    stats = compiled.memory_analysis()
    own_output = stats.output_size_in_bytes - stats.alias_size_in_bytes
    code = stats.generated_code_size_in_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "code_bytes": code,
        "total_bytes": stats.argument_size_in_bytes + own_output + stats.temp_size_in_bytes + code,
    }


def _refused_sizes(refusal: OutOfMemory, assignment: str, buffers: list[Buffer]) -> dict[str, int]:
    """Splits the total that the compiler names in its refusal according to its buffer assignment."""
    planned = allocated(assignment)
    argument = planned["argument"] or sum(b.bytes for b in buffers if b.kind == "argument")
    return {
        "argument_bytes": argument,
        "output_bytes": planned["alias"] + planned["output"],
        "alias_bytes": planned["alias"],
        "temp_bytes": max(0, refusal.used - argument - planned["output"]),
        "code_bytes": 0,
        "total_bytes": refusal.used,
    }


def _abstract_buffers(fn: Callable, args: tuple) -> Iterator[Buffer]:
    """Yields one buffer for each array among the arguments, without padding."""
    names = list(inspect.signature(fn).parameters)
    for (first, *path), leaf in jax.tree_util.tree_leaves_with_path(args):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        part = jax.ShapeDtypeStruct(shape, leaf.dtype)
        name = names[first.idx] + jax.tree_util.keystr(tuple(path))
        size = math.prod(shape) * leaf.dtype.itemsize
        yield Buffer(size, hlo.show_type(part), "argument", name)


def _by_part(buffers: list[Buffer]) -> dict[str, int]:
    """Sums the bytes of arguments by part, such as `state.params` or `batch`."""
    parts: dict[str, int] = {}
    for buffer in buffers:
        if buffer.kind == "argument" and (match := re.match(r"\w+(\.\w+)?", buffer.op)):
            parts[match[0]] = parts.get(match[0], 0) + buffer.bytes
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Switches off JAX's compilation cache, which writes ahead-of-time programs but can't read them."""
    from jax.experimental.compilation_cache import compilation_cache

    was = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether the cache is on
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Shows a spinner and the elapsed time on stderr."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    with terminal.bar(SpinnerColumn(), "{task.description}", TimeElapsedColumn()) as bar:
        bar.add_task(text, total=None)
        yield
