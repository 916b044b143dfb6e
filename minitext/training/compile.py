"""The train step compiled ahead of time: for chips that aren't here, and into a file that jobs run without compiling.

    minitext compile llama3-8b target=v5p:4x4x4 --save step.zip
    minitext train llama3-8b mesh.fsdp=64 train.executable=step.zip

The file is a ZIP archive of `manifest.json` and `program`, which is written by XLA itself; nothing in it is pickled
(JAX's `serialize_executable` pickles). A job that loads the file still traces the step, which takes seconds, and hands
JAX the program instead of compiling. So the program must be of exactly this step. The manifest says which step it is,
and a job that differs is refused with one line. The program runs unchecked: load only files you made.

Chapters: 22.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from minitext import files
from minitext.compiler import aot
from minitext.compiler.aot import Keep, compile_step
from minitext.compiler.options import refusals_named
from minitext.compiler.report import Report
from minitext.compiler.targets import fit_slices, parse_target, topology_mesh
from minitext.config.config import Config, flatten
from minitext.distributed import job
from minitext.errors import UserError
from minitext.sharding.mesh import factors_across
from minitext.sharding.rules import RULES
from minitext.terminal import show_bytes
from minitext.training.objective import Objective
from minitext.training.step import abstract_batch, abstract_state, make_train_step

FORMAT = 1
MANIFEST, PROGRAM = "manifest.json", "program"
SOURCES = Path(__file__).parents[1]

# Settings that the program depends on: the learning rate's schedule, for one, ends at train.steps. Meshes are compared
# by the sizes of their axes and by what crosses slices.
SECTIONS = ("model.", "sharding.", "pipeline.", "optim.", "objective.", "xla.", "mesh.dcn.")
KEYS = (
    "data.seq_len", "train.steps", "train.global_batch", "train.microbatches", "train.z_loss",
    "train.loss_chunks", "train.loss_impl", "train.on_nan",
)  # fmt: skip
# Entries of the manifest that must be equal on the machine that runs the program, and how to name them. Only the first
# difference is reported: another device has another libtpu anyway.
SAME = {
    "device_kind": "device", "minitext": "minitext", "jax": "jax", "jaxlib": "jaxlib",
    "libtpu": "libtpu", "sources": "minitext's own source files (SHA-256)",
    "devices": "number of devices", "mesh": "mesh",
}  # fmt: skip


def compile_preset(cfg: Config, target: str, keep: Keep | None = None) -> Report:
    """Compiles the train step that `minitext train` would run with this configuration.

    The state and the batch are abstract, so a model of any size compiles on any machine. The mesh is `mesh.*` over the
    target's devices, fitted to its slices by `targets.fit_slices`; `mesh.simulate` doesn't matter.

    Args:
      cfg: the configuration.
      target: such as `v5e:2x2`; see `minitext.compiler.targets.parse_target`.
      keep: see `compile_step`.

    Raises:
      UserError: for a bad target, or a mesh that fits neither the target nor the model.
    """
    parsed = parse_target(target)
    cfg, changed = fit_slices(cfg, parsed)
    mesh = topology_mesh(parsed, cfg.mesh)
    step = make_train_step(cfg, mesh)
    args = (abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
    report = compile_step(step, args, mesh, target=str(parsed), keep=keep)
    across = factors_across(cfg.mesh, dict(mesh.shape), parsed.slices)
    report = dataclasses.replace(report, slices=parsed.slices, across=across, changed=changed)
    return dataclasses.replace(report, advice=tuple(advise(report, cfg)))


def settings(cfg: Config) -> dict[str, Any]:
    """Returns the settings that the train step depends on, by dotted key."""
    flat = flatten(cfg.model_dump(mode="json"))
    return {key: flat[key] for key in flat if key.startswith(SECTIONS) or key in KEYS}


def describe(cfg: Config, mesh: Mesh) -> dict[str, Any]:
    """Returns the manifest of a step for the devices of a mesh, without the program's size and hash."""
    device, chosen = mesh.devices.flat[0], settings(cfg)
    return {
        "format": FORMAT,
        "minitext": metadata.version("minitext"),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "libtpu": metadata.version("libtpu") if device.platform == "tpu" else None,
        "sources": _sources(),
        "device_kind": device.device_kind,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "config": _sha(json.dumps(chosen, sort_keys=True).encode()),
        "settings": chosen,
    }


