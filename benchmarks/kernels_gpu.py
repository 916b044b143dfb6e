"""The GPU kernels beside what there is without them, on one GPU.

    pip install -e '.[aot-gpu]'
    python benchmarks/kernels_gpu.py
    python benchmarks/kernels_gpu.py --tiles    (also tries other tiles for every kernel)

It can't run on a machine without a GPU: it then prints one line and exits with 2. Flash attention is compared with
cuDNN's, forward and with gradients, at 4 rows of 4,096 tokens with the heads of llama3-8b, and of four texts each; the grouped matmul with
`jax.lax.ragged_dot`, at the expert shapes of mixtral-8x7b and 8,192 tokens, with uneven groups; the output layer with
cross-entropy, RMSNorm, paged attention, and looking up tokens, some of them far more often than others, with XLA's
programs. All is bfloat16. The sides take turns: a round times
each of them over a few calls that follow one another without waiting. A ratio is the median over rounds of their time
over ours, so more than 1 is faster. Results are compared too, because a kernel that is wrong may well be fast.
"""

import functools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from common import no_gpu, parser, ratio, require_gpu, spread, write_record

CALLS = 10  # of a side in a round
ATTENTION = {"B": 4, "T": 4096, "N": 32, "K": 8, "H": 128}
GROUPED = {
    "M": 16384,
    "D": 4096,
    "F": 14336,
    "sizes": [4096, 3000, 2500, 2000, 1900, 1500, 1388, 0],
}
ENTROPY = {"X": 8192, "D": 4096, "V": 128256}
NORM = {"X": 16384, "D": 4096}
LOOKUP = {"X": 16384, "D": 4096, "V": 128256}
PAGED = {"B": 64, "N": 32, "K": 8, "S": 64, "X": 128, "H": 128}


def attention_sides(tiles=None, packed=False):
    """Returns the arguments, and ours and cuDNN's attention of them; packed rows hold four texts each."""
    import jax

    from minitext.kernels.attention import cudnn
    from minitext.kernels.attention import gpu as flash_attention_gpu

    B, T, N, K, H = (ATTENTION[letter] for letter in "BTNKH")
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.random.normal(key, (B, T, n, H), "bfloat16")
        for key, n in zip(keys, (N, K, K), strict=True)
    ]
    segments = jax.numpy.arange(T)[None].repeat(B, 0) // (T // 4) if packed else None

    def ours(q, k, v):
        return flash_attention_gpu.flash_attention(q, k, v, segments, blocks=tiles)

    return args, {"minitext": ours, "cudnn": lambda q, k, v: cudnn.attention(q, k, v, segments)}


def grouped_sides(tiles=None):
    """Returns the arguments, and ours and XLA's grouped product of them."""
    import jax
    import jax.numpy as jnp

    from minitext.kernels.grouped_matmul import gpu as grouped_matmul_gpu

    M, D, F, sizes = GROUPED.values()
    left, right = jax.random.split(jax.random.key(0))
    args = [
        jax.random.normal(left, (M, D), "bfloat16"),
        jax.random.normal(right, (len(sizes), D, F), "bfloat16") / D**0.5,
    ]
    group_sizes = jnp.array(sizes, jnp.int32)
    ours = functools.partial(grouped_matmul_gpu.grouped_matmul, tiles=tiles)
    return args, {
        "minitext": lambda lhs, rhs: ours(lhs, rhs, group_sizes),
        "ragged_dot": lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, group_sizes),
    }


def entropy_sides():
    """Returns the arguments, and ours and XLA's output layer with cross-entropy of them."""
    import jax
    import jax.numpy as jnp

    from minitext.kernels.linear_cross_entropy import gpu, xla

    X, D, V = ENTROPY.values()
    keys = jax.random.split(jax.random.key(0), 3)
    targets_X = jax.random.randint(keys[2], (X,), 0, V)
    args = [
        jax.random.normal(keys[0], (X, D), "bfloat16"),
        jax.random.normal(keys[1], (D, V), "bfloat16") / D**0.5,
    ]
    sides = {"minitext": gpu.linear_cross_entropy, "xla": xla.linear_cross_entropy}
    return args, {
        name: lambda x, w, f=f: jnp.stack(f(x, w, targets_X)) for name, f in sides.items()
    }


def norm_sides():
    """Returns the arguments, and ours and XLA's RMSNorm of them."""
    import jax

    from minitext.kernels.rms_norm import gpu, xla

    X, D = NORM.values()
    args = [jax.random.normal(jax.random.key(0), (X, D), "bfloat16"), jax.numpy.ones(D)]
    return args, {"minitext": gpu.rms_norm, "xla": xla.rms_norm}


