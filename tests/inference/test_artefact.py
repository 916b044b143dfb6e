"""Artefacts: what is written can be run with JAX alone, anything else is refused in one line."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import minitext as mt
from minitext.checkpoint import safetensors
from minitext.compiler.targets import parse_target, topology_devices
from minitext.errors import UserError
from minitext.inference import artefact, export
from minitext.inference.generate import Generator, Sampling
from minitext.inference.shipped import generate as shipped_generate
from minitext.inference.shipped import load as loader
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from tests.conftest import QUICK_FLAGS, TINY, audit_but

LENGTHS = (1, 2, 17, 63, 64, 65, 255, 300)
TOKENS = 6


def run_counter(weights, inputs):
    """A function with an output that succeeds an input, and weights of many types."""
    y_BF = jnp.tanh(inputs["x"] @ weights["layers"][0]) * weights["scale"].astype(jnp.float32)
    y_BF = jnp.where(weights["mask"], y_BF, weights["offset"].astype(jnp.float32))
    return {"y": y_BF, "sum": inputs["sum"] + jnp.sum(y_BF, axis=0)}


def run_square(weights, inputs):
    return {"y": inputs["x"] ** 2 + weights["layers"][1]}


WEIGHTS = {
    "layers": [np.arange(12, dtype=np.float32).reshape(4, 3) / 10, np.float32(2.5)],
    "scale": np.array([1, 2, 3], ml_dtypes.bfloat16), "mask": np.array([True, False, True]),
    "offset": np.array([-1, 2, 3], np.int8),
}  # fmt: skip
FUNCTIONS = {
    "counter": artefact.Function(run_counter, {"x": ("b, 4", "float32"), "sum": ("3", "float32")}),
    "square": artefact.Function(run_square, {"x": ("n", "float32")}, ["n <= 5"]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    artefact.save(folder, FUNCTIONS, WEIGHTS, name="counter", version="3", beside={"note.txt": "é\n"})
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def tiny_model(*overrides):
    cfg = mt.load_config("laptop", [*TINY, *overrides]).model
    return cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(1)))


def save_text(folder, cfg, params):
    about = {"text": {"max_length": export.longest_text(cfg)}}
    functions, weights = export.text_functions(cfg, params)
    beside = {"generate.py": Path(shipped_generate.__file__).read_text()}
    artefact.save(folder, functions, weights, name="tiny", about=about, beside=beside)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    cfg, params = tiny_model()
    return cfg, params, save_text(tmp_path_factory.mktemp("text") / "model", cfg, params)


@pytest.fixture(scope="module")
def jax_alone(tmp_path_factory):
    """A folder with JAX, what it requires, and flatbuffers; it's all that a process without `site` can import."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy", "flatbuffers"):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return folder


def run_alone(jax_alone, *words, cwd="/"):
    env = {"PYTHONPATH": str(jax_alone), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS, "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, "-S", *map(str, words)], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )


def test_any_function_of_arrays_comes_back(made):
    manifest, functions = artefact.load(made)
    x_BD, total = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), np.ones(3, np.float32)
    found = functions["counter"]({"x": x_BD, "sum": total})
    want = run_counter(jax.tree.map(jnp.asarray, WEIGHTS), {"x": x_BD, "sum": total})
    for name in ("y", "sum"):
        np.testing.assert_allclose(found[name], want[name], rtol=1e-6)
    assert functions["counter"]({"x": x_BD[:1], "sum": total})["y"].shape == (1, 3)
    np.testing.assert_array_equal(functions["square"]({"x": total})["y"], [3.5] * 3)
    with pytest.raises(ValueError, match="refining shapes"):
        functions["square"]({"x": np.ones(6, np.float32)})
    assert (manifest["name"], manifest["version"]) == ("counter", "3")
    assert manifest["functions"]["counter"]["inputs"]["x"] == {"shape": ["b", 4], "dtype": "float32"}
    assert manifest["functions"]["counter"]["outputs"]["y"] == {"shape": ["b", 3], "dtype": "float32"}
    assert (made / "note.txt").read_text() == "é\n"


