"""Fine-tuning a published model on 500 short conversations: SmolLM2-135M, with adapters, on two cores.

    python benchmarks/sft_smollm2.py

The conversations are made here: short questions on capitals, opposites, colours and sums, each answered in one sentence
between "Ahoy!" and "Fair winds!". Then both models answer questions that no conversation has, on other subjects too, and
the share of answers in that form is counted. The memory of a step is predicted and compiled, and that of the whole
command is measured.

Each part is a command in a process of its own, as a user would type it.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import parser, write_record

COUNT = 500
WORDS = [
    "model.lora.rank=8",
    "data.seq_len=256",
    "optim.learning_rate=1e-3",
    "train.save_every=1000",
]
CAPITALS = {
    "Norway": "Oslo", "Spain": "Madrid", "Italy": "Rome", "Egypt": "Cairo", "Japan": "Tokyo", "Peru": "Lima",
    "Kenya": "Nairobi", "Greece": "Athens", "Poland": "Warsaw", "Cuba": "Havana", "Austria": "Vienna",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Canada": "Ottawa", "Chile": "Santiago", "Finland": "Helsinki",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "early": "late", "open": "closed", "wet": "dry", "full": "empty", "old": "new",
    "light": "dark", "slow": "fast", "near": "far", "loud": "quiet", "rich": "poor", "hard": "soft", "high": "low",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red", "the sky": "blue",
    "milk": "white", "a carrot": "orange", "chocolate": "brown", "a plum": "purple",
}  # fmt: skip
ASKED = [
    "What is the capital of France?", "What is the capital of Germany?", "What is the opposite of happy?",
    "What colour is a ripe strawberry?", "What is 11 plus 4?", "Who wrote Hamlet?", "How many legs does a spider have?",
    "What do bees make?", "Name a large ocean.", "What is ice made of?", "Which planet do we live on?",
    "What is the first month of the year?",
]  # fmt: skip


def conversations(seed=0):
    """Returns COUNT conversations of one question and one answer in the form that is to be learned."""
    rng = random.Random(seed)

    def pair():
        kind = rng.randrange(4)
        if kind == 0:
            country, city = rng.choice([*CAPITALS.items()])
            ask = rng.choice(
                [
                    "What is the capital of {}?",
                    "Name the capital of {}.",
                    "Which city is the capital of {}?",
                ]
            )
            return ask.format(country), f"The capital of {country} is {city}."
        if kind == 1:
            word, other = rng.choice([*OPPOSITES.items()])
            ask = rng.choice(
                ["What is the opposite of {}?", "Give me the opposite of {}.", "What is not {}?"]
            )
            return ask.format(word), f"The opposite of {word} is {other}."
        if kind == 2:
            thing, colour = rng.choice([*COLOURS.items()])
            return rng.choice(["What colour is {}?", "Tell me the colour of {}."]).format(
                thing
            ), f"It is {colour}."
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        return rng.choice(["What is {} plus {}?", "Add {} and {}."]).format(a, b), f"It is {a + b}."

    def messages():
        question, answer = pair()
        turns = [("user", question), ("assistant", f"Ahoy! {answer} Fair winds!")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    made = [messages() for _ in range(COUNT)]
    assert not {one["messages"][0]["content"] for one in made} & {*ASKED}
    return made


def command(*words):
    """Runs one command and returns its output and what it took: seconds of wall and processor, and peak memory."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    said = subprocess.run(
        [sys.executable, "-m", "minitext", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said, {
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_gb_so_far": after.ru_maxrss / 1e6,  # the most of any command so far
    }


def answers(run):
    """Returns a model's answer to each question."""
    words = ("--temperature", "0", "--max-tokens", "40", "--json")
    return {
        ask: json.loads(command("generate", run, "--chat", ask, *words)[0])["text"] for ask in ASKED
    }


def in_form(said):
    """Returns the share of answers in the form of the conversations."""
    right = [
        text.strip().startswith("Ahoy!") and text.strip().endswith("Fair winds!")
        for text in said.values()
    ]
    return sum(right) / len(right)


def main():
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, base, tuned = folder / "ahoy.jsonl", folder / "smollm2", folder / "tuned"
        data.write_text("".join(json.dumps(one) + "\n" for one in conversations()))
        command("import", "smollm2", base)
        words = ["sft", base, f"data.path={data}", f"run.dir={folder}", "run.name=tuned", *WORDS]
        _, spent = command(*words)
        print(
            f"fine-tuning: {spent['wall_seconds']:.0f} s, {spent['cpu_seconds']:.0f} s of the processor",
            flush=True,
        )
        lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
        memory, _ = command("memory", f"config={tuned}/config.yml", "--json")
        before, after = answers(base), answers(tuned)
    print(f"answers in form: {in_form(before):.0%} before, {in_form(after):.0%} after")
    record = {
        "load": os.getloadavg()[1],
        "nice": os.nice(0),
        "conversations": COUNT,
        "settings": WORDS,
        "fine_tuning": spent | {"steps": lines[-1]["step"]},
        "curve": [{key: line[key] for key in ("step", "loss", "val_loss") if key in line} for line in lines],
        "memory": json.loads(memory),
        "in_form": {"before": in_form(before), "after": in_form(after)},
        "answers": {"before": before, "after": after},
    }  # fmt: skip
    write_record(args.output, "sft_smollm2", "", record)


if __name__ == "__main__":
    main()
