"""Generation speed on one GPU: minitext against Hugging Face `generate`, the same weights, one run.

    pip install -e '.[aot-gpu]' torch transformers
    python benchmarks/decode_gpu.py

It can't run on a machine without a GPU: it then prints one line and exits with 2. The model is train_gpu's of about 1B
parameters in bfloat16, with random weights; prompts of 512 tokens are continued greedily by 128, with no token that
ends the text. The time to the first token is that of the prefill; the tokens after it give the decode speed. A decode
step must read every weight but the embedding's, and the keys and values so far: that over the data sheet's bandwidth is
the least it can take. Random weights have ties in bfloat16, so tokens aren't compared: `check_gpu.py` does that.
"""

import os
import statistics
import sys
import tempfile

import decode_cpu
from common import Side, parser, ratio, require_gpu, serve, turns, write_record
from train_gpu import SHAPES

SHAPE = SHAPES["1B"] | {"vocab": 32000}
OPTIONS = {"transformers": (None, False), "transformers compiled": ("static", True)}
SIDES = ("minitext", *OPTIONS)
BATCHES = (1, 32)


def draw_params(cfg):
    """Draws random bfloat16 weights, always the same."""
    import jax

    return jax.tree.map(lambda x: x.astype("bfloat16"), decode_cpu.draw_params(cfg))


def start(name, case):
    """Builds one side and warms it up; it then generates from the same prompts whenever it is asked to."""
    if name == "minitext":
        from minitext.inference.generate import Generator, Sampling

        cfg = decode_cpu.config(case["shape"]).model_copy(update={"dtype": "bfloat16"})
        generator = Generator(cfg, draw_params(cfg), Sampling(temperature=0))

        def stream(prompt_BT, max_tokens, put):
            for token_B in generator.tokens(prompt_BT, max_tokens=max_tokens):
                put(token_B)
    else:
        stream = decode_cpu.torch_stream(case, *OPTIONS[name], device="cuda", dtype="bfloat16")
    return decode_cpu.timed(stream, case)


def measure(case, names, rounds, bandwidth):
    """Alternates the sides at one batch size; returns its record."""
    cfg, steps = decode_cpu.config(case["shape"]), case["new_tokens"] - 1
    size = decode_cpu.step_bytes(cfg, case["batch"], case["prompt_length"], case["new_tokens"]) // 2
    least = size / bandwidth
    sides = {name: Side(__file__, name, case) for name in names}
    figures = {name: {"prefill": [], "decode": []} for name in names}
    for i in range(rounds):
        for side in turns(sides, i):
            answer = side.ask(None)
            for part in ("prefill", "decode"):
                figures[side.name][part].append(answer[part])
    for side in sides.values():
        side.close()
    results = {}
    for name, taken in figures.items():
        step = statistics.median(taken["decode"]) / steps
        results[name] = result = {
            "prefill_ms": statistics.median(taken["prefill"]) * 1e3,
            "tokens_per_second": case["batch"] / step, "ms_per_step": step * 1e3, "share_of_bandwidth": least / step,
            "prefill_ratio": ratio(taken["prefill"], figures["minitext"]["prefill"]),
            "decode_ratio": ratio(taken["decode"], figures["minitext"]["decode"]),
        }  # fmt: skip
        print(
            f"batch {case['batch']:>3} {name:<22} {result['prefill_ms']:7.1f} ms prefill "
            f"({result['prefill_ratio']:.2f}x ours), {result['tokens_per_second']:8.0f} tokens/s "
            f"({result['decode_ratio']:.2f}x our time), {least / step:.0%} of bandwidth",
            flush=True,
        )
    kept = {k: v for k, v in case.items() if k != "weights"}
    return {**kept, "step_bytes": size, "results": results, "seconds": figures}


def main():
    cli = parser(__doc__)
    cli.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    cli.add_argument("--prompt-length", type=int, default=512)
    cli.add_argument("--new-tokens", type=int, default=128)
    cli.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    cli.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    args = cli.parse_args()
    require_gpu(__file__)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the sides share the GPU's memory
    if args.serve:
        serve(lambda: start(args.serve, args.case))
        return
    import jax

    from minitext.hardware import find_chip

    device = jax.devices()[0]
    chip = find_chip(device)
    if chip is None:
        sys.exit(f"the bandwidth of a {device.device_kind} is unknown: add it to minitext.hardware")
    with tempfile.TemporaryDirectory() as folder:
        case = {
            "shape": SHAPE, "prompt_length": args.prompt_length, "new_tokens": args.new_tokens,
            "weights": decode_cpu.write_weights(SHAPE, folder) if {*args.sides} & {*OPTIONS} else None,
        }  # fmt: skip
        cases = [
            measure(case | {"batch": batch}, args.sides, args.rounds, chip.hbm_bandwidth)
            for batch in args.batch
        ]
    write_record(args.output, "decode_gpu", "", {"device": device.device_kind, "cases": cases})


if __name__ == "__main__":
    main()
