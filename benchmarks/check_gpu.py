"""Whether minitext computes on a GPU what it should: kernels, training, resumption, generation, an artefact.

    pip install -e '.[aot-gpu]'
    python benchmarks/check_gpu.py
    python benchmarks/check_gpu.py --artefact DIR    (also runs what `minitext export --format stablehlo` wrote elsewhere)

It can't run on a machine without a GPU: it then prints one line and exits with 2. Tests of the kernels run in Pallas's
interpreter, and compilers without a GPU say that they compile. This asks the GPU itself:

  * kernels: each one's values and gradients beside the definition in float32, ||ours - theirs|| / ||theirs||;
  * training: the same run twice, and once interrupted and resumed, are one curve, bit for bit, and the loss falls;
  * generation: greedy tokens with a cache, by the engine's paged kernels, and without a cache are the same, up to ties;
  * an artefact: its greedy tokens are those that it had on the machine that exported it (DIR/expected.json).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import in_subprocess, parser, require_gpu, write_record

STEPS = 300
LIMITS = {"bfloat16": 2e-2, "float32": 2e-5}  # of a kernel's error; bfloat16 numbers have 8 bits
CLOCKS = {"tokens_per_second", "seconds", "mfu", "host_bytes", "device_bytes"}


# ---------------------------------------------------------------------------- kernels


def attention_case(dtype, T=1000, heads=(16, 4), H=128, packed=False, sinks=False, **options):
    """Returns ours, the definition and arguments of attention."""
    import jax
    import jax.numpy as jnp

    from minitext.kernels.attention import gpu, xla
    from minitext.kernels.attention.mask import Mask

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, T, n, H) for n in (heads[0], heads[1], heads[1])]
    args = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False)]
    segments = jnp.arange(T)[None].repeat(2, 0) // 300 if packed else None
    if sinks:
        args.append(jax.random.normal(keys[3], (heads[0],), jnp.float32))
    mask = Mask(
        options.pop("causal", True), options.pop("window", None), options.pop("chunk", None)
    )

    def by(attention):
        def run(q, k, v, sinks_N=None):
            more = {} if sinks_N is None else {"sinks_N": sinks_N}
            return attention(q, k, v, segments, mask=mask, **more, **options)

        return run

    return by(gpu.flash_attention), by(xla.attention), args


def grouped_case(dtype, sizes=(300, 0, 1, 411), M=1000, D=512, F=768):
    import jax
    import jax.numpy as jnp

    from minitext.kernels.grouped_matmul import gpu, xla

    left, right = jax.random.split(jax.random.key(0))
    args = [
        jax.random.normal(left, (M, D), dtype),
        jax.random.normal(right, (len(sizes), D, F), dtype) / D**0.5,
    ]
    group_sizes = jnp.array(sizes, jnp.int32)

    def by(grouped_matmul):
        return lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes)

    return by(gpu.grouped_matmul), by(xla.grouped_matmul), args


def entropy_case(dtype, X=1000, D=512, V=32001):
    import jax
    import jax.numpy as jnp

    from minitext.kernels.linear_cross_entropy import gpu, xla

    keys = jax.random.split(jax.random.key(0), 3)
    targets = jax.random.randint(keys[2], (X,), 0, V)
    args = [
        jax.random.normal(keys[0], (X, D), dtype),
        jax.random.normal(keys[1], (D, V), dtype) / D**0.5,
    ]

    def by(linear_cross_entropy):
        return lambda x, w: jnp.stack(linear_cross_entropy(x, w, targets))

    return by(gpu.linear_cross_entropy), by(xla.linear_cross_entropy), args


def lookup_case(dtype, V=1000, D=768, shape=(4, 300)):
    import jax

    from minitext.kernels.lookup import gpu, xla

    keys = jax.random.split(jax.random.key(0))
    tokens = jax.random.randint(keys[0], shape, 0, V) ** 2 // V  # low ones are frequent

    def by(lookup):
        return lambda table: lookup(table, tokens)

    return by(gpu.lookup), by(xla.lookup), [jax.random.normal(keys[1], (V, D), dtype)]


def norm_case(dtype, X=1000, D=2048):
    import jax

    from minitext.kernels.rms_norm import gpu, xla

    keys = jax.random.split(jax.random.key(0))
    args = [
        jax.random.normal(keys[0], (X, D), dtype),
        1 + jax.random.normal(keys[1], (D,), "float32") / 8,
    ]
    return gpu.rms_norm, xla.rms_norm, args


def paged_case(dtype, B=16, N=16, K=4, S=64, X=20, H=128, held=None, **mask):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from minitext.kernels.attention.mask import Mask
    from minitext.kernels.paged_attention import gpu, xla

    keys = jax.random.split(jax.random.key(0), 4)
    pages = [jax.random.normal(key, (K, B * X, S, H), dtype) for key in keys[:2]]
    scales = None
    if held:  # numbers that 8 bits hold, so that float32 has the same
        pages = [(32 * x).astype(held).astype(dtype) for x in pages]
        scales = jax.random.uniform(keys[3], (K, B * X, 2, S), minval=0.01, maxval=0.05)
    table = jax.random.permutation(keys[2], B * X).reshape(B, X).astype(jnp.int32)
    lengths = jnp.asarray(np.linspace(1, X * S, B).astype(np.int32))

    def by(paged_attention):
        def run(q, k, v):
            k, v = (x.astype(held or x.dtype) for x in (k, v))
            return paged_attention(q, k, v, table, lengths, mask=Mask(**mask), scales_KP2S=scales)

        return run

    return (
        by(gpu.paged_attention),
        by(xla.paged_attention),
        [jax.random.normal(keys[3], (B, N, H), dtype), *pages],
    )


# By name: what makes the case, its options, and whether it has gradients.
KERNELS = {
    "attention": (attention_case, {}, True),
    "attention, 4,096 tokens": (attention_case, {"T": 4096}, True),
    "attention, window": (attention_case, {"window": 200}, True),
    "attention, chunks": (attention_case, {"chunk": 300}, True),
    "attention, packed": (attention_case, {"packed": True}, True),
    "attention, sinks and softcap": (attention_case, {"sinks": True, "softcap": 30.0}, True),
    "attention, bidirectional": (attention_case, {"causal": False}, True),
    "attention, heads of 64": (attention_case, {"H": 64}, True),
    "grouped matmul": (grouped_case, {}, True),
    "linear cross-entropy": (entropy_case, {}, True),
    "lookup": (lookup_case, {}, True),
    "RMSNorm": (norm_case, {}, True),
    "paged attention": (paged_case, {}, False),
    "paged attention, window": (paged_case, {"window": 300}, False),
    "paged attention, int8": (paged_case, {"held": "int8"}, False),
    "paged attention, fp8": (paged_case, {"held": "float8_e4m3fn"}, False),
}
# In float32 the compiler takes minutes for all variants of attention, which differ in masks alone.
CASES = [(name, "bfloat16") for name in KERNELS] + [
    (name, "float32") for name in KERNELS if "," not in name
]


def check_kernels(_case):
    """Compares every kernel with its definition, computed in float32 from the same numbers."""
    import jax
    import jax.numpy as jnp

    def both(f, gradients):
        def run(*args):
            if not gradients:
                return [f(*args)]
            out, vjp = jax.vjp(f, *args)
            return [out, *vjp(jax.random.normal(jax.random.key(1), out.shape).astype(out.dtype))]

        return jax.jit(run)

    def compiled(case):
        name, dtype = case
        make, options, gradients = KERNELS[name]
        ours, theirs, args = make(dtype, **options)
        exact = [x.astype(jnp.float32) for x in args]
        with jax.default_matmul_precision("highest"):
            want = both(theirs, gradients).lower(*exact).compile()(*exact)
        return case, both(ours, gradients).lower(*args).compile()(*args), want

    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, dtype), got, want in pool.map(compiled, CASES):
            apart = [
                float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
                for a, b in zip((x.astype(jnp.float32) for x in got), want, strict=True)
            ]
            found[f"{name}, {dtype}"] = {
                "errors": apart, "limit": LIMITS[dtype], "passed": max(apart) <= LIMITS[dtype],
            }  # fmt: skip
            print(f"{name}, {dtype}: {max(apart):.1e}", file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------------------- a run


def curve(run):
    """Everything in a run's metrics that no clock has part in."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