def test_other_libraries_read_the_weights(made):
    """Those of a text as another reader of the format has them."""
    from safetensors.numpy import load_file

    found = load_file(made / artefact.WEIGHTS)
    assert found.keys() == {"layers.0", "layers.1", "scale", "mask", "offset"}
    np.testing.assert_array_equal(found["layers.0"], WEIGHTS["layers"][0])
    np.testing.assert_array_equal(found["scale"], WEIGHTS["scale"])


def test_an_output_takes_the_memory_of_the_input_it_succeeds(made):
    _, functions = artefact.load(made)
    total = jnp.zeros(3)
    functions["counter"]({"x": np.ones((1, 4), np.float32), "sum": total})
    assert total.is_deleted()


def test_programs_are_for_every_platform_and_have_no_kernel_of_one(text):
    folder = text[2]
    for file in folder.glob("*.jax_export"):
        program = jax.export.deserialize(bytearray(file.read_bytes()))
        assert program.platforms == ("cpu", "cuda", "tpu")
        assert "custom_call @" not in program.mlir_module().replace("custom_call @shape_assertion", "")


def test_the_tpu_compiler_compiles_them(text):
    """Both functions at one size, by the real compiler for a v5e."""
    folder = text[2]
    said = json.loads((folder / "manifest.json").read_text())
    mesh = make_mesh(None, topology_devices(parse_target("v5e:2x2"))[:1])
    whole = jax.NamedSharding(mesh, jax.P())
    sizes = {"b": 3, "t": 64, "s": 128}
    for name, function in said["functions"].items():
        program = jax.export.deserialize(bytearray((folder / function["file"]).read_bytes()))

        def specs(arrays):
            return {
                n: jax.ShapeDtypeStruct([sizes.get(d, d) for d in x["shape"]], x["dtype"], sharding=whole)
                for n, x in arrays.items()
            }

        args = specs(said["weights"]["arrays"]), specs(function["inputs"])
        compiled = jax.jit(program.call).lower(*args).compile()
        assert "fusion" in compiled.as_text(), name


def texts(cfg, count):
    """Random prompts: for each length so many."""
    draw = np.random.default_rng(0)
    return {n: [draw.integers(0, cfg.vocab, n).tolist() for _ in range(count)] for n in LENGTHS}


def batches(prompts):
    """For each size of batch, batches in which every length occurs, most of them with several lengths."""
    for size in range(1, 8):
        lengths = [n for n in LENGTHS if n != 300]
        groups = [[n] for n in LENGTHS]
        if size > 1:
            groups = [[300, *lengths[i : i + size - 1]] for i in range(0, len(lengths), size - 1)]
            groups = [(group * size)[:size] for group in groups]
        for group in groups:
            yield [prompts[n][i % len(prompts[n])] for i, n in enumerate(group)]


ALONE = """
import json, sys
from load import load
from generate import generate
for name in ("minitext", "flax", "safetensors", "tokenizers"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")
artefact = load(sys.argv[1])
for batch in json.load(open(sys.argv[2])):
    steps = list(generate(*artefact, batch, int(sys.argv[3])))
    print(json.dumps([[int(step[row]) for step in steps] for row in range(len(batch))]))
"""


def test_a_process_without_minitext_finds_the_same_tokens(text, jax_alone, tmp_path):
    cfg, params, folder = text
    generator = Generator(cfg, params, Sampling(0))
    prompts = texts(cfg, 2)
    asked = list(batches(prompts))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "run.py").write_text(f"import sys; sys.path.insert(0, {str(folder)!r})\n{ALONE}")
    ran = run_alone(jax_alone, tmp_path / "run.py", folder, tmp_path / "asked.json", TOKENS)
    assert not ran.returncode, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    want = {}
    for length, several in prompts.items():
        rows = np.stack(list(generator.tokens(np.array(several), max_tokens=TOKENS)), axis=1)
        want |= {json.dumps(p): row for p, row in zip(several, rows.tolist(), strict=True)}
    assert {len(batch) for batch in asked} == set(range(1, 8))
    for batch, rows in zip(asked, found, strict=True):
        assert rows == [want[json.dumps(prompt)] for prompt in batch], [len(p) for p in batch]