def lookup_sides():
    """Returns the table, and ours and XLA's lookup in it; the n-th token is about n times as rare as the first."""
    import jax
    import numpy as np

    from minitext.kernels.lookup import gpu, xla

    X, D, V = LOOKUP.values()
    tokens = np.exp(np.random.default_rng(0).uniform(0, np.log(V), X)).astype(np.int32) - 1
    sides = {"minitext": gpu.lookup, "xla": xla.lookup}
    args = [jax.random.normal(jax.random.key(0), (V, D), "bfloat16")]

    def by(f):  # behind the barrier, the compiler can't sort the tokens itself
        return lambda table: f(table, jax.lax.optimization_barrier(jax.numpy.asarray(tokens)))

    return args, {name: by(f) for name, f in sides.items()}


def paged_lengths():
    """Tokens of each text, in equal steps up to the most."""
    import numpy as np

    return np.linspace(1, PAGED["X"] * PAGED["S"], PAGED["B"]).astype(int)


def paged_sides(held="bfloat16"):
    """Returns the arguments, and ours and XLA's paged attention of them; every text owns pages of its own.

    Pages in 8 bits have a scale for each token and head. Any numbers do: nothing here depends on what they are.
    """
    import jax
    import jax.numpy as jnp

    from minitext.kernels.paged_attention import gpu, xla

    B, N, K, S, X, H = PAGED.values()
    keys = jax.random.split(jax.random.key(0), 4)
    narrow = held != "bfloat16"
    draw = [jax.random.normal(key, (K, B * X, S, H), "bfloat16") for key in keys[:2]]
    pages = [(x * 32 if narrow else x).astype(held) for x in draw]
    table = jax.random.permutation(keys[2], B * X).reshape(B, X).astype(jnp.int32)
    args = [jax.random.normal(keys[3], (B, N, H), "bfloat16"), *pages]
    if narrow:
        args.append(jnp.full((K, B * X, 2, S), 1 / 32))
    lengths = jnp.asarray(paged_lengths(), jnp.int32)

    def by(f):
        def run(q, k, v, scales_KP2S=None):
            return f(q, k, v, table, lengths, scales_KP2S=scales_KP2S)

        return run

    return args, {"minitext": by(gpu.paged_attention), "xla": by(xla.paged_attention)}


TILED = ("attention", "grouped_matmul")

# What makes each operation's sides, and whether it has gradients.
OPERATIONS = {
    "attention": (attention_sides, True),
    "attention of packed rows": (functools.partial(attention_sides, packed=True), True),
    "grouped_matmul": (grouped_sides, True),
    "linear_cross_entropy": (entropy_sides, True), "lookup": (lookup_sides, True), "rms_norm": (norm_sides, True),
    "paged_attention": (paged_sides, False),
    "paged_attention of int8": (functools.partial(paged_sides, "int8"), False),
    "paged_attention of fp8": (functools.partial(paged_sides, "float8_e4m3fn"), False),
}  # fmt: skip


def work(op, gradients):
    """Returns the model FLOPs of a call, or the bytes that it must move if these take longer, and which they are."""
    B, T, N, _, H = (ATTENTION[letter] for letter in "BTNKH")
    M, D, F, _ = GROUPED.values()
    X, E, V = ENTROPY.values()
    match op:
        case "attention" | "attention of packed rows":
            keys = T // 4 if "packed" in op else T
            return 2 * B * N * T * keys * H * (3.5 if gradients else 1), "FLOP"
        case "grouped_matmul":
            return 2 * M * D * F * (3 if gradients else 1), "FLOP"
        case "linear_cross_entropy":
            return 2 * X * E * V * (3 if gradients else 1), "FLOP"
        case "lookup":  # forward: read and write a row per token; backward: read one, and write the table's gradient
            X, E, V = LOOKUP.values()
            return 2 * E * (2 * X + (X + V if gradients else 0)), "B"
        case "rms_norm":  # forward: read and write; backward: read x and the gradient, write one
            return 2 * NORM["X"] * NORM["D"] * (5 if gradients else 2), "B"
    of_a_head = 2 * PAGED["H"] if op == "paged_attention" else PAGED["H"] + 4  # with its scale
    return 2 * PAGED["K"] * of_a_head * int(paged_lengths().sum()), "B"


def with_gradients(f):
    """Returns a function of f's arguments and a cotangent that gives the value and the gradients."""
    import jax

    def run(args, cotangent):
        out, vjp = jax.vjp(f, *args)
        return out, *vjp(cotangent)

    return run


