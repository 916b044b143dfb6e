"""Artefacts: folders with programs and their weights, which run without the code that made them.

A function of arrays is traced once. `jax.export` stores it as StableHLO, for several platforms at once and with symbols
for the dimensions that its callers choose, such as the batch. Weights are arguments of the functions and are stored
once, beside them. A manifest lists every file with its SHA-256 and every array with its shape and type, and all of it
is compared before anything runs.

    DIR/
      manifest.json         versions, platforms, inputs and outputs of each function, weights, files
      NAME.jax_export       a function, as `jax.export.Exported.serialize` writes it
      weights.safetensors   the arrays
      load.py               reads all of it with JAX alone: `minitext.inference.shipped.load`, which `load` calls too

Checksums find damage, not malice: whoever can change a file can change the manifest as well. An artefact is a program,
and to run one is to trust who made it, though it can do nothing but compute arrays from arrays.

JAX promises to run what was exported by a version up to six months older or three weeks newer
(https://docs.jax.dev/en/latest/export/export.html, "Compatibility guarantees"). Orbax Export has the same parts and
stores weights with TensorStore. Here they are one safetensors file, because NumPy alone can read that; reading parts of
an array from many processes, which TensorStore adds, is a checkpoint's task.

Chapters: 27.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import flatbuffers  # noqa: F401  # jax.export needs it, and would miss it only after tracing
import jax
import numpy as np

from minitext import files, hardware, terminal
from minitext.checkpoint import safetensors
from minitext.errors import UserError
from minitext.inference.shipped import load as loader

FORMAT = "minitext-artefact 1"
MANIFEST, WEIGHTS, LOADER, ENDING = "manifest.json", "weights.safetensors", "load.py", ".jax_export"
PLATFORMS = ("cpu", "cuda", "tpu")


class Function(NamedTuple):
    """A function to export.

    Attributes:
      run: maps (weights, inputs by name) to outputs by name. An output with an input's name is that input's successor,
        such as a cache: it has the same shape and type, and `load` lets it take the same memory.
      inputs: for each, its shape and type: ("b, t, 64", "int32"). Names are symbols, whose sizes callers choose.
      constraints: on the symbols, such as "s >= t".
      batch: the symbol of the rows, if each is computed independently of the others. A server may then join calls.
    """

    run: Callable[[Any, dict[str, jax.Array]], Mapping[str, jax.Array]]
    inputs: Mapping[str, tuple[str, Any]]
    constraints: Sequence[str] = ()
    batch: str | None = None


class Artefact(NamedTuple):
    """An artefact that was loaded. Its weights are in memory as long as one of its functions is.

    Attributes:
      manifest: its manifest.
      functions: by name; each maps a dict of arrays to a dict of arrays, and compiles for each new set of shapes.
        Arrays that an output succeeds can't be used again.
    """

    manifest: dict[str, Any]
    functions: dict[str, functools.partial[dict[str, jax.Array]]]


def save(
    folder: Path | str,
    functions: Mapping[str, Function],
    weights: Any,
    *,
    name: str,
    version: str = "1",
    about: Mapping[str, Any] | None = None,
    beside: Mapping[str, str] | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes an artefact, whole or not at all.

    Args:
      folder: to make; it may exist if it's empty.
      functions: by name.
      weights: a pytree of arrays, which are written one by one.
      name: of the model.
      version: of the model.
      about: further entries of the manifest, as JSON.
      beside: further files, name -> text.
      platforms: as `jax.export` calls them. Kernels of a platform's own can't be in a program for several, so
        `minitext.kernels` takes the implementations in XLA.

    Raises:
      UserError: if the folder can't be written or isn't empty, a function can't be traced with its symbols, or a weight
        has a type that safetensors or JAX don't have.
    """
    target = Path(files.local_path(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists: name a folder that does not, or is empty")
    arrays, treedef = _by_name(weights)
    stored = {name: _stored(name, x) for name, x in arrays.items()}
    texts = {LOADER: Path(loader.__file__).read_text(encoding="utf-8"), **(beside or {})}
    _check_names([*texts, WEIGHTS, MANIFEST, *(f"{title}{ENDING}" for title in functions)])
    try:
        with files.new_folder(target) as new:
            programs = {}
            with terminal.of_slow_work(len(functions), "tracing") as advance:
                for number, (title, function) in enumerate(functions.items()):
                    program = _trace(title, function, arrays, treedef, platforms)
                    (new / f"{title}{ENDING}").write_bytes(program.serialize())
                    programs[title] = program
                    advance(number + 1)
            for title, text in texts.items():
                (new / title).write_text(text, encoding="utf-8")
            _write_weights(new / WEIGHTS, arrays, stored)
            manifest = {
                "format": FORMAT, "name": name, "version": version, "made_with": _versions(),
                "platforms": list(platforms),
                "functions": {
                    title: _described(title, program, functions[title].batch)
                    for title, program in programs.items()
                },
                "weights": {"file": WEIGHTS, "arrays": stored},
                **(about or {}),
                "files": {path.name: _measured(path) for path in sorted(new.iterdir())},
            }  # fmt: skip
            (new / MANIFEST).write_bytes(sealed(manifest))
    except OSError as error:
        fix = "name a folder that can be made"
        raise UserError(f"cannot write {target}: {files.explain(error, fix) or error}") from error


def load(folder: Path | str) -> Artefact:
    """Reads an artefact onto the first device, after checking every byte of it.

    Raises:
      UserError: if it's damaged, was altered, or is for another platform or version of JAX.
    """
    try:
        return Artefact(*loader.load(files.local_path(folder)))
    except loader.Refused as error:
        raise UserError(f"{error}: export it again, or copy it again") from error


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Returns a manifest as it is written: its own SHA-256, computed of the text without it, is the last entry."""
    text = _lines({**manifest, "sha256": ""}) + "\n"
    head, tail = text.rsplit('""', 1)
    return f'{head}"{hashlib.sha256(text.encode()).hexdigest()}"{tail}'.encode()


def _lines(found: Any, indent: str = "") -> str:
    """Returns JSON with a line for each entry, but of an array's shape and type one line for both."""
    if not isinstance(found, dict) or not any(isinstance(x, dict) for x in found.values()):
        return json.dumps(found)
    below = indent + " "
    lines = (f"{below}{json.dumps(name)}: {_lines(x, below)}" for name, x in found.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if Path(name).name != name or name.startswith(".") or names.count(name) > 1:
            raise UserError(f"{name!r} can't be a file of the artefact: choose another name")


def _by_name(weights: Any) -> tuple[dict[str, Any], Any]:
    """Returns the leaves of a pytree by their paths, such as blocks.0.w, and its structure."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(weights)
    name = jax.tree_util.keystr
    arrays = {name(path, simple=True, separator=".") or "weights": x for path, x in paths}
    if len(arrays) < len(paths):
        raise UserError("two weights have the same name: name them apart")
    return arrays, treedef


def _stored(name: str, x: Any) -> dict[str, Any]:
    """Returns a weight's entry in the manifest: as JAX has it, and the type as the file's header calls it."""
    dtype = np.dtype(x.dtype)
    code = {kind: code for code, kind in safetensors.DTYPES.items()}.get(dtype)
    if code is None or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(f"the weight {name} is {dtype}: convert it, for instance to float32")
    return {"shape": list(x.shape), "dtype": dtype.name, "stored": code}


def _trace(
    title: str, function: Function, arrays: dict[str, Any], treedef: Any, platforms: Sequence[str]
) -> jax.export.Exported:
    def run(weights: dict[str, jax.Array], inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return dict(function.run(jax.tree.unflatten(treedef, [weights[n] for n in arrays]), inputs))

    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    try:
        scope = jax.export.SymbolicScope(function.constraints)
        inputs = {
            name: jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)
            for name, (shape, dtype) in function.inputs.items()
        }
        with jax.sharding.use_abstract_mesh(hardware.any_platform()):
            return jax.export.export(jax.jit(run), platforms=platforms)(types, inputs)
    except (jax.errors.InconclusiveDimensionOperation, NotImplementedError, ValueError) as error:
        reason = files.shorten(str(error).split("\n")[0])
        raise UserError(f"{title} can't be exported with these symbols: {reason}") from error


def _described(title: str, program: jax.export.Exported, batch: str | None) -> dict[str, Any]:
    def types(tree: Any) -> dict[str, Any]:
        return {
            name: {"shape": [_size(d) for d in x.shape], "dtype": x.dtype.name}
            for name, x in tree.items()
        }

    (_, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    return {
        "file": f"{title}{ENDING}",
        "calling_convention": program.calling_convention_version,
        **({"batch": batch} if batch else {}),
        "inputs": types(inputs),
        "outputs": types(jax.tree.unflatten(program.out_tree, program.out_avals)),
    }


def _size(dimension: Any) -> int | str:
    return dimension if isinstance(dimension, int) else str(dimension)


def _write_weights(path: Path, arrays: dict[str, Any], stored: dict[str, Any]) -> None:
    # Numbers of more bytes first, so that all are aligned.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    described = {n: (tuple(arrays[n].shape), stored[n]["stored"]) for n in order}
    with terminal.of_slow_work(sum(x.nbytes for x in arrays.values()), "writing") as advance:

        def values():
            done = 0
            for name in order:
                yield np.asarray(arrays[name])
                advance(done := done + arrays[name].nbytes)

        safetensors.write(path, described, values(), {})


def _measured(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("minitext", "jax", "jaxlib")}