def train(folder, name, interrupt=False):
    """Trains a run to its end, or until a third of its steps are done and it is asked to stop; returns its curve."""
    run = folder / name
    command = [
        sys.executable, "-m", "minitext", "train", f"train.steps={STEPS}", "train.sample_tokens=0",
        "train.save_every=50", "model.dtype=bfloat16", f"run.dir={folder}", f"run.name={name}",
    ]  # fmt: skip
    with (folder / f"{name}.txt").open("a+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while interrupt and process.poll() is None:
            if len(curve(run)) > STEPS // 3:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        if process.wait() and not interrupt:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read()[-2000:]}")
    return curve(run)


def check_training(folder):
    """Trains twice, and in two parts."""
    begin = time.perf_counter()
    whole = train(folder, "whole")
    seconds = time.perf_counter() - begin
    again, begun = train(folder, "again"), len(train(folder, "parts", interrupt=True))
    parts = train(folder, "parts")
    losses, in_parts = ([line["loss"] for line in c if "loss" in line] for c in (whole, parts))
    return {
        "loss": [losses[0], losses[-1]], "twice_bit_equal": whole == again, "lines": len(whole),
        "lines_before_the_interruption": begun, "resumed_bit_equal": losses == in_parts, "seconds": seconds,
    }  # fmt: skip


def check_generation(case):
    """Generates with a cache, with the engine, and without a cache."""
    import jax
    import numpy as np
    from flax import nnx

    from minitext.inference.engine import Engine, EngineOptions
    from minitext.inference.generate import Generator, Sampling
    from minitext.inference.requests import Request
    from minitext.models.transformer import Transformer
    from minitext.training.run_dir import load_run

    cfg, params, tokenizer, _ = load_run(Path(case["run"]))
    prompt = tokenizer.encode("def main(argv):\n    ")
    count = 64
    cached = Generator(cfg.model, params, Sampling(temperature=0))
    tokens = [int(t[0]) for t in cached.tokens(np.array([prompt]), max_tokens=count)]

    engine = Engine(cfg.model, params, EngineOptions(max_length=256))
    numbers = [list(prompt), list(prompt[:5]), list(prompt) * 3]
    events = [[] for _ in numbers]
    for given, into in zip(numbers, events, strict=True):
        engine.submit(Request(tuple(given), max_tokens=count, temperature=0), into.append)
    while engine.step():
        pass
    engine_tokens = [event.token for event in events[0] if event.finish is None]

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg.model, rngs=nnx.Rngs(0))))
    text = np.array([[*prompt, *tokens]])
    logits = jax.jit(lambda params, text: nnx.merge(graphdef, params)(text)[0])(params, text)
    logits = np.asarray(logits, np.float32)[len(prompt) - 1 : -1]
    behind = logits.max(axis=1) - logits[np.arange(count), tokens]
    return {
        "tokens": tokens, "engine_first_difference": next(
            (i for i, (a, b) in enumerate(zip(tokens, engine_tokens, strict=True)) if a != b), None
        ),
        "most_logits_behind": float(behind.max()), "standard_deviation": float(logits.std()),
    }  # fmt: skip


