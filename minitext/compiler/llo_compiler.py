"""Compiling kernels for a TPU that this machine need not have, with libtpu dumping their machine code.

A function is lowered in this process and compiled in another, because libtpu reads its flags only when it is loaded.
The lowered program is passed between them, so a kernel defined in a notebook cell compiles like any other.

Chapters: 16.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import xla_client

from minitext.compiler.targets import Target, topology_devices
from minitext.errors import DoesNotFit, UserError
from minitext.files import shorten
from minitext.hardware import CHIPS, Chip
from minitext.sharding.mesh import abstract_mesh

SECONDS = 300  # the compiler's time limit for one function


def tpu(chip: str) -> Chip:
    """Returns the TPU of a name.

    Raises:
      UserError: if minitext knows none.
    """
    row = CHIPS.get(chip)
    if row is None or row.platform != "tpu":
        known = ", ".join(name for name, row in CHIPS.items() if row.platform == "tpu")
        raise UserError(
            f"chip={shorten(chip)} is not a TPU that minitext knows: choose among {known}"
        )
    return row


def lower(fn: Callable, *args: Any, chip: str) -> bytes:
    """Lowers a function for one chip as `jax.jit` would there, without the chip or its compiler.

    The function is traced on a mesh with one device of that kind, which `minitext.kernels` and Pallas see.
    The compiler may choose the layout of the results. Otherwise it adds a copy to the usual layout after a kernel like
    attention's; while libtpu dumps code, compiling that copy takes ten times as long as compiling the kernel.

    Returns:
      The StableHLO module as MLIR bytecode; a Pallas kernel is a custom call that holds Mosaic's program.

    Raises:
      UserError: if the chip is not a TPU of the table.
    """
    row = tpu(chip)
    with jax.sharding.use_abstract_mesh(abstract_mesh(chip=row)):
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        free = Format(Layout.AUTO)
        lowered = jax.jit(fn, out_shardings=free).trace(*structs).lower(lowering_platforms=("tpu",))
    return mlir.module_to_bytecode(lowered.compiler_ir())  # pyright: ignore[reportArgumentType]


def write_dump(module: bytes, chip: str, folder: Path) -> None:
    """Compiles a module in a process whose libtpu dumps the final code into a folder.

    Raises:
      DoesNotFit: if a kernel needs more vector memory than it may use.
      UserError: if the compiler refuses the program for another reason, crashes or takes too long.
    """
    source = folder / "module.mlir"
    source.write_bytes(module)
    # These labels select the final code; a whole dump is twenty times as large.
    labels = "--xla_jf_dump_llo_pass_label_regex=(final|pre-delay).*"
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {labels}"
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "minitext.compiler.llo_compiler", chip, str(source)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the compiler took more than {SECONDS} s for {chip}") from error
    if done.returncode == 0:
        return
    for refusal in (UserError, DoesNotFit):
        if done.returncode == refusal.exit_code:
            raise refusal(done.stderr.strip().splitlines()[-1])
    raise UserError(f"{chip}: {why_it_stopped(done)}")


def why_it_stopped(done: subprocess.CompletedProcess) -> str:
    """Returns in one line how a process of the compiler crashed."""
    if done.returncode == -signal.SIGKILL:
        return "the compiler was killed, as a system does that runs out of memory"
    said = done.stderr.strip().splitlines() or ["nothing"]
    crash = next((line for line in said if re.match(r"F\d{4} |.*Check failed", line)), said[-1])
    return f"the compiler stopped with {done.returncode}: {crash[:300]}"


def _compile_file(chip: str, file: str) -> None:
    """Compiles an MLIR module for one device of a chip; this is all that the other process does."""
    row = CHIPS[chip]
    device = topology_devices(Target(row, (1,) * (row.links // 2)))[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(Path(file).read_bytes())
    options = xla_client.CompileOptions()
    options.executable_build_options.use_shardy_partitioner = True
    try:
        device.client.compile(module, xla_client.DeviceList((device,)), options)
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(str(error), chip) from None


def _refusal(message: str, chip: str) -> UserError:
    """Condenses the compiler's message into one line."""
    vmem = r"space vmem.*?%([\w\-]+).*?Scoped allocation with size (\S+) and limit (\S+)"
    if found := re.search(vmem, message, re.S):
        return DoesNotFit(
            f"{found[1]} needs {found[2]}iB of vector memory and may use {found[3]}iB on {chip}: choose smaller "
            "blocks, or raise vmem_limit_bytes in pltpu.CompilerParams"
        )
    lines = [re.sub(r"^[A-Z_]+: ", "", line.strip()) for line in message.splitlines()]
    reason = next((line for line in lines if line and not re.fullmatch(r"E\d+: \w+:", line)), "")
    return UserError(f"the compiler for {chip} refuses the program: {reason[:400]}")


if __name__ == "__main__":
    try:
        _compile_file(*sys.argv[1:])
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
