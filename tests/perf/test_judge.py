"""Judging kernels: each mistake has a verdict of its own, and a file that misbehaves is one line."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from minitext.compiler.llo import Kernel
from minitext.errors import UserError
from minitext.perf import judge
from tests.conftest import audit_but

ROOT = Path(__file__).parents[2]
TIMES_TWO = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from minitext.perf.judge import Case

BLOCK = pl.BlockSpec((8, 128), lambda i: (i, 0))
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 128)), jnp.float32)

def call(body, x=X, grid=2, index=lambda i: (i, 0), out=lambda i: (i, 0), semantics="parallel", **more):
    return pl.pallas_call(
        body, grid=(grid,), in_specs=[pl.BlockSpec((8, 128), index)], out_specs=pl.BlockSpec((8, 128), out),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)), **more,
    )(x)

def twice(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

def right(x):
    return call(twice, x)

def reference(x):
    return 2 * x
"""
MATMUL = """
def product(x_ref, y_ref, o_ref, sum_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = sum_ref[...].astype(o_ref.dtype)

def matmul(x, y, tile=128):
    return pl.pallas_call(
        product, grid=(x.shape[0] // tile, y.shape[1] // tile, x.shape[1] // tile),
        in_specs=[pl.BlockSpec((tile, tile), lambda i, j, k: (i, k)),
                  pl.BlockSpec((tile, tile), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)

Y = jnp.asarray(np.random.default_rng(1).normal(size=(256, 256)), jnp.bfloat16)
"""
# Kernels with a mistake each; the check that must fail, and words of its verdict.
WRONG = {
    "a race": (
        "def fn(x): return call(twice, x, out=lambda i: (0, 0))",
        "races",
        "race in HBM: .* core 0 .* core 1",
    ),
    # Each core has an output of its own: nothing races, and only the order in which a core takes its steps is wrong.
    "a sum that counts on the order": (
        "def body(x_ref, o_ref):\n    j = pl.program_id(1)\n"
        "    o_ref[...] = 3 * x_ref[...] + jnp.where(j == 0, 0.0, o_ref[...])\n"
        "BLOCK = pl.BlockSpec((8, 128), lambda i, j: (i, 0))\n"
        "def fn(x): return pl.pallas_call(body, grid=(2, 3), in_specs=[BLOCK], out_specs=BLOCK, out_shape=x,\n"
        "    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel')))(x)",
        "races",
        r"output 0 at \[0, 0\] \(.* of 2,048 entries\) depends on the order of parallel steps",
    ),
    "out of bounds": (
        "def fn(x): return call(twice, x, index=lambda i: (i + 1, 0))",
        "bounds",
        "block index .2, 0.",
    ),
    "an index out of bounds": (
        "def body(x_ref, o_ref):\n    o_ref[...] = 2 * x_ref[pl.ds(4 * pl.program_id(0), 8), :]\n"
        "def fn(x): return call(body, x)",
        "bounds",
        "[Oo]ut.of.bounds",
    ),
    "no initialization": (
        "def body(x_ref, o_ref):\n    o_ref[...] += 2 * x_ref[...]\ndef fn(x): return call(body, x)",
        "initialized",
        r"output 0 at \[0, 0\] \(2,048 of 2,048 entries\) depends on memory that nothing wrote",
    ),
    "an output that is half written": (
        "def body(x_ref, o_ref):\n    o_ref[:4, :] = 2 * x_ref[:4, :]\ndef fn(x): return call(body, x)",
        "initialized",
        r"output 0 at \[4, 0\] .* \(1,024 of 2,048",
    ),
    "a block left and revisited": (
        "def fn(x): return call(twice, jnp.tile(x, (2, 1)), grid=4, out=lambda i: (i % 2, 0), "
        "semantics='arbitrary')[:16]",
        "blocks",
        "Revisited block",
    ),
    "wrong values": (
        "def body(x_ref, o_ref):\n    o_ref[...] = 3 * x_ref[...]\ndef fn(x): return call(body, x)",
        "values",
        r"output 0 at \[\d+, \d+\]: got .*, want .*; 2,0\d\d of 2,048 entries",
    ),
    "an error of its own": (
        "def body(x_ref, o_ref):\n    o_ref[...] = jnp.concatenate([x_ref[...], x_ref[...]])\n"
        "def fn(x): return call(body, x)",
        "runs",
        r"file\.py:\d+: ValueError: ",
    ),
    "no kernel": ("def fn(x): return 2 * x", "runs", "no Pallas kernel ran"),
}


def cases_of(folder, *parts):
    path = folder / "file.py"
    path.write_text("\n".join([TIMES_TWO, *parts]))
    return judge.load_cases(str(path)), str(path)


def verdicts(checks):
    return {check.check: check.passed for check in checks}


