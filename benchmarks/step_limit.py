"""How fast the 10.7M training step could be: each of its products alone, and the bytes that must move between them.

    python benchmarks/step_limit.py

The products of a step (rows of 256 tokens, float32, attention in two blocks) are timed one by one, warm and with
nothing else running, in the layout in which the step multiplies them. All other work is counted as bytes, each operand
read and each result written once, at the rate at which this machine copies. The sum is a time that the step can't
beat with these products; over the machine's matmul peak it is the share that can be reached. The step itself takes
turns with them.
"""

import statistics
import time

import train_cpu
from common import Side, busy, matmul_peak, parser, serve, write_record
from train_cpu import SHAPES, TOKENS, config

SEQ_LEN, BLOCKS = 256, 2


def products(case):
    """Yields (name, times a step, FLOPs, shapes of the two factors, einsum) of every product of a step."""
    L, D, F, V = (case[key] for key in ("layers", "embed", "mlp", "vocab"))
    X, BN, H = TOKENS, case["batch"] * case["heads"], D // case["heads"]
    weights = [(D, D, 4 * L), (D, F, 2 * L), (F, D, L), (D, V, 1)]
    for a, b, count in weights:
        flops = 2 * X * a * b
        yield f"x[{X},{a}] w[{a},{b}]", count, flops, ((X, a), (a, b)), "ij,jk->ik"
        yield f"g[{X},{b}] w[{a},{b}]^T", count, flops, ((X, b), (a, b)), "ik,jk->ij"
        yield f"x^T[{a},{X}] g[{X},{b}]", count, flops, ((a, X), (X, b)), "ij,jk->ik"
    t = SEQ_LEN // BLOCKS
    for S in range(t, SEQ_LEN + 1, t):
        # Logits and the gradient of the weights; the weights' values and the queries' gradient; those of keys, values.
        flops = 2 * BN * t * S * H
        yield (
            f"{BN} x q[{t},{H}] k[{S},{H}]^T",
            2 * L,
            flops,
            ((BN, t, H), (BN, S, H)),
            "bij,bkj->bik",
        )
        yield (
            f"{BN} x p[{t},{S}] v[{S},{H}]",
            2 * L,
            flops,
            ((BN, t, S), (BN, S, H)),
            "bij,bjk->bik",
        )
        yield (
            f"{BN} x q^T[{H},{t}] p[{t},{S}]",
            2 * L,
            flops,
            ((BN, H, t), (BN, t, S)),
            "bij,bjk->bik",
        )


def other_bytes(case, parameters):
    """Bytes that a step must move for all that is no product."""
    L, D, F, N = (case[key] for key in ("layers", "embed", "mlp", "heads"))
    wide = (
        10 + 12 + 8 + 16 + 6 + 2
    )  # norms, residual sums, rotations, heads first and last, factors transposed, softmax
    gated = 3 + 5 + 2  # silu(gate) * up, its gradient, and a factor transposed
    logits = case["batch"] * N * SEQ_LEN**2 * (1 + 1 / BLOCKS) / 2
    optimizer = 4 + 3  # parameter, gradient and moments are read; all but the gradient written
    return 4 * (L * (TOKENS * (wide * D + gated * F) + 5 * logits) + optimizer * parameters)


def median_seconds(fn, *args):
    fn(*args).block_until_ready()
    seconds, end = [], time.perf_counter() + 0.25
    while len(seconds) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        fn(*args).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def start(name, case):
    """The step, or what it is made of; either way a function that measures."""
    if name == "step":
        return train_cpu.start("minitext float32", case)
    from minitext.distributed import devices

    devices.start(keep_memory=True)
    import jax
    import jax.numpy as jnp

    fns = {
        name: (jax.jit(lambda a, b, e=einsum: jnp.einsum(e, a, b)), [jnp.ones(s) for s in shapes])
        for name, _, _, shapes, einsum in products(case)
    }
    copy, array = jax.jit(lambda x: x + 1), jnp.ones((TOKENS, case["mlp"]))

    def parts(_request):
        seconds = {name: median_seconds(fn, *args) for name, (fn, args) in fns.items()}
        return {
            "seconds": seconds,
            "copy": 2 * array.nbytes / median_seconds(copy, array),
            "peak": matmul_peak(),
        }

    return parts, None


def main():
    cli = parser(__doc__)
    cli.add_argument("--rounds", type=int, default=4, help="turns (default 4)")
    args = cli.parse_args()
    if args.serve:
        serve(lambda: start(args.serve, args.case))
        return
    from minitext.distributed import devices
    from minitext.models.flops import count_flops, count_params

    devices.start()
    case = SHAPES["10.7M"] | {"batch": TOKENS // SEQ_LEN, "seq_len": SEQ_LEN}
    model = config(case | {"dtype": "float32"}).model
    flops, moved = count_flops(model, TOKENS, SEQ_LEN), other_bytes(case, count_params(model))
    sides = {name: Side(__file__, name, case) for name in ("step", "parts")}
    rounds = []
    for i in range(args.rounds):
        others, step = busy(), statistics.median(sides["step"].ask(6))
        parts = sides["parts"].ask(None)
        alone = sum(count * parts["seconds"][name] for name, count, *_ in products(case))
        limit = alone + moved / parts["copy"]
        shares = {"step": flops / step / parts["peak"], "limit": flops / limit / parts["peak"]}
        rounds.append({
            "busy": others, "step_s": step, "products_s": alone, "passes_s": moved / parts["copy"], "shares": shares,
            **parts,
        })  # fmt: skip
        print(
            f"round {i + 1}/{args.rounds}  step {step * 1e3:.0f} ms, products alone {alone * 1e3:.0f}, passes "
            f"{moved / parts['copy'] * 1e3:.0f}: {shares['step']:.0%} of the peak, at most {shares['limit']:.0%}",
            flush=True,
        )
    for side in sides.values():
        side.close()
    middle = {
        key: statistics.median(r[key] for r in rounds)
        for key in ("step_s", "products_s", "passes_s", "peak", "copy")
    }
    shares = {key: statistics.median(r["shares"][key] for r in rounds) for key in ("step", "limit")}
    rates = {
        name: product_flops / statistics.median(r["seconds"][name] for r in rounds)
        for name, _, product_flops, *_ in products(case)
    }
    write_record(args.output, "step_limit", "10.7M", {
        "flops": flops, "other_bytes": moved, **middle, "shares": shares, "flops_per_second": rates, "rounds": rounds,
    })  # fmt: skip


if __name__ == "__main__":
    main()
