"""The report of a journey: one page of HTML that needs nothing else, made of what the stages left on disk.

All figures except times are the same for the same dial on the same machine, however often the journey was interrupted.
`report.json` keeps the two apart.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from minitext import files
from minitext.journey import dial
from minitext.journey.chart import Axis, Line, chart
from minitext.journey.scaling import Law
from minitext.journey.trip import Trip
from minitext.terminal import show_bytes

PAGE, NUMBERS = "report.html", "report.json"
TITLES = {
    "data": "Data", "tokenizer": "Tokenizer", "scaling": "Scaling study", "pretrain": "Pretraining",
    "evaluate": "Evaluation", "sft": "Supervised fine-tuning", "grpo": "Reinforcement learning",
    "quantize": "Quantization", "export": "Export", "serve": "Serving",
}  # fmt: skip


def write(trip: Trip, stages: Sequence[str]) -> Path:
    """Writes the page and the numbers of the stages that are done; returns the page's path."""
    found = collect(trip, stages)
    files.write(trip.directory / NUMBERS, json.dumps(found, indent=1) + "\n")
    files.write(trip.directory / PAGE, page(found))
    return trip.directory / PAGE


def collect(trip: Trip, stages: Sequence[str]) -> dict[str, Any]:
    """Returns all numbers: `figures` that are the same each time, and `times`."""
    results = {name: found for name in stages if (found := trip.result(name)) is not None}
    figures = {"asked": trip.asked(), "stages": {name: r.figures for name, r in results.items()}}
    attempts = trip.attempts()
    times: dict[str, Any] = {"stages": {}}
    for name in stages:
        whole = [a for a in attempts if a.stage == name]
        cut = [a.seconds for a in whole if not a.done]
        times["stages"][name] = {
            "seconds": sum(a.seconds for a in whole), "interrupted": len(cut), "interrupted_seconds": sum(cut),
            "found": results[name].times if name in results else {},
        }  # fmt: skip
    wall = sum(a.seconds for a in attempts)
    useful = sum(t["found"].get("seconds", {}).get("step", 0.0) for t in times["stages"].values())
    return {"figures": figures, "times": times | {"wall": wall, "useful": useful}}


