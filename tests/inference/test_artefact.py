"""Artefacts: what is written can be run with JAX alone, anything else is refused in one line."""

import ast
import hashlib
import json
import os
import runpy
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
from tests.models import tiny_models

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
    artefact.save(
        folder, FUNCTIONS, WEIGHTS, name="counter", version="3", beside={"note.txt": "é\n"}
    )
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def tiny_model(*overrides):
    cfg = mt.load_config("laptop", [*TINY, *overrides]).model
    return cfg, nnx.state(Transformer(cfg, rngs=nnx.Rngs(1)))


def save_text(folder, cfg, params):
    about = {"text": {"max_length": export.max_length(cfg), "vocabulary": cfg.vocab}}
    functions, weights = export.text_functions(cfg, params)
    beside = {"generate.py": Path(shipped_generate.__file__).read_text()}
    artefact.save(folder, functions, weights, name="tiny", about=about, beside=beside)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    cfg, params = tiny_model("model.scan_layers=true")
    return cfg, params, save_text(tmp_path_factory.mktemp("text") / "model", cfg, params)


@pytest.fixture(scope="module")
def jax_alone(tmp_path_factory):
    """A folder with JAX, what it requires, and flatbuffers; it's all that a process without `site` can import."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy", "flatbuffers"):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {
            "..",
            "__pycache__",
        }:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return folder


def run_alone(jax_alone, *words, cwd="/"):
    env = {
        "PYTHONPATH": str(jax_alone),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS,
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        [sys.executable, "-S", *map(str, words)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
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
    assert manifest["functions"]["counter"]["inputs"]["x"] == {
        "shape": ["b", 4],
        "dtype": "float32",
    }
    assert manifest["functions"]["counter"]["outputs"]["y"] == {
        "shape": ["b", 3],
        "dtype": "float32",
    }
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
        assert "custom_call @" not in program.mlir_module().replace(
            "custom_call @shape_assertion", ""
        )


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
                n: jax.ShapeDtypeStruct(
                    [sizes.get(d, d) for d in x["shape"]], x["dtype"], sharding=whole
                )
                for n, x in arrays.items()
            }

        args = specs(said["weights"]["arrays"]), specs(function["inputs"])
        compiled = jax.jit(program.call).lower(*args).compile()
        assert "fusion" in compiled.as_text(), name


def texts(cfg, count):
    """Random prompts: for each length so many."""
    draw = np.random.default_rng(0)
    return {n: [draw.integers(0, cfg.vocab, n).tolist() for _ in range(count)] for n in LENGTHS}


def batches(prompts, sizes):
    """For each size of batch, batches in which every length occurs, most of them with several lengths."""
    for size in sizes:
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


@pytest.mark.parametrize("sizes", audit_but([(1, 3)], [(1, 3), (2, 4, 5, 6, 7)]))
def test_a_process_without_minitext_finds_the_same_tokens(text, jax_alone, tmp_path, sizes):
    cfg, params, folder = text
    generator = Generator(cfg, params, Sampling(0))
    prompts = texts(cfg, 2)
    asked = list(batches(prompts, sizes))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "run.py").write_text(f"import sys; sys.path.insert(0, {str(folder)!r})\n{ALONE}")
    ran = run_alone(jax_alone, tmp_path / "run.py", folder, tmp_path / "asked.json", TOKENS)
    assert not ran.returncode, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    want = {}
    for several in prompts.values():
        rows = np.stack(list(generator.tokens(np.array(several), max_tokens=TOKENS)), axis=1)
        want |= {json.dumps(p): row for p, row in zip(several, rows.tolist(), strict=True)}
    assert {len(batch) for batch in asked} == set(sizes)
    for batch, rows in zip(asked, found, strict=True):
        assert rows == [want[json.dumps(prompt)] for prompt in batch], [len(p) for p in batch]


def test_what_was_in_a_new_cache_does_not_matter(text):
    """NaN in it would stay NaN wherever it's multiplied by a weight of 0."""
    _, _, folder = text
    manifest, run = artefact.load(folder)
    sizes = {"b": 2, "s": 7}
    tokens, lengths = np.array([[1, 2, 3], [4, 5, 0]], np.int32), np.array([3, 2], np.int32)
    found = []
    for fill in (0, np.nan):
        cache = {
            name: np.full([sizes.get(n, n) for n in spec["shape"]], fill, spec["dtype"])
            for name, spec in manifest["functions"]["prefill"]["inputs"].items()
            if name.startswith("cache")
        }
        first = run["prefill"]({"tokens": tokens, "lengths": lengths, **cache})
        kept = {name: first[name] for name in cache}
        asked = {"tokens": np.array([6, 7], np.int32), "lengths": lengths, **kept}
        found.append((np.asarray(first["logits"]), np.asarray(run["decode"](asked)["logits"])))
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[1]).all()


