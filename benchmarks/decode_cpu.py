"""Generation speed on this machine's CPU: minitext against Hugging Face `generate`, the same weights, one run.

    pip install torch==2.13.0 && pip install -e '.[bench]'    (on Linux, PyTorch's CPU build is enough)
    python benchmarks/decode_cpu.py

All sides hold the same random float32 weights and continue the same prompts greedily, with no token that ends the
text. The time to the first token is that of the prefill; the tokens after it give the decode speed. Hugging Face is
taken with its default cache, with its static cache, and with that one compiled. A decode step must read every weight
but the embedding's, and the keys and values so far: those bytes over the rate at which this machine reads an array of
that size (which may stay in the processor's cache), and one of 512 MiB (which can't), are the least it can take.
"""

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from common import Side, busy, parser, ratio, read_bandwidth, serve, turns, write_record

SHAPE = {"layers": 6, "embed": 384, "heads": 6, "mlp": 1024, "vocab": 256}
SIDES = ("minitext", "transformers", "transformers static", "transformers compiled")
BATCHES = (1, 8, 32)
LARGE = 512 * 2**20


def config(shape):
    """Returns minitext's model configuration of a shape, otherwise that of the preset laptop."""
    from minitext.config.config import load_config

    return load_config("laptop", [f"model.{key}={value}" for key, value in shape.items()]).model


def draw_params(cfg):
    """Draws random weights, always the same."""
    import jax
    from flax import nnx

    from minitext.models.transformer import Transformer

    return jax.jit(lambda: nnx.state(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param))()


def draw_prompts(case):
    """Returns the prompts, [B, T], always the same."""
    shape = (case["batch"], case["prompt_length"])
    return np.random.default_rng(0).integers(0, case["shape"]["vocab"], shape)


def llama_state_dict(params):
    """Returns minitext's parameters under the names, and in the layout, of Hugging Face's Llama.

    A stacked [L, in, out] weight becomes L weights [out, in]. Rotary pairs, norms and the gated feed-forward layer are
    the same in both.
    """
    from minitext.checkpoint import leaves

    ours = {name: np.asarray(value) for name, value in leaves.named(params).items()}
    theirs = {
        "model.embed_tokens.weight": ours["embed.table"],
        "model.norm.weight": ours["norm.scale"],
        "lm_head.weight": ours["unembed.w"].T,
    }
    for i in range(len(ours["blocks.norm_ffn.scale"])):
        layer = f"model.layers.{i}"
        theirs[f"{layer}.input_layernorm.weight"] = ours["blocks.norm_attention.scale"][i]
        theirs[f"{layer}.post_attention_layernorm.weight"] = ours["blocks.norm_ffn.scale"][i]
        for name in "qkvo":
            theirs[f"{layer}.self_attn.{name}_proj.weight"] = ours[f"blocks.attention.{name}.w"][
                i
            ].T
        for name in ("gate", "up", "down"):
            theirs[f"{layer}.mlp.{name}_proj.weight"] = ours[f"blocks.ffn.{name}.w"][i].T
    return theirs


def write_weights(shape, folder):
    """Writes the weights for Hugging Face's model, and returns the file."""
    path = str(Path(folder, "weights.npz"))
    np.savez(path, **llama_state_dict(draw_params(config(shape))))
    return path


def minitext_stream(case):
    """Returns a function that calls `put` with the next token of every prompt, [B], as soon as it is there."""
    from minitext.distributed import devices

    devices.start()  # before JAX is imported: an installed libtpu would look for a TPU
    from minitext.inference.generate import Generator, Sampling

    cfg = config(case["shape"])
    generator = Generator(cfg, draw_params(cfg), Sampling(temperature=0))

    def stream(prompt_BT, max_tokens, put):
        for token_B in generator.tokens(prompt_BT, max_tokens=max_tokens):
            put(token_B)

    return stream


def torch_stream(case, cache, compiled, device="cpu", dtype="float32"):
    """Returns the same for Hugging Face's Llama and `generate`."""
    import torch
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    shape = case["shape"]
    cfg = config(shape)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["embed"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"],
        rms_norm_eps=cfg.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": cfg.rope.theta},
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )).eval()  # fmt: skip
    with np.load(case["weights"]) as file:
        model.load_state_dict({name: torch.from_numpy(file[name].copy()) for name in file})
    model = model.to(device, getattr(torch, dtype))
    options = {"do_sample": False, "cache_implementation": cache}
    if compiled:
        options["compile_config"] = CompileConfig(mode="default")
        options[
            "compile_config"
        ]._compile_all_devices = True  # transformers compiles only on accelerators else

    def stream(prompt_BT, max_tokens, put):
        streamer = SimpleNamespace(put=put, end=lambda: None)
        model.generate(
            torch.from_numpy(prompt_BT).to(device),
            attention_mask=torch.ones(prompt_BT.shape, dtype=torch.long, device=device),
            min_new_tokens=max_tokens, max_new_tokens=max_tokens, streamer=streamer, **options,
        )  # fmt: skip

    return stream


def start(name, case):
    """Builds one side and warms it up; it then generates from the same prompts whenever it is asked to."""
    torch_options = {
        "transformers": (None, False),
        "transformers static": ("static", False),
        "transformers compiled": ("static", True),
    }
    stream = (
        minitext_stream(case) if name == "minitext" else torch_stream(case, *torch_options[name])
    )
    return timed(stream, case)