HALF, ORDER = "an output that is half written", "a sum that counts on the order"
QUICK = ("a race", ORDER, "out of bounds", "no initialization")


@pytest.mark.parametrize("name", audit_but(QUICK, WRONG))
def test_each_mistake_has_a_verdict_of_its_own(tmp_path, name):
    text, failing, words = WRONG[name]
    (case,), path = cases_of(tmp_path, text, "CASES = [Case(fn, (X,), reference)]")
    failed, *more = [c for c in judge.simulate_case(case, path) if c.passed is False]
    assert failed.check == failing and re.search(words, failed.said), failed
    assert "\n" not in failed.said and len(failed.said) < 400
    # Where half of an output is never set, or depends on luck, no value is right either.
    assert [check.check for check in more] == ["values"] * (name in (HALF, ORDER))


@pytest.mark.audit
def test_the_gradient_of_a_vmapped_kernel_passes(tmp_path):
    (case,), path = cases_of(
        tmp_path,
        "@jax.custom_vjp\ndef square(x): return call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] ** 2), x)",
        "square.defvjp(lambda x: (square(x), x), lambda x, d: (right(x) * d,))",
        "def loss(x): return jnp.sum(jax.vmap(square)(x))",
        "CASES = [Case(jax.grad(loss), (jnp.stack([X, 3 * X]),), lambda x: 2 * x)]",
    )
    found = list(judge.simulate_case(case, path))
    assert [check.check for check in found] == list(judge.SIMULATED)
    assert all(check.passed for check in found), found
    assert (
        case.name == "loss" and "2 kernel calls" in found[0].said
    )  # forward and backward, both batched


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_matmul_is_compiled_and_compared_with_a_budget(tmp_path):
    (case,), path = cases_of(
        tmp_path,
        MATMUL,
        "CASES = [Case(matmul, (Y, Y), lambda x, y: jnp.dot(x, y), compile_inputs=("
        "jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),) * 2)]",
    )
    compiled, kernel, *rows = judge.compile_case(case, "v5e", {}, path)
    assert compiled.passed and kernel["kernel"] == "matmul" and kernel["mxu_share"] > 0.05
    (vmem,) = rows
    # Two buffers for each of two inputs and the output, and the sum in float32.
    assert vmem.passed and kernel["vmem_bytes"] >= (6 * 2 + 4) * 128 * 128
    budget = {"vmem": kernel["vmem_bytes"] - 1, "spills": 0, "bundles": 1, "mxu": 0.99}
    found = {c.check: c.passed for c in judge._within("matmul", "v5e", kernel, budget)}
    assert found == {"vmem": False, "spills": True, "bundles": False, "mxu": False}
    assert set(kernel) == {"case", *Kernel.to_json(_some_kernel())}


def _some_kernel():
    from minitext.compiler.llo import read_dump

    (kernel,) = read_dump(ROOT / "tests" / "compiler" / "llo" / "tiny-v5e", "v5e")
    return kernel


def test_budgets_and_chips_are_read():
    words = ["vmem=1.5MiB,spills=0", "mxu=50%", "bundles=4000"]
    assert judge.parse_budget(words) == {
        "vmem": 1.5 * 2**20,
        "spills": 0,
        "mxu": 0.5,
        "bundles": 4000,
    }
    assert judge.parse_budget([]) == {} and judge.check_chips("v5e,v6e") == ["v5e", "v6e"]
    for word in ("", "vmem", "vmem=", "vmem=-1", "vmem=1TiB", "spills=1%", "speed=1", "vmem=1e3", "mxu=1MiB",
                 "vmem=9.9.9", "vmem=²"):  # fmt: skip
        with pytest.raises(UserError, match="is not a budget"):
            judge.parse_budget([word])
    for chip in ("", "h100", "v5e,", "V5E"):
        with pytest.raises(UserError, match="is not a TPU"):
            judge.check_chips(chip)