def page(found: dict[str, Any]) -> str:
    """Returns the page."""
    stages, asked = found["figures"]["stages"], found["figures"]["asked"]
    parts = [_summary(found), _dial(asked)]
    for name, section in SECTIONS.items():
        if name in stages:
            parts.append(f'<section id="{name}"><h2>{TITLES[name]}</h2>{section(stages)}</section>')
    parts.append(f'<section id="times"><h2>Time and cost</h2>{_times(found)}</section>')
    here = "".join(f'<a href="#{n}">{TITLES[n]}</a>' for n in SECTIONS if n in stages)
    title = f"A journey of depth {asked['recipe']['depth']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>"
        f'<nav>{here}<a href="#times">Time and cost</a></nav>{"".join(parts)}</main></body></html>\n'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], text: int = 1) -> str:
    """Returns a table that scrolls if it is wide. Its first columns, one or two, are text, the others numbers."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="text{text}">{inside}</table></div>'


def _p(text: str) -> str:
    """Returns a paragraph; what is in backquotes is code."""
    html = re.sub("`(.+?)`", r"<code>\1</code>", escape(text))
    return f"<p>{html}</p>"


def _summary(found: dict[str, Any]) -> str:
    stages, recipe = found["figures"]["stages"], found["figures"]["asked"]["recipe"]
    cards = [
        ("parameters", f"{recipe['parameters']:,}"),
        ("training tokens", f"{recipe['tokens']:,}"),
    ]
    if "evaluate" in stages:
        e = stages["evaluate"]
        cards.append(("validation loss", f"{e['loss']:.3f}"))
        cards.append(("predicted beforehand", f"{e['predicted']:.3f} ({e['error']:+.1%})"))
    for name, what in (("sft", "SFT"), ("grpo", "GRPO")):
        if name in stages:
            right = stages[name]["answers"]["held_out"]
            said = f"{right['sampled']:.0%} sampled, {right['greedy']:.0%} greedy"
            cards.append((f"right answers after {what}", said))
    if "serve" in stages:
        one = stages["serve"]["asked"][0]
        cards.append((one["question"], one["answer"]))
    cards.append(("wall time", _clock(found["times"]["wall"])))
    body = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in cards)
    return f'<dl class="cards">{body}</dl>'


def _dial(asked: dict[str, Any]) -> str:
    recipes = [dial.from_json(one) for one in (*asked["study"], asked["recipe"])]
    text = _p(
        "All of this follows from one dial, the depth. The last row is this page's model; the others are those from "
        "which its loss was predicted. `minitext journey --help` has the rules."
    )
    if asked["quick"]:
        text += _p(
            "`--quick`: a twentieth of the training, which only shows whether all of it works."
        )
    return f'<section id="dial"><h2>The dial</h2>{text}{_table(dial.HEADS, dial.rows_of(recipes))}</section>'


def _data(stages: dict[str, Any]) -> str:
    d = stages["data"]
    return _p(
        f"Source {d['source']}: {d['text']}, {show_bytes(d['bytes'])}. After pretraining come sums of two numbers "
        f"from 10 to 99: {d['sums']['train']:,} to learn from and {d['sums']['held_out']:,} held out from all "
        f"training. A teacher who gets one digit in four wrong writes {d['answers_of_the_teacher']:,} answers."
    )


def _tokenizer(stages: dict[str, Any]) -> str:
    t = stages["tokenizer"]
    tokens = " ".join(f"<code>{escape(token)}</code>" for token in t["example"])
    return (
        _p(
            f"{t['ids']:,} ids, learned from the text; {t['bytes_per_token']:.2f} bytes a token, {t['tokens']:,} "
            f"tokens in {t['rows']['train']:,} rows to train on and {t['rows']['validation']:,} to validate on. "
            f"Pretraining takes {t['epochs']:.2f} epochs."
        )
        + f"<p>A question in tokens, each digit one of its own: {tokens}</p>"
    )


def _scaling(stages: dict[str, Any]) -> str:
    s, p = stages["scaling"], stages["scaling"]["prediction"]
    law = Law(**p["law"])
    small, large = min(one["flops"] for one in s["points"]), p["compute"]
    steps = [small * (large / small) ** (i / 60) for i in range(61)]
    lines = [
        Line("trained before", [(one["flops"], one["loss"]) for one in s["points"]], dots=True),
        Line("the law", [(c, law(c)) for c in steps]),
        Line("predicted", [(large, p["loss"])], dots=True),
    ]
    text = (
        f"L(C) = {law.floor:.3f} + {law.scale:.3f} x (C / {law.unit:.2e})^-{law.exponent:.3f}, fitted to "
        f"{len(s['points'])} models by least squares of the relative errors (root mean square {law.residual:.2%}). It "
        f"predicts {p['loss']:.4f} nats per token, which was written to disk before the large model was trained."
    )
    has_interval = len(s["points"]) > 2  # of two models none can be left out
    if has_interval:
        text += (
            f" Laws fitted with one model left out predict {p['low']:.4f} to {p['high']:.4f}: this shows how far one "
            "model moves the law, not how far off the law may be."
        )
    after = ""
    if "evaluate" in stages:
        e = stages["evaluate"]
        lines.append(Line("measured", [(large, e["loss"])], dots=True))
        after = (
            f"Measured afterwards: {e['loss']:.4f}. The prediction was {abs(e['error']):.2%} too "
            f"{'high' if e['error'] > 0 else 'low'}"
        )
        if has_interval:
            where = "inside" if p["low"] <= e["loss"] <= p["high"] else "outside"
            after += f", and the measured loss is {where} that interval"
        after = _p(f"{after}.")
    drawn = chart(
        "Validation loss and training compute", lines, Axis("training FLOPs", log=True),
        Axis("nats per token", log=True),
    )  # fmt: skip
    rows = [
        (
            one["depth"], f"{one['parameters']:,}", f"{one['flops']:.2e}", f"{one['loss']:.4f}",
            f"{law(one['flops']):.4f}",
        )
        for one in s["points"]
    ]  # fmt: skip
    return _p(text) + after + drawn + _table(("depth", "parameters", "FLOPs", "loss", "law"), rows)


def _pretrain(stages: dict[str, Any]) -> str:
    curve = stages["pretrain"]["curve"]
    lines = [Line("training", curve["loss"]), Line("validation", curve["val_loss"])]
    return chart("Loss", lines, Axis("step"), Axis("nats per token")) + _written(
        stages["pretrain"]["samples"]
    )


def _written(samples: Sequence[dict[str, Any]]) -> str:
    return _p("Samples during training; what follows `|` is the model's:") + "".join(
        f"<figure><figcaption>step {one['step']}</figcaption><pre>{escape(one['text'])}</pre></figure>"
        for one in samples
    )


def _evaluate(stages: dict[str, Any]) -> str:
    e = stages["evaluate"]
    text = (
        f"On {e['tokens']:,} tokens that it never saw: {e['loss']:.4f} nats per token, perplexity "
        f"{e['perplexity']:.2f}, {e['bits_per_byte']:.3f} bits per byte. It continues text; it "
        "doesn't answer questions yet:"
    )
    written = "".join(
        f"<pre><b>{escape(one['before'])}</b>{escape(one['after'])}</pre>" for one in e["written"]
    )
    return _p(text) + written


def _sft(stages: dict[str, Any]) -> str:
    s = stages["sft"]
    lines = [Line("training", s["curve"]["loss"]), Line("validation", s["curve"]["val_loss"])]
    return chart(
        "Loss on the teacher's answers", lines, Axis("step"), Axis("nats per token")
    ) + _answers(stages, ("sft",))


def _grpo(stages: dict[str, Any]) -> str:
    curve = stages["grpo"]["curve"]
    drawn = chart(
        "Reward of sampled answers", [Line("reward", curve["reward"])], Axis("step"), Axis("share right", percent=True)
    )  # fmt: skip
    lines = [
        Line("sampled", curve["val_correct"]), Line("greedy", curve["val_correct_greedy"]),
    ]  # fmt: skip
    drawn += chart(
        "Right answers to sums that GRPO left out", lines, Axis("step"), Axis("share right", percent=True)
    )  # fmt: skip
    drawn += chart(
        "KL divergence from the model it began with, and entropy",
        [Line("KL", curve["kl"]), Line("entropy", curve["entropy"])], Axis("step"), Axis("nats per token"),
    )  # fmt: skip
    return drawn + _answers(stages, ("sft", "grpo")) + _written(stages["grpo"]["samples"])


def _answers(stages: dict[str, Any], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        for key, what in (("held_out", "held-out sums"), ("three_digits", "sums of three digits")):
            right = stages[name]["answers"][key]
            rows.append((TITLES[name], what, f"{right['sampled']:.1%}", f"{right['greedy']:.1%}"))
    text = (
        "Right answers, sampled from the model or greedy (always its likeliest token). Sums of three digits never "
        "occurred in training."
    )
    return _table(("after", "questions", "sampled", "greedy"), rows, text=2) + _p(text)


def _quantize(stages: dict[str, Any]) -> str:
    stored = stages["quantize"]["stored"]
    rows = [
        (
            one["rules"], show_bytes(one["bytes"]), f"{stored[0]['bytes'] / one['bytes']:.2f}x",
            f"{one['error']:.3%}", f"{one['worst']:.3%}", f"{one['greedy']:.1%}",
        )
        for one in stored
    ]  # fmt: skip
    heads = ("stored as", "bytes", "smaller", "error", "worst layer", "greedy right")
    text = "The error is the distance of the stored weights from those in float32, relative to the norm of the latter."
    return _table(heads, rows) + _p(text)


def _export(stages: dict[str, Any]) -> str:
    rows = [
        (one["name"], one["reader"], one["files"], show_bytes(one["bytes"]))
        for one in stages["export"]["exports"]
    ]
    return _table(("export/", "read by", "files", "bytes"), rows, text=2)


def _serve(stages: dict[str, Any]) -> str:
    rows = [(one["question"], one["answer"]) for one in stages["serve"]["asked"]]
    stored = stages["quantize"]["stored"][1]
    text = (
        f"The weights as {stored['rules']}, served by `minitext serve` and asked by OpenAI's client, over HTTP. Of the "
        f"held-out sums of two numbers with two digits, the model gets {stored['greedy']:.1%} right. It was taught "
        "nothing else, and the last three questions show what it says to others."
    )
    return _p(text) + _table(("question", "answer"), rows, text=2)


def _times(found: dict[str, Any]) -> str:
    times, stages = found["times"], found["figures"]["stages"]
    rows, total = [], 0.0
    for name, t in times["stages"].items():
        if not t["seconds"]:
            continue
        flops = stages.get(name, {}).get("flops", 0.0)
        total += flops
        spent = t["found"].get("seconds", {})
        kept = (
            spent.get("step", 0.0) / sum(v for k, v in spent.items() if k != "idle")
            if spent
            else None
        )
        cut = f"{t['interrupted']} ({_clock(t['interrupted_seconds'])})" if t["interrupted"] else ""
        rows.append((
            TITLES[name], _clock(t["seconds"]), cut, "" if kept is None else f"{kept:.0%}",
            f"{flops:.2e}" if flops else "", _mfu(t["found"]),
        ))  # fmt: skip
    rows.append((
        "total", _clock(times["wall"]), "", f"{times['useful'] / max(times['wall'], 1e-9):.0%}", f"{total:.2e}", "",
    ))  # fmt: skip
    heads = ("stage", "time", "in interrupted attempts", "goodput", "FLOPs", "MFU")
    text = (
        "Goodput: the share of a training run's time that went into steps that count; in the last row, of all stages' "
        "time. In reinforcement learning, drawing answers counts as waiting for data, and so does most of a step, "
        "which must end before the next answers are drawn: its goodput is too low, and its MFU is left out. FLOPs are "
        "counted by formula, forward and backward; evaluation and samples are not in them. MFU: model FLOPs of a step "
        "over its time and the machine's measured peak."
    )
    return (
        _table(heads, rows) + _p(text) + _latency(times["stages"].get("serve", {}).get("found", {}))
    )


def _mfu(found: dict[str, Any]) -> str:
    return f"{found['mfu']:.0%}" if found.get("mfu") else ""


def _latency(found: dict[str, Any]) -> str:
    if not found:
        return ""
    answers = [f"{seconds * 1e3:.0f}" for seconds in found["answers"]]
    return _p(
        f"The server took {found['start']:.1f} s to start, and its answers {', '.join(answers)} ms, one after another."
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes else f"{seconds:.1f} s"


SECTIONS = {
    "data": _data, "tokenizer": _tokenizer, "scaling": _scaling, "pretrain": _pretrain, "evaluate": _evaluate,
    "sft": _sft, "grpo": _grpo, "quantize": _quantize, "export": _export, "serve": _serve,
}  # fmt: skip
# Colours of lines: blue, orange, green, pink of Okabe and Ito, told apart also by those who see fewer colours.
STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--paper:#fff;--edge:#d8dee4;--card:#f6f8fa;
--s0:#0072b2;--s1:#c04f00;--s2:#007a5a;--s3:#a8417f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4af;--paper:#0d1117;--edge:#30363d;--card:#161b22;
--s0:#56b4e9;--s1:#f0a04b;--s2:#3ecf9b;--s3:#e39ac6}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2.2rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem .9rem}a{color:var(--s0)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.6rem}
.cards div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:.5rem .8rem}
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;min-width:100%}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
th:first-child,td:first-child,.text2 th:nth-child(2),.text2 td:nth-child(2){text-align:left}
th{color:var(--soft);font-weight:600}
figure{margin:1rem 0}figcaption{font-weight:600;font-size:.95rem}
svg.chart{width:100%;max-width:42rem;height:auto;display:block}
svg text{fill:var(--soft);font-size:12.5px}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--edge)}.axis{stroke:var(--soft)}
polyline{fill:none;stroke-width:2}
polyline.s0{stroke:var(--s0)}polyline.s1{stroke:var(--s1);stroke-dasharray:7 3}
polyline.s2{stroke:var(--s2);stroke-dasharray:2 3}polyline.s3{stroke:var(--s3)}
circle.s0{fill:var(--s0)}circle.s1{fill:var(--s1)}circle.s2{fill:none;stroke:var(--s2);stroke-width:2.5}
circle.s3{fill:var(--s3)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}.key{display:flex;align-items:center;gap:.35rem}
pre{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:.6rem;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.85rem}
code{background:var(--card);border:1px solid var(--edge);border-radius:4px;padding:0 .25rem;white-space:pre}
@media print{nav{display:none}}
"""
