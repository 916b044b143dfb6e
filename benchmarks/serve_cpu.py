"""Many texts at once on this machine's CPU: minitext's engine against transformers, the same model, one run.

    pip install torch==2.13.0 && pip install -e '.[bench,smollm2,serve]'    (on Linux, PyTorch's CPU build is enough)
    minitext import smollm2 runs/smollm2
    python benchmarks/serve_cpu.py runs/smollm2
    minitext train train.steps=1 run.name=10.7M model.layers=6 model.embed=384 model.heads=6 model.mlp=1024
    python benchmarks/serve_cpu.py runs/10.7M

All sides hold the same float32 weights, continue the same prompts of several lengths greedily, and give the tokens that
are asked for each; none ends early. With --shortest-answer answers have several lengths too, and only what was asked for
counts. transformers is taken with `generate` for one text after the other, with `generate` for all together, padded on
the left and up to the longest answer, and with its continuous batching, whose answers can't be asked for one by one. A single text is timed too: by the engine, by
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


def draw_texts(case):
    """Returns prompts, lists of token ids of several lengths, and how many tokens to answer; always the same."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(case["shortest"], case["longest"] + 1, case["texts"])
    prompts = [draw.integers(0, case["vocab"] - 1, length).tolist() for length in lengths]
    answers = draw.integers(case["shortest_answer"], case["new_tokens"] + 1, case["texts"])
    return list(zip(prompts, answers.tolist(), strict=True))


def engine_side(case):
    """Returns a function of texts for the engine: their continuations, all at once."""
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

    def run(texts):
        tokens = [[] for _ in texts]
        for (prompt, answer), out in zip(texts, tokens, strict=True):

            def take(event, out=out):
                if event.token is not None:
                    out.append(event.token)

            engine.submit(Request(tuple(prompt), answer, temperature=0), take)
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

    def run(texts):
        return [
            [int(token_B[0]) for token_B in generator.tokens(np.asarray([prompt]), max_tokens=answer)]
            for prompt, answer in texts
        ]  # fmt: skip

    return run


def torch_side(case, how):
    """Returns the same for transformers: `one by one`, `batch` or `continuous`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32).eval()

    def greedy(count):
        return GenerationConfig(
            do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, eos_token_id=None
        )  # fmt: skip

    def together(texts):
        longest, most = (max(each) for each in zip(*((len(p), n) for p, n in texts), strict=True))
        ids_BT = torch.tensor([[0] * (longest - len(p)) + p for p, _ in texts])
        mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in texts])
        model.generation_config = greedy(most)
        out_BT = model.generate(ids_BT, attention_mask=mask_BT)
        return [
            row[longest : longest + n] for row, (_, n) in zip(out_BT.tolist(), texts, strict=True)
        ]

    def continuous(texts):
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=max(n for _, n in texts), eos_token_id=-1, pad_token_id=0
        )  # fmt: skip
        model.generation_config = settings
        found = model.generate_batch([prompt for prompt, _ in texts], generation_config=settings)
        outputs = sorted(found.values(), key=lambda output: int(output.request_id.split("_")[-1]))
        return [output.generated_tokens[:n] for output, (_, n) in zip(outputs, texts, strict=True)]

    if how == "one by one":
        return lambda texts: [together([text])[0] for text in texts]
    return together if how == "batch" else continuous


def start(name, case):
    """Builds one side and warms it up; it then continues all prompts, or the first alone, whenever it is asked to."""
    makers = {"minitext": engine_side, "minitext generate": generate_side}
    make = makers.get(name, partial(torch_side, how=name.removeprefix("transformers ")))
    run = make(case)
    texts = draw_texts(case)

    def answer(request):
        asked = texts if request == "together" else texts[:1]
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
                tokens = np.concatenate(answer["tokens"])
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
        answers = [answer for _, answer in draw_texts(case)]
        count = sum(answers) if request == "together" else answers[0]
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
    cli.add_argument(
        "--shortest-answer", type=int, help="of answers of several lengths, up to --new-tokens"
    )
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
            "shortest_answer": args.shortest_answer or args.new_tokens,
        }  # fmt: skip
        figures = measure(case, args.sides, args.rounds)
        name = Path(args.run).name + ("-answers" if args.shortest_answer else "")
        write_record(args.output, "serve_cpu", name, figures)


if __name__ == "__main__":
    main()