def save(cfg: Config, mesh: Mesh, path: str | Path) -> dict[str, Any]:
    """Compiles the train step for devices that are here, writes it, and returns the manifest.

    Raises:
      UserError: if the step can't be compiled for the mesh, or the file can't be written.
    """
    files.check_new_file("--save", path)
    step = make_train_step(cfg, mesh)
    args = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
    with jax.set_mesh(mesh), aot.no_cache(), refusals_named():
        compiled = step.lower(*args).compile()
    target = mesh.devices.flat[0].device_kind
    return _write(path, describe(cfg, mesh) | {"target": target}, compiled)


def save_for(cfg: Config, target: str, path: str | Path) -> Report:
    """Compiles the train step for a target such as `v5p:4x4x4`, and writes it if it fits.

    Returns and raises what `compile_preset` does.

    Raises:
      UserError: also if the file can't be written.
    """
    files.check_new_file("--save", path)
    parsed = parse_target(target)

    def keep(_: jax.stages.Lowered, compiled: jax.stages.Compiled, folder: str) -> None:
        fitted = fit_slices(cfg, parsed)[0]
        mesh = topology_mesh(parsed, fitted.mesh)
        _write(path, describe(fitted, mesh) | {"target": str(parsed)}, compiled)

    return compile_preset(cfg, target, keep)


def read(path: str | Path) -> tuple[dict[str, Any], bytes]:
    """Reads a saved step: the manifest and the program.

    Raises:
      UserError: if the file can't be read, isn't a saved step, or is damaged.
    """
    fix = "write it again with minitext compile ... --save FILE"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a device may have no end
            raise zipfile.BadZipFile
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            program = archive.read(PROGRAM)
        whole = manifest["sha256"] == _sha(program)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"train.executable={path} cannot be read ({reason}): {fix}") from None
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, NotImplementedError):
        raise UserError(f"train.executable={path} is not a compiled step: {fix}") from None
    if manifest.get("format") != FORMAT or not whole:
        fault = "is damaged" if not whole else f"has format {manifest.get('format')}, not {FORMAT}"
        raise UserError(f"train.executable={path} {fault}: {fix}")
    return manifest, program


def check_executable(cfg: Config, mesh: Mesh) -> bytes:
    """Returns the program in `train.executable` if it is of this step, for these devices.

    Raises:
      UserError: naming the first difference, with both values.
    """
    path = cfg.train.executable
    assert path is not None
    theirs, program = read(path)
    ours = describe(cfg, mesh)
    for name, said in SAME.items():
        if theirs.get(name) != ours[name]:
            both = f"{_short(name, theirs.get(name))}, and here it is {_short(name, ours[name])}"
            raise UserError(
                f"train.executable={path} was compiled for {said} {both}: compile it again with --save, or set "
                "train.executable=null"
            )
    if theirs.get("config") != ours["config"]:
        mine, saved = ours["settings"], theirs.get("settings", {})
        key = next((k for k in mine if saved.get(k) != mine[k]), "config")
        raise UserError(
            f"train.executable={path} was compiled with {key}={saved.get(key)}, not {mine.get(key)}: "
            "compile it again with --save, or set train.executable=null"
        )
    return program


def make_or_load_step(
    cfg: Config, mesh: Mesh, objective: Objective | None = None, reference: Any = None
) -> Callable[..., Any]:
    """Returns the train step: from `train.executable` if it names a file, else compiled on its first call.

    With `xla.options` it is compiled here, where a refused option can be named. Several processes compile it here too
    and wait for each other: the first collective of a CPU job fails when a process reaches it 30 s after another
    (Gloo's limit), and compiling may take one process that much longer.

    Args:
      cfg: the configuration.
      mesh: the devices.
      objective: what to minimise; None: cross-entropy, in nats.
      reference: `TrainState.reference` of the states that the step is for.

    Raises:
      UserError: if the file holds another step or is for other devices; if the compiler refuses one of `xla.options`.
    """
    step = make_train_step(cfg, mesh, objective)
    if cfg.train.executable is None and not job.joined() and not cfg.xla.options:
        return step
    with jax.set_mesh(mesh), refusals_named():
        state = dataclasses.replace(abstract_state(cfg, mesh), reference=reference)
        lowered = step.lower(state, abstract_batch(cfg, mesh, objective))
        if cfg.train.executable is None:
            compiled = lowered.compile()
            job.barrier("compiled the train step")
            return compiled
        program = check_executable(cfg, mesh)
        with _in_place_of_compiling(program):
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"train.executable={cfg.train.executable} does not load here ({reason}): compile it again here "
                    "with --save, or set train.executable=null"
                ) from error


