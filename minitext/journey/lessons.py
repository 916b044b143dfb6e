"""What the model learns after pretraining: to answer questions such as "What is 37+58?".

The sums are those of `minitext.data.arithmetic`. A teacher who gets one digit in four wrong shows how to
answer. A model that learns from it samples wrong answers as often as its teacher gives them, although its likeliest
answer is mostly right. Reinforcement learning from a checked reward then makes right answers likelier. One sum in
ten is held out from both.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minitext import files
from minitext.data.arithmetic import make_sums, taught, write_records
from minitext.data.placement import Split

ERRORS = 0.25  # of the teacher's digits
TAUGHT, SUMS, TEMPLATE = "taught.jsonl", "sums.jsonl", "chat_template.jinja"
# A message and an answer, a line each: short, because every token of a prompt costs as much as one of an answer.
PLAIN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)


def question(a: int, b: int) -> str:
    """Returns the question that asks for a sum."""
    return f"What is {a}+{b}?"


def questions(split: Split, **numbers: int) -> list[dict[str, Any]]:
    """Returns the sums of one part as `prompt` and `answer`; `numbers` are those of `make_sums`."""
    found = []
    for record in make_sums(split, **numbers):
        a, b = record["prompt"].rstrip("=").split("+")
        found.append({"prompt": question(int(a), int(b)), "answer": record["answer"]})
    return found


def write_lessons(folder: Path, count: int) -> dict[str, int]:
    """Writes what the teacher said, the sums to be rewarded for, and the chat template.

    Args:
      folder: to write in.
      count: answers of the teacher.

    Returns:
      How many sums there are to train on and how many are held out.
    """
    train, held_out = questions("train"), questions("validation")
    spoken = taught(train, count=count, errors=ERRORS)
    write_records(folder / TAUGHT, _pairs(spoken))
    write_records(folder / SUMS, train)
    files.write(folder / TEMPLATE, PLAIN)
    return {"train": len(train), "held_out": len(held_out)}


def _pairs(spoken: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in spoken:
        yield {key: record[key] for key in ("prompt", "completion")}