def refusal(folder):
    with pytest.raises(UserError) as caught:
        artefact.load(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def reseal(folder, change):
    """Edits the manifest and makes its checksums right again, as somebody does who means to."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    for name, measured in (manifest["files"] or {}).items():
        if (folder / name).is_file():
            measured["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    manifest.pop("sha256")
    (folder / "manifest.json").write_bytes(artefact.sealed(manifest))


def test_a_changed_byte_anywhere_is_noticed(copy):
    """Every byte of the manifest, and of each other file the first, the last and some between."""
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        step = 1 if path.name == "manifest.json" else max(1, len(whole) // 5)
        for i in {*range(0, len(whole), step), len(whole) - 1}:
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            with pytest.raises(
                (loader.Refused, ValueError, LookupError, AttributeError, TypeError)
            ):
                loader._manifest(copy)
        path.write_bytes(whole)
    loader._manifest(copy)
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        for bad in (whole[:-1], whole + b"x", b"", bytes([whole[0] ^ 1]) + whole[1:]):
            path.write_bytes(bad)
            refusal(copy)
        path.unlink()
        assert path.name in refusal(copy)
        path.write_bytes(whole)
    artefact.load(copy)


@pytest.mark.timeout(60)
def test_a_manifest_that_never_ends_is_refused(copy):
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    assert "manifest.json is missing" in refusal(copy)


@pytest.mark.parametrize("name", ["../note.txt", "/etc/passwd", "..", "", "sub/x", "nul\0"])
def test_files_elsewhere_are_refused(copy, name):
    (copy.parent / "note.txt").write_text("x")
    reseal(copy, lambda m: m["files"].update({name: {"size": 1, "sha256": "0"}}))
    assert "missing" in refusal(copy) or "null byte" in refusal(copy)
    reseal(copy, lambda m: (m["files"].pop(name), m["weights"].update(file=name)))
    assert "missing" in refusal(copy) or "null byte" in refusal(copy)


def test_a_file_that_the_checksums_leave_out_is_refused(copy):
    reseal(copy, lambda m: m["files"].pop("square.jax_export"))
    assert "square.jax_export" in refusal(copy)


def rewrite(folder, change):
    """Writes other weights in the same format, and the manifest to match its file's checksum."""
    found, _ = safetensors.read_header(folder / artefact.WEIGHTS)
    arrays = {n: (x.shape, x.dtype) for n, x in found.items()}
    values = {n: np.zeros(x.shape, safetensors.DTYPES[x.dtype]) for n, x in found.items()}
    change(arrays, values)
    safetensors.write(folder / artefact.WEIGHTS, arrays, (values[n] for n in arrays), {})
    reseal(folder, lambda manifest: None)


def as_int32(arrays, values):
    arrays["layers.0"], values["layers.0"] = ((4, 3), "I32"), np.zeros((4, 3), np.int32)


def as_float16(arrays, values):
    arrays["layers.0"], values["layers.0"] = ((4, 3), "F16"), np.zeros((4, 3), np.float16)


def transposed(arrays, values):
    arrays["layers.0"], values["layers.0"] = ((3, 4), "F32"), np.zeros((3, 4), np.float32)


def without(arrays, values):
    del arrays["layers.0"], values["layers.0"]


@pytest.mark.parametrize("change", [as_int32, as_float16, transposed, without])
def test_other_weights_are_refused(copy, change):
    """Whether the manifest says what the program wants, or what the file has."""
    rewrite(copy, change)
    assert "layers.0" in refusal(copy)
    found, _ = safetensors.read_header(copy / artefact.WEIGHTS)
    listed = {n: {"shape": list(x.shape), "dtype": safetensors.DTYPES[x.dtype].name, "stored": x.dtype}
              for n, x in found.items()}  # fmt: skip
    reseal(copy, lambda manifest: manifest["weights"].update(arrays=listed))
    assert "layers.0" in refusal(copy)


def test_headers_that_lie_are_refused(copy):
    path = copy / artefact.WEIGHTS
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for offsets in ([0, 1 << 40], [-8, 4], [48, 0], [0, 44], [0], "ab", None, [0.5, 1]):
        text = json.dumps(
            header | {"layers.0": header["layers.0"] | {"data_offsets": offsets}}
        ).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        reseal(copy, lambda manifest: None)
        refusal(copy)
    for text in (
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + whole[8:],
        b"short",
        b"[" * 100_000,
    ):
        path.write_bytes(text)
        reseal(copy, lambda manifest: None)
        refusal(copy)


def test_hostile_manifests_are_refused(copy):
    for text in (
        "",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"format": 7}',
        "\x00",
        "1e999",
        '{"format": [[]]}',
    ):
        (copy / "manifest.json").write_text(text)
        refusal(copy)
    (copy / "manifest.json").unlink()
    assert "manifest.json" in refusal(copy)
    assert "nowhere" in refusal(copy / "nowhere")
    with pytest.raises(UserError, match="gs://"):
        artefact.load("gs://bucket/model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format="minitext-artefact 2"), "minitext-artefact 2"),
        (lambda m: m["weights"]["arrays"].pop("mask"), "mask"),
        (lambda m: m["weights"]["arrays"].update(more=m["weights"]["arrays"]["mask"]), "more"),
        (
            lambda m: m["functions"].update(third=m["functions"]["square"] | {"file": "note.txt"}),
            "copy",
        ),
        (lambda m: m["functions"].update(third={}), "file"),
        (lambda m: m.update(functions=[1]), "copy"),
        (lambda m: m.update(files=None), "copy"),
        (lambda m: m["weights"].update(file="note.txt"), "copy"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(copy, change, words):
    reseal(copy, change)
    assert words in refusal(copy)


def test_a_program_for_another_platform_is_refused(tmp_path):
    artefact.save(tmp_path / "a", FUNCTIONS, WEIGHTS, name="a", platforms=["tpu"])
    assert "tpu" in refusal(tmp_path / "a") and "cpu" in refusal(tmp_path / "a")


def test_nothing_is_overwritten_or_left_behind(tmp_path, made):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    cases = {
        full: (FUNCTIONS, WEIGHTS, "exists"),
        full / "mine": (FUNCTIONS, WEIGHTS, "exists"),
        full / "mine" / "below": (FUNCTIONS, WEIGHTS, "cannot write"),
        tmp_path / "wide": (FUNCTIONS, WEIGHTS | {"scale": np.arange(3)}, "scale is int64"),
        tmp_path / "complex": (FUNCTIONS, WEIGHTS | {"scale": np.ones(3, complex)}, "scale is complex128"),
        tmp_path / "if": ({"f": artefact.Function(branch, {"x": ("n", "float32")})}, WEIGHTS, "f can't be exported"),
    }  # fmt: skip
    for title in ("../up", "a/b", "", ".hidden"):
        more = {title: FUNCTIONS["square"]}
        cases[tmp_path / f"named {len(cases)}"] = (more, WEIGHTS, "choose another name")
    for folder, (functions, weights, words) in cases.items():
        with pytest.raises(UserError, match=words) as caught:
            artefact.save(folder, functions, weights, name="a")
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "mine"]
    for name in ("manifest.json", "weights.safetensors", "square.jax_export", "../x"):
        with pytest.raises(UserError, match="choose another name"):
            artefact.save(tmp_path / "twice", FUNCTIONS, WEIGHTS, name="a", beside={name: ""})
    (tmp_path / "empty").mkdir()
    artefact.save(tmp_path / "empty", {"square": FUNCTIONS["square"]}, WEIGHTS, name="a")
    artefact.load(tmp_path / "empty")


def branch(weights, inputs):
    """Its program depends on what is left open."""
    return {"y": inputs["x"] * (2 if inputs["x"].shape[0] > 3 else 1)}


def test_shipped_files_are_small_and_need_jax_alone():
    """The loader has at most 60 lines that aren't empty."""
    allowed = {"jax", "numpy", "json", "functools", "hashlib", "pathlib", "argparse", "load"}
    for module in (loader, shipped_generate):
        source = Path(module.__file__).read_text()
        nodes = list(ast.walk(ast.parse(source)))
        names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        assert names <= allowed, module
        assert len([line for line in source.splitlines() if line.strip()]) <= 60, module


def test_the_shipped_command_says_what_is_wrong_in_one_line(text, jax_alone, tmp_path, monkeypatch):
    folder = shutil.copytree(text[2], tmp_path / "copy")
    command = folder / "generate.py"
    ran = run_alone(jax_alone, command, "--tokens", "1,2:3", "--max-tokens", "2")
    assert [len(line.split(",")) for line in ran.stdout.splitlines()] == [2, 2], ran.stderr
    ran = run_alone(jax_alone, command, "--tokens", "")
    assert ran.returncode == 1 and ran.stderr.startswith("error: invalid literal")
    assert len(ran.stderr.splitlines()) == 1, ran.stderr

    # Python prints what SystemExit says, as above; a process for each would import JAX each time.
    monkeypatch.setitem(sys.modules, "load", loader)

    def refused(tokens, why):
        monkeypatch.setattr(sys, "argv", [str(command), f"--tokens={tokens}"])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(command), run_name="__main__")
        said = str(stop.value.code)
        assert said.startswith("error: ") and why in said and "\n" not in said

    for token in (-1, text[0].vocab, 10**10):
        refused(f"1,{token}", f"no token {token}: the model has 0 to {text[0].vocab - 1}")
    refused("x", "invalid literal")
    (folder / "decode.jax_export").write_bytes(b"x")
    refused("1", "was changed")