def check_artefact(folder):
    """Runs an artefact's own program, and compares its tokens with those that its exporter's machine made."""
    expected = json.loads((folder / "expected.json").read_text())
    words = [sys.executable, "generate.py", "--tokens", expected["prompts"]]
    done = subprocess.run(
        [*words, "--max-tokens", str(expected["max_tokens"])],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return {
        "output": done.stdout, "error": done.stderr[-2000:],
        "same_tokens": done.stdout.split() == expected["output"].split(),
    }  # fmt: skip


def main():
    cli = parser(__doc__)
    cli.add_argument("--artefact", type=Path, help="folder of an artefact with expected.json")
    args = cli.parse_args()
    require_gpu(__file__)
    if args.case:
        import jax

        checks = {"kernels": check_kernels, "generation": check_generation}
        found = checks[args.case["check"]](args.case)
        print(json.dumps({"device": jax.devices()[0].device_kind, "found": found}))
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # two processes share the GPU
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        checked = pool.submit(in_subprocess, __file__, {"check": "kernels"})
        training = check_training(Path(folder))
        kernels = checked.result()
        figures = {"device": kernels["device"], "kernels": kernels["found"], "training": training}
        wrong = [name for name, one in figures["kernels"].items() if not one["passed"]]
        print(
            f"kernels: {len(figures['kernels'])} cases, too far off: {wrong or 'none'}", flush=True
        )
        print(f"training: {figures['training']}", flush=True)
        run = str(Path(folder) / "whole")
        figures["generation"] = in_subprocess(__file__, {"check": "generation", "run": run})[
            "found"
        ]
        print(f"generation: {figures['generation']}", flush=True)
    if args.artefact:
        figures["artefact"] = check_artefact(args.artefact)
        print(f"artefact: {figures['artefact']}", flush=True)
    write_record(args.output, "check_gpu", "", figures)


if __name__ == "__main__":
    main()