# Files that are refused, with what is said; none imports JAX, so each takes a moment.
REFUSED = {
    "x = (": r"file\.py:1: SyntaxError: '\(' was never closed",
    "x = 1": "names no kernel: define kernel",
    "def kernel(): pass": r"has no example_inputs\(\)",
    "def f():\n    return 1 / 0\n\nf()": r"file\.py:2: ZeroDivisionError: division by zero",
    "import sys; sys.exit(3)": r"file\.py:1: SystemExit: 3",
    "import no_such_module": r"file\.py:1: ModuleNotFoundError",
    "import os; os.abort()": "killed by SIGABRT",
    "import os; os._exit(7)": "exit code 7",
    "print('not what is read'); import os; os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "x = '\0'": "is not Python: source code string cannot contain null bytes",
    "import time; time.sleep(60)": "took more than 2 s: look for a loop or a wait that never ends",
    "x = b'1' * 2**30 * 1\nimport time; time.sleep(60)": "took more than 0.5 GiB of memory",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_misbehaves_is_one_line_and_leaves_no_process(tmp_path, text):
    path = tmp_path / "file.py"
    path.write_text(text)
    with pytest.raises(UserError, match=REFUSED[text]) as caught:
        seconds = 2 if "more than 2 s" in REFUSED[text] else 60
        judge.judge(str(path), seconds=seconds, memory_gib=0.5)
    assert "\n" not in str(caught.value)
    assert not [c for c in psutil.Process().children(recursive=True) if str(path) in c.cmdline()]


def test_the_processes_of_a_file_end_with_it(tmp_path):
    path, marker = tmp_path / "file.py", tmp_path / "pid"
    path.write_text(
        f"import subprocess\nchild = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n1 / 0"
    )
    with pytest.raises(UserError, match="ZeroDivisionError"):
        judge.judge(str(path))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid := int(marker.read_text())) and time.monotonic() < deadline:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "cases", ["[1]", "[(print,)]", "[Case(1, (X,))]", "[Case(right, X)]", "[Case(right, ('a',))]"]
)
def test_a_case_that_is_none_is_refused(tmp_path, cases):
    with pytest.raises(UserError, match=r"CASES\[0\] (is not a Case|has an input of type)"):
        cases_of(tmp_path, f"CASES = {cases}")


@pytest.mark.parametrize("tolerance", ["float('nan')", "-1", "float('inf')", "'1e-3'"])
def test_a_tolerance_that_would_pass_or_fail_everything_is_refused(tmp_path, tolerance):
    with pytest.raises(
        UserError, match=r"CASES\[0\] has tolerance=.*: give a number of at least 0"
    ):
        cases_of(tmp_path, f"CASES = [Case(right, (X,), tolerance={tolerance})]")


def test_inputs_become_arrays_and_names_one_line(tmp_path):
    (case,), _ = cases_of(tmp_path, "CASES = [Case(right, (X, 3), name='a\\nb')]")
    assert case.inputs[1].shape == () and case.inputs[1] == 3
    assert case.name == "a\\nb"


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint4"])
def test_integers_must_be_equal(dtype):
    want = np.arange(16).astype(jnp.dtype(dtype))
    case = judge.Case(lambda: None, (), lambda: want)
    assert judge._check_values(case, [want], "").passed
    off = np.where(want == 15, 14, want.astype(int)).astype(want.dtype)
    assert judge._check_values(case, [off], "").passed is False


def run_command(*words):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minitext", "judge", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.audit
@pytest.mark.timeout(1800)
def test_the_docstring_s_file_passes(tmp_path):
    doc = ast.get_docstring(ast.parse(Path(judge.__file__).read_text())) or ""
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", doc, re.M)
    path = tmp_path / "example.py"
    path.write_text("\n".join(map(textwrap.dedent, blocks)))
    done = run_command(path, "--chip", "v5e,v6e", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and {k["chip"] for k in found["kernels"]} == {"v5e", "v6e"}
    assert {c["case"] for c in found["checks"]} == {"kernel", "vmapped"}


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.audit
@pytest.mark.timeout(1800)
def test_the_command_s_exit_codes_and_table(tmp_path):
    _, path = cases_of(
        tmp_path,
        MATMUL,
        "def large(x, y): return matmul(x, y, tile=2048)",
        "Z = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)",
        "CASES = [Case(matmul, (Y, Y), lambda x, y: jnp.dot(x, y)),",
        "         Case(lambda x: call(twice, x), (X,), lambda x: 3 * x, name='wrong'),",
        "         Case(large, (Y, Y), name='large', compile_inputs=(Z, Z)),",
        "         Case(jax.vmap(right), (jnp.stack([X] * 3),), reference, name='vmapped'),",
        "         Case(jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(right_(x))))), (jnp.stack([X] * 3),), "
        "lambda x: 2 * jnp.cos(2 * x), name='gradient')]",
        "print('printed by the file')",
    )
    text = (
        Path(path)
        .read_text()
        .replace(
            "CASES =",
            "@jax.custom_vjp\ndef right_(x): return right(x)\n"
            "right_.defvjp(lambda x: (right(x), None), lambda _, d: (right(d),))\nCASES =",
        )
    )
    Path(path).write_text(text)
    done = run_command(path, "--budget", "vmem=4MiB")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "printed by the file" in done.stderr and "Traceback" not in done.stderr
    failed = [line.split()[:2] for line in done.stdout.splitlines() if " FAIL " in line]
    # The one that needs too much can't be simulated at 128 either: its tile is larger than its input.
    assert ["wrong", "values"] in failed and ["large", "vmem"] in failed
    assert not [line for line in failed if line[0] in ("matmul", "vmapped", "gradient")]
    assert run_command(tmp_path / "nowhere.py").returncode == 2
