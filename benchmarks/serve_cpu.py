"""Many texts at once on this machine's CPU: minitext's engine against transformers, the same model, one run.

    pip install torch==2.13.0 && pip install -e '.[bench,smollm2,serve]'    (on Linux, PyTorch's CPU build is enough)
    minitext import smollm2 runs/smollm2
    python benchmarks/serve_cpu.py runs/smollm2
    minitext train train.steps=1 run.name=10.7M model.layers=6 model.embed=384 model.heads=6 model.mlp=1024
    python benchmarks/serve_cpu.py runs/10.7M

All sides hold the same float32 weights, continue the same prompts of several lengths greedily, and give the same number
of tokens for each; none ends early. transformers is taken with `generate` for one text after the other, with `generate`
for all together, padded on the left, and with its continuous batching. A single text is timed too: by the engine, by
`minitext generate` and by transformers' `generate`. The server's own work isn't counted on any side.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from common import Side, busy, parser, ratio, serve, spread, turns, write_record

TOGETHER = (
    "minitext",
    "transformers one by one",
    "transformers batch",
    "transformers continuous",
)
ALONE = ("minitext", "minitext generate", "transformers one by one")


def draw_prompts(case):
    """Returns the prompts, lists of token ids of several lengths, always the same."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(case["shortest"], case["longest"] + 1, case["texts"])
    return [draw.integers(0, case["vocab"] - 1, length).tolist() for length in lengths]


def engine_side(case):
    """Returns a function of prompts for the engine: their continuations, all at once."""
    from minitext.distributed import devices

    devices.start()  # before JAX is imported: an installed libtpu would look for a TPU
    from minitext.inference.engine import Engine, EngineOptions
    from minitext.inference.requests import Request
    from minitext.training.run_dir import load_run

    cfg, params, _, _ = load_run(case["run"])
    longest = case["longest"] + case["new_tokens"]
    engine = Engine(
        cfg.model, params, EngineOptions(max_length=longest, max_sequences=case["texts"], reuse_prefixes=False)
    )  # fmt: skip

    def run(prompts):
        tokens = [[] for _ in prompts]
        for prompt, out in zip(prompts, tokens, strict=True):

            def take(event, out=out):
                if event.token is not None:
                    out.append(event.token)

            engine.submit(Request(tuple(prompt), case["new_tokens"], temperature=0), take)
        while engine.step():
            pass
        return tokens

    return run


def generate_side(case):
    """Returns the same for `minitext generate`, one prompt after the other."""
    from minitext.distributed import devices

    devices.start()
    from minitext.inference.generate import Generator, Sampling
    from minitext.training.run_dir import load_run

    cfg, params, _, _ = load_run(case["run"])
    generator = Generator(cfg.model, params, Sampling(temperature=0))

    def run(prompts):
        return [
            [int(token_B[0]) for token_B in generator.tokens(np.asarray([prompt]), max_tokens=case["new_tokens"])]
            for prompt in prompts
        ]  # fmt: skip

    return run


def torch_side(case, how):
    """Returns the same for transformers: `one by one`, `batch` or `continuous`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32).eval()
    count = case["new_tokens"]
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, eos_token_id=None
    )  # fmt: skip
    model.generation_config = greedy

    def together(prompts):
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=greedy)
        return out_BT[:, longest:].tolist()

    def continuous(prompts):
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0
        )
        found = model.generate_batch(prompts, generation_config=settings)
        outputs = sorted(found.values(), key=lambda output: int(output.request_id.split("_")[-1]))
        return [output.generated_tokens for output in outputs]

    if how == "one by one":
        return lambda prompts: [together([prompt])[0] for prompt in prompts]
    return together if how == "batch" else continuous


def start(name, case):
    """Builds one side and warms it up; it then continues all prompts, or the first alone, whenever it is asked to."""
    makers = {"minitext": engine_side, "minitext generate": generate_side}
    make = makers.get(name, partial(torch_side, how=name.removeprefix("transformers ")))
    run = make(case)
    prompts = draw_prompts(case)

    def answer(request):
        asked = prompts if request == "together" else prompts[:1]
        begin = time.perf_counter()
        tokens = run(asked)
        return {"seconds": time.perf_counter() - begin, "tokens": tokens}

    for request in [r for r, names in (("together", TOGETHER), ("alone", ALONE)) if name in names]:
        answer(request)
    return answer, None


def measure(case, names, rounds):
    """Lets the sides take turns; returns the record."""
    sides = {}
    for name in names:
        print(f"starting {name}", flush=True)
        sides[name] = Side(__file__, name, case)
    figures, others, equal = {"together": {}, "alone": {}}, [], {}
    for i in range(rounds):
        others.append(busy())
        for request, named in (("together", TOGETHER), ("alone", ALONE)):
            reference = None
            for side in [side for side in turns(sides, i) if side.name in named]:
                answer = side.ask(request)
                figures[request].setdefault(side.name, []).append(answer["seconds"])
                tokens = np.asarray(answer["tokens"])
                reference = tokens if reference is None else reference
                equal.setdefault(request, []).append(float(np.mean(tokens == reference)))
                rate = tokens.size / answer["seconds"]
                print(
                    f"round {i + 1}/{rounds}  {request:<9} {side.name:<24} {rate:7.1f} tokens/s",
                    flush=True,
                )
    for side in sides.values():
        side.close()
    results = {}
    for request, taken in figures.items():
        count = case["new_tokens"] * (case["texts"] if request == "together" else 1)
        results[request] = {
            name: {
                "tokens_per_second": count / spread(seconds)["median"],
                "times_ours": ratio(seconds, taken["minitext"]),
            }
            for name, seconds in taken.items()
        }
        print(
            f"{request}: at least {min(equal[request]):.1%} of the tokens are equal on any two sides"
        )
        for name, found in results[request].items():
            print(
                f"{name:<24} {found['tokens_per_second']:7.1f} tokens/s, "
                f"{found['times_ours']:.2f} times minitext's time"
            )
    print(f"others took {max(others):.0%} of the cores at most")
    kept = {k: v for k, v in case.items() if k not in ("run", "folder")}
    return kept | {"results": results, "equal_tokens": equal, "busy": others, "seconds": figures}


def main():
    cli = parser(__doc__)
    cli.add_argument("run", nargs="?", help="a run whose model transformers knows")
    cli.add_argument("--texts", type=int, default=32)
    cli.add_argument("--shortest", type=int, default=16, help="tokens of a prompt")
    cli.add_argument("--longest", type=int, default=128, help="tokens of a prompt")
    cli.add_argument("--new-tokens", type=int, default=32)
    cli.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    cli.add_argument("--sides", nargs="+", default=sorted({*TOGETHER, *ALONE}))
    args = cli.parse_args()
    if args.serve:
        serve(lambda: start(args.serve, args.case))
        return
    if args.run is None:
        sys.exit("name a run, such as one that minitext import smollm2 made")
    from minitext.distributed import devices

    devices.start()
    from minitext.training.interchange import export_hf

    with tempfile.TemporaryDirectory() as folder:
        export_hf(args.run, Path(folder) / "hf")
        said = json.loads((Path(folder) / "hf" / "config.json").read_text())
        case = {
            "model": said["model_type"], "vocab": said["vocab_size"], "run": args.run, "folder": f"{folder}/hf",
            "texts": args.texts, "shortest": args.shortest, "longest": args.longest, "new_tokens": args.new_tokens,
        }  # fmt: skip
        figures = measure(case, args.sides, args.rounds)
        write_record(args.output, "serve_cpu", Path(args.run).name, figures)


if __name__ == "__main__":
    main()