@contextlib.contextmanager
def _in_place_of_compiling(program: bytes) -> Iterator[None]:
    """Makes JAX load this program instead of compiling, as its compilation cache does."""
    from jax._src import compiler

    compile_or_get_cached = compiler.compile_or_get_cached

    def load(backend, computation, devices, options, callbacks, executable_devices, *_):
        return backend.deserialize_executable(program, executable_devices, options)

    compiler.compile_or_get_cached = load
    try:
        yield
    finally:
        compiler.compile_or_get_cached = compile_or_get_cached


def _write(
    path: str | Path, manifest: dict[str, Any], compiled: jax.stages.Compiled
) -> dict[str, Any]:
    runtime: Any = compiled.runtime_executable()
    # A program for devices that aren't here serialises itself; a loaded one is serialised by its client.
    program = (
        runtime.serialize()
        if hasattr(runtime, "serialize")
        else runtime.client.serialize_executable(runtime)
    )
    manifest = manifest | {"sha256": _sha(program), "bytes": len(program)}
    try:
        with (
            files.draft(Path(path)) as new,
            zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
            archive.writestr(PROGRAM, program)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return manifest


def _sources() -> str:
    """Returns the SHA-256 of the package's source files: other code makes another step."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        found.update(f"{path.relative_to(SOURCES).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(name: str, value: Any) -> str:
    if name == "mesh" and isinstance(value, dict):
        return " x ".join(f"{axis}={size}" for axis, size in value.items() if size != 1) or "of one"
    return str(value)[:12] if name == "sources" else str(value)


def advise(report: Report, cfg: Config) -> Iterator[str]:
    """Yields what to change, setting or target and why, for a step that doesn't fit."""
    if report.fits:
        return
    available = report.available_bytes
    state = sum(size for part, size in report.arguments.items() if part.startswith("state"))
    share = f"{show_bytes(state)} of {show_bytes(available)}"
    ways = math.prod(report.mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    if 2 * state > available:
        if (
            not RULES[cfg.sharding.rules].table["embed"]
            or report.mesh.get("data", 1) > report.slices
        ):
            yield (
                f"every replica's parameters and optimizer state take {share}: shard them further "
                f"with mesh.data={report.slices} mesh.fsdp=-1 sharding.rules=fsdp"
            )
        elif report.slices > 1:
            least = math.ceil(2 * state * report.devices / report.slices / available)
            yield (
                f"parameters and optimizer state alone take {share} although a whole slice shares "
                f"them: choose slices of {least} devices or more"
            )
        else:
            # Half of the memory for the state leaves the other half to a step's temporaries.
            least = math.ceil(2 * state * report.devices / available)
            yield (
                f"parameters and optimizer state alone take {share} although they are fully "
                f"sharded: choose a target of {least} devices or more"
            )
    if 2 * report.temp_bytes > available:
        rows = cfg.train.global_batch // cfg.train.microbatches // ways
        if cfg.model.remat != "full":
            yield (
                f"model.remat={cfg.model.remat}: model.remat=full keeps one activation a layer and "
                "recomputes the others"
            )
        if rows > 1:
            yield (
                f"a device computes {rows} rows of {cfg.data.seq_len} tokens at once: raise "
                f"train.microbatches={cfg.train.microbatches}, or lower train.global_batch="
                f"{cfg.train.global_batch}"
            )
        else:
            yield f"a device computes one row at once: lower data.seq_len={cfg.data.seq_len}"
