"""The GPU kernels beside what there is without them, on one GPU.

    pip install -e '.[aot-gpu]'
    python benchmarks/kernels_gpu.py
    python benchmarks/kernels_gpu.py --tiles    (also tries other tiles for every kernel)

It can't run on a machine without a GPU: it then prints one line and exits with 2. Flash attention is compared with
cuDNN's, forward and with gradients, at 4 rows of 4,096 tokens with the heads of llama3-8b; the grouped matmul with
`jax.lax.ragged_dot`, at the expert shapes of mixtral-8x7b and 8,192 tokens, with uneven groups. All is bfloat16. The
sides take turns: a round times each of them over a few calls that follow one another without waiting. A ratio is the
median over rounds of their time over ours, so more than 1 is faster. Results are compared too, because a kernel that is
wrong may well be fast.
"""

import functools
import statistics
import sys
import time

from common import parser, ratio, spread, write_record

CALLS = 10  # of a side in a round
ATTENTION = {"B": 4, "T": 4096, "N": 32, "K": 8, "H": 128}
GROUPED = {
    "M": 16384,
    "D": 4096,
    "F": 14336,
    "sizes": [4096, 3000, 2500, 2000, 1900, 1500, 1388, 0],
}


def attention_sides(tiles=None):
    """Returns the arguments, and ours and cuDNN's attention of them."""
    import jax

    from minitext.kernels.attention import gpu as flash_attention_gpu

    B, T, N, K, H = (ATTENTION[letter] for letter in "BTNKH")
    keys = jax.random.split(jax.random.key(0), 3)
    args = [
        jax.random.normal(key, (B, T, n, H), "bfloat16")
        for key, n in zip(keys, (N, K, K), strict=True)
    ]
    ours = functools.partial(flash_attention_gpu.flash_attention, blocks=tiles)
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return args, {"minitext": ours, "cudnn": cudnn}


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


def forward_flops():
    """Model FLOPs of one call of each operation; its gradients are 2.5 and 2 times as much."""
    B, T, N, _, H = (ATTENTION[letter] for letter in "BTNKH")
    M, D, F, _ = GROUPED.values()
    return {"attention": (2 * B * N * T * T * H, 2.5), "grouped_matmul": (2 * M * D * F, 2)}


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


def compare(args, sides, gradients, rounds, flops):
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
        "tflops_per_second": {name: flops / statistics.median(of_rounds) / 1e12 for name, of_rounds in seconds.items()},
        "ratio": ratio(seconds[theirs], seconds[ours]), "against": theirs, "greatest_relative_difference": max(apart),
    }  # fmt: skip


def candidates():
    """Yields (operation, kernel, tile, all tiles): each kernel's own tile is varied, and the others stay."""
    from minitext.kernels.attention import gpu as flash
    from minitext.kernels.grouped_matmul import gpu as grouped

    for kernel in flash.BLOCKS._fields:
        for q, k in ((64, 64), (64, 128), (128, 64), (128, 128)):
            for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3)):
                tile = flash.Tile(q, k, warps, stages)
                yield "attention", kernel, tile, flash.BLOCKS._replace(**{kernel: tile})
    for kernel in grouped.TILES._fields:
        for rows, columns in ((128, 128), (128, 256), (64, 256), (256, 128)):
            for step, warps, stages in ((64, 8, 3), (64, 8, 4), (32, 8, 4), (64, 4, 3)):
                tile = grouped.Tile(rows, columns, step, warps, stages)
                yield "grouped_matmul", kernel, tile, grouped.TILES._replace(**{kernel: tile})


def sweep():
    """Times ours with every candidate; a tile that does not fit the chip has no seconds."""
    import jax

    made, found = {"attention": attention_sides, "grouped_matmul": grouped_sides}, []
    for op, kernel, tile, tiles in candidates():
        args, sides = made[op](tiles)
        run, given = prepared(args, sides["minitext"], gradients=True)
        try:
            seconds = min(seconds_of(run, given) for _ in range(3))
        except jax.errors.JaxRuntimeError as error:
            print(f"{op} {kernel} {tile}: {str(error).splitlines()[0][:80]}", flush=True)
            seconds = None
        else:
            print(f"{op} {kernel} {tile}: {seconds * 1e3:.3f} ms", flush=True)
        found.append({"op": op, "kernel": kernel, "tile": tile._asdict(), "seconds": seconds})
    return found


def main():
    cli = parser(__doc__)
    cli.add_argument("--rounds", type=int, default=10, help="rounds of a case (default 10)")
    cli.add_argument("--tiles", action="store_true", help="also try other tiles for every kernel")
    args = cli.parse_args()
    import jax

    from minitext.distributed import devices

    if not devices.accelerator_is_visible() or jax.default_backend() != "gpu":
        print(
            "kernels_gpu needs a GPU and JAX's CUDA plugin, and JAX finds none here",
            file=sys.stderr,
        )
        sys.exit(2)
    cases = {}
    for op, make in (("attention", attention_sides), ("grouped_matmul", grouped_sides)):
        flops, backward = forward_flops()[op]
        for gradients in (False, True):
            name = op + (" with gradients" if gradients else "")
            total = flops * (1 + backward * gradients)
            found = cases[name] = compare(*make(), gradients, args.rounds, total)
            speeds = ", ".join(
                f"{side} {rate:.0f} TFLOP/s" for side, rate in found["tflops_per_second"].items()
            )
            print(f"{name}: {found['ratio']:.2f} times {found['against']} ({speeds})", flush=True)
    figures = {
        "device": jax.devices()[0].device_kind, "shapes": {"attention": ATTENTION, "grouped_matmul": GROUPED},
        "cases": cases,
    }  # fmt: skip
    if args.tiles:
        figures["tiles"] = sweep()
    write_record(args.output, "kernels_gpu", "", figures)


if __name__ == "__main__":
    main()