def seconds_of(run, args):
    """Seconds of one call, as a mean over calls that follow one another."""
    import jax

    begin = time.perf_counter()
    for _ in range(CALLS):
        out = run(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / CALLS


def prepared(args, f, gradients):
    """Returns the compiled side and its arguments."""
    import jax

    if not gradients:
        return jax.jit(lambda args: (f(*args),)), (args,)
    out = jax.eval_shape(f, *args)
    cotangent = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
    return jax.jit(with_gradients(f)), (args, cotangent)


def compare(args, sides, gradients, rounds, amount, unit):
    """Times the sides in turns; returns seconds, ratios and how far their results are apart."""
    import jax.numpy as jnp

    ready = {name: prepared(args, f, gradients) for name, f in sides.items()}
    results = {name: run(*given) for name, (run, given) in ready.items()}
    seconds = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            seconds[name].append(seconds_of(*ready[name]))
    seconds = {name: of_rounds[1:] for name, of_rounds in seconds.items()}  # the first warms up
    (ours, mine), (theirs, other) = results.items()
    apart = [
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b.astype(jnp.float32))))
        for a, b in zip(mine, other, strict=True)
    ]
    return {
        "seconds": {name: spread(of_rounds) | {"rounds": of_rounds} for name, of_rounds in seconds.items()},
        "rate": {name: amount / statistics.median(of_rounds) for name, of_rounds in seconds.items()}, "unit": f"{unit}/s",
        "ratio": ratio(seconds[theirs], seconds[ours]), "against": theirs, "greatest_relative_difference": max(apart),
    }  # fmt: skip


def candidates(ops):
    """Yields (operation, kernel, tile, all tiles): each kernel's own tile is varied, and the others stay."""
    from minitext.kernels.attention import gpu as flash
    from minitext.kernels.grouped_matmul import gpu as grouped

    for kernel in flash.BLOCKS._fields if "attention" in ops else ():
        for q, k in ((64, 64), (64, 128), (128, 64), (128, 128)):
            for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3), (8, 4)):
                tile = flash.Tile(q, k, warps, stages)
                yield "attention", kernel, tile, flash.BLOCKS._replace(**{kernel: tile})
    for kernel in grouped.TILES._fields if "grouped_matmul" in ops else ():
        for rows, columns in ((128, 128), (128, 256), (64, 256), (256, 128)):
            for step, warps, stages in ((64, 8, 3), (64, 8, 4), (32, 8, 4), (64, 4, 3)):
                tile = grouped.Tile(rows, columns, step, warps, stages)
                yield "grouped_matmul", kernel, tile, grouped.TILES._replace(**{kernel: tile})


def sweep(ops):
    """Times ours with every candidate; a tile that does not fit the chip has no seconds."""
    import jax

    def compiled(candidate):
        op, _, _, tiles = candidate
        try:
            run, given = prepared(args[op], makers[op](tiles)[1]["minitext"], gradients=True)
            return run.lower(*given).compile(), given
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0][:80], None

    makers = {"attention": attention_sides, "grouped_matmul": grouped_sides}
    args, found = {op: makers[op]()[0] for op in ops}, []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        every = list(candidates(ops))
        for (op, kernel, tile, _), (run, given) in zip(
            every, pool.map(compiled, every), strict=True
        ):
            seconds = None
            if given is not None:
                seconds = min(seconds_of(run, given) for _ in range(3))
            said = run if seconds is None else f"{seconds * 1e3:.3f} ms"
            print(f"{op} {kernel} {tile}: {said}", flush=True)
            found.append({"op": op, "kernel": kernel, "tile": tile._asdict(), "seconds": seconds})
    return found


def main():
    cli = parser(__doc__)
    cli.add_argument("--rounds", type=int, default=10, help="rounds of a case (default 10)")
    cli.add_argument(
        "--tiles",
        nargs="*",
        choices=TILED,
        help="also try other tiles for these kernels (default all)",
    )
    args = cli.parse_args()
    require_gpu(__file__)
    import jax

    if jax.default_backend() != "gpu":
        no_gpu(__file__)
    cases = {}
    for op, (make, has_gradients) in OPERATIONS.items():
        for gradients in (False, True)[: 1 + has_gradients]:
            name = op + (" with gradients" if gradients else "")
            try:
                found = compare(*make(), gradients, args.rounds, *work(op, gradients))
            except (
                jax.errors.JaxRuntimeError
            ) as error:  # the record says so, and has the other cases
                cases[name] = {"error": str(error)}
                print(f"{name} failed: {error}", flush=True)
                continue
            cases[name] = found
            rates = ", ".join(
                f"{side} {rate / 1e12:.3g} T{found['unit']}" for side, rate in found["rate"].items()
            )
            print(
                f"{name}: {found['ratio']:.2f} times {found['against']} ({rates}), results "
                f"{found['greatest_relative_difference']:.1e} apart",
                flush=True,
            )
    figures = {
        "device": jax.devices()[0].device_kind, "cases": cases,
        "shapes": {"attention": ATTENTION, "grouped_matmul": GROUPED, "linear_cross_entropy": ENTROPY,
                   "lookup": LOOKUP, "rms_norm": NORM, "paged_attention": PAGED},
    }  # fmt: skip
    if args.tiles is not None:
        figures["tiles"] = sweep(args.tiles or TILED)
    write_record(args.output, "kernels_gpu", "", figures)


if __name__ == "__main__":
    main()
