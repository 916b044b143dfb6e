"""GRPO on sums, in two minutes on two cores: answers drawn by chance become right far more often, the likeliest stay right.

    python benchmarks/grpo_arithmetic.py

For each seed a model of 3 layers of 96 is taught sums such as `37+58=` by a teacher who writes another digit in place of
one in four. Then GRPO rewards right answers. Both accuracies are measured on all held-out sums, before and after: with
answers drawn as the model finds them likely, and always with its likeliest token. A last run has a careless reward, for
which it is enough that the right digits occur somewhere in the answer: its mean goes up and the share of right answers down.

Seeds run one after another, each in a process of its own; `cpu_seconds` are those of GRPO's process and the processes
that reward, compiling and evaluation included.
"""

import json
import os
import resource
import tempfile
import time
from pathlib import Path

from common import kept_case, parser, write_record

SEEDS, CARELESS_SEED = 5, 0
ERRORS = 0.25  # of the teacher's digits
TAUGHT = 60_000  # sums
SAMPLES = 4  # draws of each held-out sum
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
MODEL = [
    "model.layers=3",
    "model.embed=96",
    "model.heads=4",
    "model.kv_heads=4",
    "model.head_dim=24",
    "model.mlp=256",
]
BASE = [
    "data.source=conversations", "data.seq_len=64", "train.global_batch=32", "train.steps=400", "optim.kind=muon",
    "optim.learning_rate=3e-3", "optim.warmup_steps=30", "train.sample_tokens=0", "train.eval_every=400",
]  # fmt: skip
GRPO = [
    "objective.kind=grpo", "data.source=prompts", "data.seq_len=9", "data.validation_fraction=0.1",
    "objective.prompts=64", "objective.group=16", "objective.max_tokens=4", "objective.kl=0.05",
    "train.global_batch=1024", "train.steps=100", "train.save_every=100", "train.eval_every=100",
    "train.eval_batches=1", "train.sample_tokens=0", "optim.schedule=cosine", "optim.min_ratio=0",
    "optim.learning_rate=4e-4", "optim.b2=0.99", "optim.warmup_steps=5", "optim.weight_decay=0",
]  # fmt: skip
CARELESS = [
    "data.seq_len=15", "objective.max_tokens=10", "objective.kl=0",
    f"objective.rewards=[{{name: '{__file__}:careless'}}, {{name: exact, weight: 0}}]",
]  # fmt: skip
CURVE = (
    "step", "reward", "correct", "reward_exact", "kl", "entropy", "answer_tokens", "no_signal", "logp_mismatch_max", "seconds",
    "rollout_seconds",
)  # fmt: skip


def careless(record, answer):
    """Returns the share of the right digits that occur anywhere in the answer."""
    right = set(record["answer"])
    return len(right & set(answer)) / len(right)


def train(folder, name, words):
    from minitext.config.config import load_config
    from minitext.post_training.tasks import task_of
    from minitext.training import run

    cfg = load_config("laptop", [*MODEL, f"run.dir={folder}", f"run.name={name}", *words])
    return run.train(cfg, task=task_of(cfg))


def measure(directory, records):
    """Returns the share of right answers, drawn and likeliest."""
    from minitext.inference.engine import Engine, EngineOptions
    from minitext.inference.requests import Request
    from minitext.training.run_dir import load_run

    cfg, params, tokenizer, _ = load_run(directory)
    options = EngineOptions(
        page_tokens=8, cache_tokens=256 * 24, max_sequences=256, max_length=24, max_waiting=1 << 20, row_sizes=(256,)
    )  # fmt: skip
    engine, said = Engine(cfg.model, params, options), {}
    for greedy in (False, True):
        for number, record in enumerate(records):
            request = Request(
                tuple(tokenizer.encode(record["prompt"])), 10, n=1 if greedy else SAMPLES, seed=number,
                temperature=0.0 if greedy else 1.0, stop_ids=frozenset([tokenizer.eod_id]),
            )  # fmt: skip

            def hear(event, number=number, greedy=greedy):
                if event.token is not None:
                    said.setdefault((greedy, number, event.sample), []).append(event.token)

            engine.submit(request, hear)
    while engine.step():
        pass
    right = {True: [], False: []}
    for number, record in enumerate(records):
        for greedy, n in ((True, 1), (False, SAMPLES)):
            right[greedy] += [
                tokenizer.decode(said.get((greedy, number, i), [])) == record["answer"] for i in range(n)
            ]  # fmt: skip
    return {
        "sampled": sum(right[False]) / len(right[False]),
        "greedy": sum(right[True]) / len(right[True]),
    }