# What makes the caches, the products and the weights of a model other than a plain one's.
KINDS = {
    "unrolled": ["model.scan_layers=false"],
    "windows": ["model.layers=5", "model.period=[{attention: {window: 5}}, {}]"],
    "latents and experts": ["model.layers=1", "model.kv_heads=null", "model.attention.kind=mla", "model.ffn.kind=moe"],
    "states": ["model.period=[{attention: {kind: deltanet}}, {}]"],
    "bfloat16": ["model.dtype=bfloat16"],
    "int8": ["model.storage=[{module: .*, dtype: int8}]"],
    "int4": ["model.storage=[{module: blocks/.*, dtype: int4, block: 16}]"],
    "nf4 and fp8": ["model.storage=[{module: blocks/ffn.*, dtype: nf4}, {module: .*, dtype: fp8}]"],
}  # fmt: skip


@pytest.mark.audit
@pytest.mark.parametrize("kind", audit_but(["latents and experts"], KINDS))
def test_kinds_of_models(kind, tmp_path):
    cfg, params = tiny_model(*KINDS[kind])
    manifest, functions = artefact.load(save_text(tmp_path / "model", cfg, params))
    prompts = [prompt for n, (prompt, _) in texts(cfg, 2).items() if n in (1, 17, 64, 65)]
    steps = shipped_generate.generate(manifest, functions, prompts, 4)
    found = np.stack(list(steps), axis=1).tolist()
    generator = Generator(cfg, params, Sampling(0))
    for prompt, row in zip(prompts, found, strict=True):
        tokens = generator.tokens(np.array([prompt]), max_tokens=4)
        assert row == [int(token[0]) for token in tokens], len(prompt)


