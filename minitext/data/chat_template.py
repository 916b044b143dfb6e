"""Renders a chat template, in a process of its own that may use little time and memory.

A template comes with somebody's weights, and it's a program. Jinja's sandbox keeps it from Python's objects, but not
from running for an hour or asking for all memory, so `minitext.data.chat` runs this file as a program: jobs as
lines of JSON on stdin, the text or an error of each as a line on stdout. Each job has a process of its own, a fork of
this one, which takes milliseconds because Jinja is loaded. macOS doesn't enforce a limit of memory; there time alone
ends it.

The environment is that of transformers' `apply_chat_template`, so that both render the same.

Source: `transformers/utils/chat_template_utils.py`.

Chapters: 23.
"""

import datetime
import json
import os
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS, MEMORY_BYTES, MOST_CHARACTERS = 3, 512 << 20, 1 << 20


class Generation(Extension):
    """The tag `generation`, which marks what the model said; it's rendered as if it weren't there.

    Where the marks are asked for, `opening` and `closing` of the environment are written around it.
    """

    tags: ClassVar = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Returns what is between the tag and its end."""
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (
            nodes.Output([nodes.TemplateData(getattr(self.environment, name, ""))], lineno=line)
            for name in ("opening", "closing")
        )
        return nodes.Scope([opening, *inside, closing], lineno=line)


def render(job: dict[str, Any]) -> str:
    """Renders `job["template"]` with the variables `job["values"]`.

    Raises:
        TemplateError: it isn't a template, or refuses the values.
    """
    return load(job["template"]).render(**job["values"])


def render_all(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Renders `job["template"]` with each of the variables `job["all"]`.

    Returns:
        For each `text`, or `error`; with `job["marks"]` also `spans`, where what is marked begins and ends.
    """
    plain = load(job["template"])
    word = secrets.token_hex(8)  # no conversation has it
    marks = (f"<{word}>", f"</{word}>")
    marked = load(job["template"], *marks) if job["marks"] else None
    return [_answer(lambda v=v: _spans(plain, marked, marks, v)) for v in job["all"]]


def _spans(
    plain: Template, marked: Template | None, marks: tuple[str, str], values: dict[str, Any]
) -> dict[str, Any]:
    text = _checked(plain.render(**values))
    if marked is None:
        return {"text": text}
    pieces, spans, at, opened = (
        re.split("(" + "|".join(marks) + ")", marked.render(**values)),
        [],
        0,
        None,
    )
    for piece in pieces:
        if piece == marks[0] and opened is None:
            opened = at
        elif piece == marks[1] and opened is not None:
            spans.append((opened, at))
            opened = None
        elif piece not in marks:
            at += len(piece)
        else:
            raise TemplateError("it has a generation tag in another one")
    if opened is not None or "".join(p for p in pieces if p not in marks) != text:
        raise TemplateError("what it does with the text of a generation tag makes the tag useless")
    return {"text": text, "spans": spans}


def load(template: str, opening: str = "", closing: str = "") -> Template:
    """Compiles a template, with texts to write around what its tag `generation` marks.

    Raises:
        TemplateError: it isn't a template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.extend(opening=opening, closing=closing)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _limit(kind: int, amount: int) -> None:
    _, most = resource.getrlimit(kind)
    amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
    resource.setrlimit(kind, (amount, most))


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the text or an error, or of a job of many `found`; the process may use little from then on."""
    _limit(resource.RLIMIT_CPU, CPU_SECONDS)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    if "all" in job:
        return _answer(lambda: {"found": render_all(job)})
    return _answer(lambda: {"text": _checked(render(job))})


def _checked(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise TemplateError(f"it makes {len(text):,} characters of the messages")
    return text


def _answer(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return function()
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself too often, or has too many brackets in brackets"}
    except Exception as error:  # a template may raise what any operation of Python's raises
        return {"error": str(error) or type(error).__name__}


def in_a_fork(job: dict[str, Any]) -> str:
    """Returns the JSON of what `answer` returns in a process of its own."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with open(writing, "w") as pipe:
            json.dump(answer(job), pipe)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):  # of the processor's time, or for want of stack
        return json.dumps({"error": "it takes too long or goes too deep"})
    return text


def main() -> None:
    """Answers jobs until there are no more. Ctrl-C is for whoever asks, who then closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        print(in_a_fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