def timed(stream, case):
    """Returns what times a stream, which is warm, whenever it is called, and what to say when warm."""
    prompt_BT = draw_prompts(case)

    def generate(_request):
        times, tokens = [], []

        def put(token_B):
            token_B = np.asarray(token_B)
            if token_B.ndim == 1:  # Hugging Face's streamer is given the prompt first
                tokens.append(token_B.tolist())
                times.append(time.perf_counter())

        begin = time.perf_counter()
        stream(prompt_BT, case["new_tokens"], put)
        return {"prefill": times[0] - begin, "decode": times[-1] - times[0], "tokens": tokens}

    for _ in range(2):  # the second time nothing is left to compile
        generate(None)
    return generate, None


def step_bytes(cfg, batch, prompt_length, new_tokens):
    """Returns the bytes that the average decode step must read: weights, and keys and values of the tokens so far."""
    from minitext.models.flops import count_params

    weights = count_params(cfg) - cfg.vocab * cfg.embed
    seen = prompt_length + new_tokens / 2
    return int(4 * (weights + 2 * cfg.layers * batch * seen * cfg.K * cfg.H))


def first_difference(case, ours_TB, theirs_TB):
    """Returns where the first row that differs begins to, and how far apart the two tokens' logits are; else None.

    The distance is in standard deviations of the logits there: about 1e-5 and less is float32's rounding, a tie.
    """
    different = (ours_TB != theirs_TB).any(axis=0)
    if not different.any():
        return None
    import jax
    from flax import nnx

    from minitext.models.transformer import Transformer

    cfg, row = config(case["shape"]), int(different.argmax())
    place = int((ours_TB != theirs_TB)[:, row].argmax())
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    text = np.concatenate([draw_prompts(case)[row], ours_TB[:place, row]])[None]
    logits = jax.jit(lambda t: nnx.merge(graphdef, draw_params(cfg))(t)[0, -1])(text)
    gap = abs(logits[ours_TB[place, row]] - logits[theirs_TB[place, row]]) / logits.std()
    rows = int(different.sum())
    return {"rows_that_differ": rows, "row": row, "place": place, "logits_apart": float(gap)}


def measure(case, names, rounds):
    """Alternates the sides at one batch size; returns its record."""
    cfg, steps = config(case["shape"]), case["new_tokens"] - 1
    size = step_bytes(cfg, case["batch"], case["prompt_length"], case["new_tokens"])
    sides = {}
    for name in names:
        print(f"starting {name}", flush=True)
        sides[name] = Side(__file__, name, case)
    figures = {name: {"prefill": [], "decode": []} for name in names}
    tokens, others, bandwidth = {}, [], {"step": [], "large": []}
    for i in range(rounds):
        others.append(busy())
        bandwidth["step"].append(read_bandwidth(size))
        bandwidth["large"].append(read_bandwidth(LARGE))
        for side in turns(sides, i):
            answer = side.ask(None)
            tokens[side.name] = np.array(answer["tokens"])
            for part in ("prefill", "decode"):
                figures[side.name][part].append(answer[part])
            print(
                f"round {i + 1}/{rounds}  {side.name:<22} {answer['prefill'] * 1e3:7.1f} ms prefill, "
                f"{case['batch'] * steps / answer['decode']:8.0f} tokens/s",
                flush=True,
            )
    for side in sides.values():
        side.close()
    ours, results = figures["minitext"], {}
    print(
        f"batch {case['batch']}: {size / 1e6:.0f} MB a step; others took {max(others):.0%} of the cores at most"
    )
    for name, taken in figures.items():
        step = statistics.median(taken["decode"]) / steps
        difference = first_difference(case, tokens["minitext"], tokens[name])
        results[name] = result = {
            "prefill_ms": statistics.median(taken["prefill"]) * 1e3,
            "tokens_per_second": case["batch"] / step,
            "ms_per_step": step * 1e3,
            "bandwidth_share": {
                kind: size / step / statistics.median(rates) for kind, rates in bandwidth.items()
            },
            "prefill_ratio": ratio(taken["prefill"], ours["prefill"]),
            "decode_ratio": ratio(taken["decode"], ours["decode"]),
            "same_tokens": difference is None,
            "first_difference": difference,
        }
        print(
            f"{name:<22} {result['prefill_ms']:7.1f} ms prefill ({result['prefill_ratio']:.2f}x ours) "
            f"{result['tokens_per_second']:8.0f} tokens/s ({result['decode_ratio']:.2f}x our time), "
            f"{result['bandwidth_share']['step']:.0%} of bandwidth, "
            + ("the same tokens" if difference is None else f"tokens differ: {difference}")
        )
    return {
        **{k: v for k, v in case.items() if k != "weights"}, "step_bytes": size, "results": results,
        "bandwidth": bandwidth, "busy": others, "seconds": figures,
    }  # fmt: skip


def main():
    cli = parser(__doc__)
    cli.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    cli.add_argument("--prompt-length", type=int, default=64)
    cli.add_argument("--new-tokens", type=int, default=128)
    cli.add_argument("--rounds", type=int, default=5, help="turns of each side (default 5)")
    cli.add_argument(
        "--without-compile",
        action="store_true",
        help="leave the compiled side out (needs a C++ compiler)",
    )
    args = cli.parse_args()
    if args.serve:
        serve(lambda: start(args.serve, args.case))
        return
    from minitext.distributed import devices

    devices.start()
    names = [name for name in SIDES if not (args.without_compile and name.endswith("compiled"))]
    with tempfile.TemporaryDirectory() as folder:
        weights = write_weights(SHAPE, folder)
        for batch in args.batch:
            case = {
                "shape": SHAPE, "batch": batch, "prompt_length": args.prompt_length,
                "new_tokens": args.new_tokens, "weights": weights,
            }  # fmt: skip
            write_record(
                args.output, "decode_cpu", f"10.7M-batch{batch}", measure(case, names, args.rounds)
            )


if __name__ == "__main__":
    main()