def test_experts_with_a_capacity_are_refused():
    cfg, params = tiny_model("model.ffn.kind=moe", "model.ffn.capacity_factor=1.5")
    with pytest.raises(UserError, match=r"capacity_factor=1\.5"):
        export.text_functions(cfg, params)


@pytest.mark.audit
def test_texts_end_where_positions_would_change(tmp_path):
    factors = "short_factor: [1, 1, 1, 1], long_factor: [2, 2, 3, 4]"
    rope = f"{{kind: longrope, original_length: 70, max_length: 280, {factors}}}"
    cfg, params = tiny_model(f"model.rope={rope}")
    manifest, functions = artefact.load(save_text(tmp_path / "model", cfg, params))
    generator, prompt = Generator(cfg, params, Sampling(0)), list(range(60))
    steps = shipped_generate.generate(manifest, functions, [prompt], 10)
    want = list(generator.tokens(np.array([prompt]), max_tokens=10))
    np.testing.assert_array_equal(np.stack(list(steps)), want)
    with pytest.raises(ValueError, match="at most 70"):
        list(shipped_generate.generate(manifest, functions, [prompt], 11))


@pytest.mark.audit
@pytest.mark.parametrize("name", tiny_models.CASES)
def test_every_family(name, tmp_path):
    """Texts on both sides of the families' windows and chunks, and of different lengths."""
    pair = tiny_models.pair(name, tmp_path)
    cfg, params = pair.cfg, nnx.state(pair.ours)
    manifest, functions = artefact.load(save_text(tmp_path / "model", cfg, params))
    count = 3
    longest = min(13, manifest["text"]["max_length"] - count)
    prompts = [tiny_models.tokens(n, 1)[0].tolist() for n in (1, 4, longest)]
    steps = shipped_generate.generate(manifest, functions, prompts, count)
    found = np.stack(list(steps), axis=1).tolist()
    generator = Generator(cfg, params, Sampling(0))
    for prompt, row in zip(prompts, found, strict=True):
        tokens = generator.tokens(np.array([prompt]), max_tokens=count)
        assert row == [int(token[0]) for token in tokens], len(prompt)
