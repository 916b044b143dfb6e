"""Loads the programs and weights in a folder with JAX alone."""

import functools
import hashlib
import json
from pathlib import Path

import jax
import numpy as np


class Refused(Exception):
    """Why a folder isn't loaded, in one line."""


def load(folder):
    """Checks every byte; returns the manifest, and functions by name, from a dict of arrays to a dict of arrays."""
    try:
        said = _manifest(folder := Path(folder))
        weights = _weights(folder / said["weights"]["file"], said["weights"]["arrays"])
        return said, {n: _function(folder, f, weights) for n, f in said["functions"].items()}
    except Exception as error:  # of any kind: files in three formats are read here
        reason = f"{folder}: {type(error).__name__}: {error}".replace("\n", " ")[:300]
        raise error if type(error) is Refused else Refused(reason) from error


def _need(fact, otherwise):
    if not fact:
        raise Refused(otherwise)


def _manifest(folder):
    """Returns the manifest, if it and every file that it lists are as they were written."""
    _need((path := folder / "manifest.json").is_file(), f"{path} is missing")
    with open(path, "rb") as file:
        said = json.loads(text := file.read(1 << 26))
    _need(said["format"] == "minitext-artefact 1", f"{folder} has the format {said['format']!r}")
    digest = hashlib.sha256(text.replace(said["sha256"].encode(), b"")).hexdigest()
    _need(digest == said["sha256"], f"{folder}/manifest.json was changed")
    used = [said["weights"], *said["functions"].values()]
    for name in [*said["files"], *(part["file"] for part in used)]:
        _need(name == (path := folder / name).name and path.is_file(), f"{path} is missing")
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _need(digest == said["files"][name]["sha256"], f"{path} was changed or cut short")
    return said


def _weights(path, arrays):
    """Returns the arrays of a safetensors file: its header's length in 8 bytes, the header, the numbers."""
    data, weights = np.memmap(path, np.uint8, "r"), {}
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    for name, array in arrays.items():
        _need(name in header, f"{path} lacks the weight {name}")
        entry = header[name] | {"dtype": array["stored"], "shape": array["shape"]}
        _need(entry == header[name], f"{path} has {name} as {header[name]}, not as {entry}")
        numbers = data[start:][slice(*header[name]["data_offsets"])].view(array["dtype"])
        weights[name] = jax.numpy.array(numbers.reshape(array["shape"]))
    return weights


def _function(folder, said, weights):
    """Returns a partial of program and weights; an output with an input's name (a cache) takes the input's memory."""
    program = jax.export.deserialize(bytearray((path := folder / said["file"]).read_bytes()))
    here = jax.export.default_export_platform()
    _need(here in program.platforms, f"{path} is for {program.platforms}, and this is {here}")
    (wanted, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    for name in {**wanted, **weights}:
        types = [(x[name].shape, x[name].dtype) for x in (wanted, weights) if name in x]
        _need(types == types[:1] * 2, f"{path} and the weights differ in {name}: {types}")
    kept = said["inputs"].keys() & said["outputs"].keys()
    run = jax.jit(lambda ws, /, **inputs: program.call(ws, inputs), donate_argnames=kept)
    return functools.partial(lambda run, ws, inputs: run(ws, **inputs), run, weights)