def cpu_seconds():
    """Returns the processor's seconds of this process and of those it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def one(case):
    """In a process of its own: teaches the base of a seed if it isn't there, or lets it learn from rewards."""
    from minitext.data.arithmetic import make_sums, taught, write_records
    from minitext.distributed import devices
    from minitext.observability.metrics import read_metrics

    devices.start()
    devices.use_compilation_cache()  # as the commands do: later seeds compile less
    folder, seed = Path(case["folder"]), case["seed"]
    template = folder / "plain.jinja"
    template.write_text(TEMPLATE)
    seeds = [f"train.seed={seed}", f"data.seed={seed}", f"data.chat_template={template}"]
    base, held_out = folder / f"base{seed}", make_sums("validation")
    began, cpu = time.perf_counter(), cpu_seconds()
    if case["what"] == "base":
        path = folder / f"taught{seed}.jsonl"
        records = taught(make_sums("train", seed=seed), count=TAUGHT, errors=ERRORS, seed=seed)
        write_records(path, [{key: r[key] for key in ("prompt", "completion")} for r in records])
        directory, more = train(folder, base.name, [*BASE, *seeds, f"data.path={path}"]), {}
    else:
        path = folder / "sums.jsonl"
        write_records(path, make_sums("train"))
        words = [*GRPO, *seeds, f"data.path={path}", f"checkpoint.load_parameters={base}"]
        words += CARELESS if case["what"] == "careless" else []
        directory = train(folder, f"{case['what']}{seed}", words)
        curve = [
            {key: line[key] for key in CURVE if key in line} for line in read_metrics(directory)
        ]
        more = {"curve": curve[::5] + curve[-1:]}
    spent = {"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - cpu}
    return spent | measure(directory, held_out) | more


def main():
    cli = parser(__doc__)
    cli.add_argument(
        "--folder", help="where runs are kept, to go on with; by default they are deleted"
    )
    args = cli.parse_args()
    if args.case:
        print(json.dumps(one(args.case)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(exist_ok=True)

        def run(what, seed):
            case = {"folder": str(folder), "what": what, "seed": seed}
            found = kept_case(__file__, folder / f"{what}{seed}.json", case)
            print(
                f"{what} of seed {seed}: sampled {found['sampled']:.3f}, greedy {found['greedy']:.3f}, "
                f"{found['wall_seconds']:.0f} s, {found['cpu_seconds']:.0f} s of CPU",
                flush=True,
            )
            return found

        rows = []
        for seed in range(SEEDS):
            before, after = run("base", seed), run("grpo", seed)
            holds = (
                after["sampled"] - before["sampled"] >= 0.25 and after["greedy"] >= before["greedy"]
            )
            rows.append({"seed": seed, "before": before, "after": after, "holds": holds})
        hacked = run("careless", CARELESS_SEED)
    print(f"holds for {sum(row['holds'] for row in rows)} of {SEEDS} seeds")
    settings = {
        "model": MODEL,
        "base": BASE,
        "grpo": GRPO,
        "careless": CARELESS[:-1],
        "errors": ERRORS,
    }
    record = {"settings": settings, "load": os.getloadavg()[1], "seeds": rows, "careless": hacked}
    write_record(args.output, "grpo_arithmetic", "", record)


if __name__ == "__main__":
    main()
