"""Writes the tables of book/what_we_measured.md from the newest records in benchmarks/results.

    python book/measured.py [RESULTS [OUT]]     (writes OUT/measured.md and OUT/measured.svg)

Numbers on the page are the records' own; nothing is measured here. Records of the repository's own commands are in
benchmarks/results. Those in its folder `elsewhere` are figures taken down on another processor.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from generate import OUT, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, NOTEBOOKS = ROOT / "benchmarks" / "results", ROOT / "notebooks"
Record = dict[str, Any]


def newest(results: Path) -> dict[str, list[Record]]:
    """The newest record of each case, by benchmark, oldest first; names end in YYYY-MM-DD and so sort by date."""
    by_case = {path.stem[:-11]: path for path in sorted(results.glob("*-*-*-*.json"))}
    found: dict[str, list[Record]] = {}
    for path in by_case.values():
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["benchmark"], []).append(record)
    return {name: sorted(records, key=lambda r: r["date"]) for name, records in found.items()}


def elsewhere(results: Path) -> Record:
    """The newest figures that were taken down on another processor."""
    newest_of_all = max((results / "elsewhere").glob("*.json"), key=lambda path: path.stem[-10:])
    return json.loads(newest_of_all.read_text(encoding="utf-8"))


def taken_on(records: list[Record]) -> str:
    """A sentence on when, where and with what figures were taken."""
    machine = records[-1]["machine"]
    dates = sorted({record["date"] for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    script = records[-1]["benchmark"]
    where = f"`benchmarks/{script}.py`, {when}, {machine['cores']} cores of {machine['processor']}"
    return f"{where}; Python {machine['python']}, {versions}." if versions else f"{where}."


def train_cpu(records: list[Record]) -> str:
    """Training: each system by the type that is faster for it."""
    rows = []
    for r in sorted(records, key=lambda r: (r["parameters"], r["seq_len"])):
        for name in r["best"]:
            share, ratio = r["peak_share"][name], r["speed_ratio"].get(name)
            rows.append([
                f"{r['parameters'] / 1e6:.1f}M", f"{r['batch']} x {r['seq_len']}",
                name if bfloat16_too(r) else f"{name} alone",
                f"{r['ms_per_step'][name]:,.0f}", f"{r['tokens_per_second'][name]:,.0f}",
                f"{share['median']:.0%}", f"{ratio:.2f}" if ratio else "",
            ])  # fmt: skip
    header = [
        "Parameters", "Batch", "System", "ms a step", "Tokens/s", "Of the f32 peak", "Its time / minitext's",
    ]  # fmt: skip
    return table(header, rows)


def bfloat16_too(record: Record) -> bool:
    """Whether a training record compares each system's better type, or float32 alone."""
    return any(name.endswith("bfloat16") for name in record["ms_per_step"])


def step_limit(records: list[Record]) -> str:
    """How near the step is to what its products and passes allow."""
    r = records[-1]
    rows = [[name, f"{rate / 1e9:,.0f}"] for name, rate in r["flops_per_second"].items()]
    return (
        f"The products of a 10.7M step take {r['products_s'] * 1e3:,.0f} ms one by one, and all that must be read and "
        f"written between them {r['passes_s'] * 1e3:,.0f} ms at the rate of a copy. So a step of this program can "
        f"reach {r['shares']['limit']:.0%} of the matmul peak of {r['peak'] / 1e9:,.0f} GFLOP/s beside it. The "
        f"step takes {r['step_s'] * 1e3:,.0f} ms: {r['shares']['step']:.0%} of the peak.\n\n"
        f"{table(['Product', 'GFLOP/s'], rows)}"
    )


def decode_cpu(records: list[Record]) -> str:
    """Generation, by batch size."""
    rows = [
        [
            str(r["batch"]), name, f"{s['prefill_ms']:,.0f}", f"{s['tokens_per_second']:,.0f}",
            f"{s['bandwidth_share']['large']:.0%}", f"{s['decode_ratio']:.2f}",
            "yes" if s["same_tokens"] else "no",
        ]
        for r in sorted(records, key=lambda r: r["batch"])
        for name, s in r["results"].items()
    ]  # fmt: skip
    header = [
        "Batch", "System", "First token, ms", "Tokens/s", "Of the memory bandwidth", "Its time / minitext's",
        "Same tokens",
    ]  # fmt: skip
    return table(header, rows)


def serve_cpu(records: list[Record]) -> str:
    """Many texts at once, and one alone."""
    rows = [
        [
            f"{r['texts']} texts, {_answers(r)}" if request == "together" else "one text", name,
            f"{s['tokens_per_second']:,.1f}", f"{s['times_ours']:.2f}", f"{min(r['equal_tokens'][request]):.0%}",
        ]
        for r in records
        for request, sides in r["results"].items()
        for name, s in sides.items()
    ]  # fmt: skip
    header = ["", "System", "Tokens/s", "Its time / minitext's", "Equal tokens, all sides"]
    return table(header, rows)


def _answers(record: Record) -> str:
    least, most = record.get("shortest_answer", record["new_tokens"]), record["new_tokens"]
    return f"{most} tokens each" if least == most else f"{least} to {most} tokens"


def serve_load(records: list[Record]) -> str:
    """A server under rising load."""
    rows = [
        [
            str(load["readers"]), f"{load['tokens_per_second']:,.0f}", f"{load['answers']:,}", str(load["failures"]),
            *(f"{load[f'{part}_p{share}_ms']:,.0f}" for part in ("first_token", "next_tokens") for share in (50, 95)),
        ]
        for load in records[-1]["loads"]
    ]  # fmt: skip
    header = [
        "Readers", "Tokens/s", "Answers", "Failed", "First token, median ms", "95%", "Between tokens, median ms", "95%",
    ]  # fmt: skip
    return table(header, rows)


def serve_compiled(records: list[Record]) -> str:
    """The engine's programs, compiled for chips that weren't there."""
    rows = [
        [
            " ".join([r["preset"], *r["settings"]]), r["target"], str(r["texts"]),
            f"{max(x['total_bytes'] for x in r['programs'].values()) / 2**30:.1f} of "
            f"{r['programs']['decode']['available_bytes'] / 2**30:.1f}",
            ", ".join(f"{name} ({count})" for name, count in r["kernels"]["decode"].items()) or "none",
            f"{r['tokens_per_second_per_chip']:,.0f}", r["decode"]["limit"],
            *(f"{r['programs'][name]['compile_seconds']:.0f}" for name in ("decode", "prefill")),
        ]
        for r in records[-1]["results"]
    ]  # fmt: skip
    header = [
        "Model", "Target", "Texts", "GiB of a device", "Decode's kernels (calls)", "At best, tokens/s a chip",
        "Bound by", "Decode compiled in, s", "Prefill, s",
    ]  # fmt: skip
    return table(header, rows)


def quantization_qwix(records: list[Record]) -> str:
    """Our quantized products beside Qwix's."""
    rows = [
        [
            r["scheme"], r["products_of"], f"{r['narrow']} of {r['products']}", f"{max(r['gradient_error']):.2%}",
            f"{min(r['gradient_cosine']):.4f}", f"{r['times_float32']:.2f}",
        ]
        for r in records[-1]["rows"]
    ]  # fmt: skip
    header = [
        "Scheme", "Products of", "Narrow", "Error of the gradient, worst layer", "Its cosine, worst layer",
        "Step / float32's",
    ]  # fmt: skip
    return table(header, rows)


def grpo_arithmetic(records: list[Record]) -> str:
    """Both accuracies of each seed before and after GRPO, and what a careless reward brings."""
    r = records[-1]
    rows = [
        [
            str(row["seed"]),
            *(
                f"{row['before'][kind]:.1%} to {row['after'][kind]:.1%}"
                for kind in ("sampled", "greedy")
            ),
            f"{row['after']['wall_seconds']:.0f}",
            f"{row['after']['cpu_seconds']:.0f}",
        ]
        for row in r["seeds"]
    ]
    header = ["Seed", "Right, sampled", "Right, greedy", "Seconds", "Of the processor"]
    first, last = r["careless"]["curve"][0], r["careless"]["curve"][-1]
    return (
        f"{table(header, rows)}\n\nIn {last['step']} steps a careless reward, the share of the right "
        f"digits that occur anywhere in the answer, rises from {first['reward']:.0%} to {last['reward']:.0%}, and "
        f"right answers go from {first['reward_exact']:.0%} to {last['reward_exact']:.0%}."
    )


def post_training_tunix(records: list[Record]) -> str:
    """The same post-training by ours and by Tunix."""
    r = records[-1]
    rows = [
        [name, f"{r[key]['largest_difference']:.1e}", f"{r[key]['tunix_over_ours']:.2f}"]
        for key, name in (("sft", "SFT"), ("dpo", "DPO"))
    ]
    header = ["Task", "Largest difference of the loss, 60 steps", "Seconds of a step, Tunix / ours"]
    answered = [
        [name, f"{found['sampled']:.1%}", f"{found['greedy']:.1%}"]
        for name, found in (
            ("before", r["base"]), ("ours", r["grpo"]["ours"]), ("Tunix, our engine", r["grpo"]["tunix"]),
        )
    ]  # fmt: skip
    head = ["80 steps of GRPO", "Right, sampled", "Right, greedy"]
    return f"{table(header, rows)}\n\n{table(head, answered)}"


def sft_smollm2(records: list[Record]) -> str:
    """What fine-tuning a published model on a few conversations takes, and what it changes."""
    r = records[-1]
    spent, form = r["fine_tuning"], r["in_form"]
    asks = ["What is the capital of France?", "What do bees make?", "Who wrote Hamlet?"]
    rows = [
        [ask, *(r["answers"][when][ask].split("\n")[0] for when in ("before", "after"))]
        for ask in asks
    ]
    priority = " with priority over other jobs" if r["nice"] < 0 else ""
    return (
        f"SmolLM2-135M, {r['conversations']} conversations, `{' '.join(r['settings'])}`, {spent['steps']} steps: "
        f"{spent['wall_seconds']:.0f} s{priority}, {spent['cpu_seconds']:.0f} s of the processor, at most "
        f"{spent['peak_gb_so_far']:.1f} GB. Of {len(r['answers']['after'])} answers to new "
        f"questions, {form['before']:.0%} had the form of the conversations before and {form['after']:.0%} after. The "
        "conversations teach the form, not facts.\n\n"
        f"{table(['Question', 'Before', 'After'], rows)}"
    )


def train_quantized(records: list[Record]) -> str:
    """Where quantized training ends beside bfloat16."""
    r = records[-1]
    rows = [
        [name, f"{case['validation_loss']:.4f}", "" if not case["rules"] else f"{case['over_bfloat16']:+.2%}"]
        for name, case in r["cases"].items()
    ]  # fmt: skip
    return (
        f"Preset {r['preset']}, {r['steps']} steps, one seed. In all runs but the first, the products are quantized, "
        f"forward and backward.\n\n{table(['Products', 'Validation loss', 'Over bfloat16'], rows)}"
    )


def drill(records: list[Record]) -> str:
    """How a job of two processes came through faults made on purpose."""
    r = records[-1]
    rows = []
    for kind, count in r["by_kind"].items():
        its = [one for one in r["each"] if one["kind"] == kind]
        lost = [one["seconds_lost"] for one in its]
        allowed = max(one["allowed"] for one in its)
        rows.append([
            kind, str(count), f"{r['most_steps_repeated'][kind]} of {allowed}",
            f"{statistics.median(lost):.0f}", f"{max(lost):.0f}",
        ])  # fmt: skip
    equal = "equals" if r["curve_equal"] and r["state_equal"] else "differs from"
    beside = "Other jobs ran beside it, and its" if r["machine"]["busy"] > 0.5 else "Its"
    head = ["Fault", "Times", "Steps repeated, at most", "Seconds lost, median", "At most"]
    return (
        f"A job of two processes that saves every {r['save_every']} steps, hit by {r['planned']} faults: its final "
        f"state {equal} that of an undisturbed run, bit for bit. {r['accounted']:.2%} of {r['wall']:,.0f} s of wall "
        f"time has a cause. {beside} steps are tiny, so goodput was "
        f"{r['goodput']:.0%}: start-ups take {r['seconds']['start-up']:,.0f} s of it.\n\n{table(head, rows)}"
    )


def maxtext_explain(records: list[Record]) -> str:
    """What `minitext maxtext explain` makes of MaxText's own files."""
    r = records[-1]
    total, rows = r["total"], r["rows"]
    counts = {
        kind: sum(row.get(kind, 0) for row in rows)
        for kind in ("mapped", "by hand", "default", "none")
    }
    shown = [[kind, f"{count:,}"] for kind, count in counts.items()]
    return (
        f"{total['files']} of MaxText's files, its configurations, models and published recipes, with "
        f"{total['keys']:,} keys: {total['unnamed']} keys are left without an answer, {total['predicted']} runs are "
        f"predicted, {total['refused']} files are refused with the feature that minitext lacks, and {total['errors']} "
        f"can't be read.\n\n{table(['What becomes of a key', 'Keys'], shown)}\n\n"
        "Mapped: a key here has its meaning. By hand: the answer says what to do. Default: it's as it is anyway. None: "
        "minitext has nothing for it, or it changes nothing here, and the answer says which."
    )


def compile_(records: list[Record]) -> str:
    """Start-up by phase, and the stages of compiling by case."""
    first, steps = records[-1]["first_step"], records[-1]["train_step"]
    starts = [
        [kind, f"{first[kind]['total_s']:.1f}", f"{first['libraries_s']:.1f}"]
        + [f"{seconds:.1f}" for seconds in first[kind]["phases_s"].values()]
        for kind in ("cold", "warm")
    ]
    header = ["Cache", "First step after, s", "Libraries' imports, s", *first["cold"]["phases_s"]]
    stages = [
        [
            name,
            *(f"{s[key]:.2f}" if key in s else "" for key in ("trace_s", "lower_s", "compile_s")),
        ]
        for name, s in steps.items()
    ]
    return (
        table(header, starts)
        + "\n\n"
        + table(["Step", "Trace, s", "Lower, s", "Compile, s"], stages)
    )


def data(records: list[Record]) -> str:
    """The pipeline's speed beside the model's, and the memory that large texts take."""
    r = records[-1]
    rates = r["tokens_per_second"]
    rows = [
        [
            f"{o['gigabytes']:g} GB", o["cache"], f"{o['first_batch_s']:.1f}", f"{o['growth_bytes'] / 1e6:,.0f}",
            f"{o['growth_without_file_pages_bytes'] / 1e6:,.0f}",
        ]
        for o in r["opened"]
    ]  # fmt: skip
    header = ["Text", "State", "First batch after, s", "Memory, MB", "of it no file's pages, MB"]
    return (
        f"The pipeline makes {rates['pipeline']:,.0f} tokens/s, {r['pipeline_over_model']:,.0f} times what the preset "
        f"`laptop` trains on. A step that it feeds takes {r['fed_step_over_step']:.2f} times as long as one on a batch "
        f"that is there.\n\n{table(header, rows)}"
    )


def checkpoint(records: list[Record]) -> str:
    """What saving and restoring cost."""
    r = records[-1]
    return (
        f"Saving {r['array_bytes'] / 1e6:,.0f} MB of parameters and moments stops the loop for {r['blocked_ms']:,.0f} "
        f"ms, {r['blocked_share_of_step']:.0%} of a step; in the trainer a save costs "
        f"{r['trainer_cost_share_of_step']:.0%} of a step altogether. On disk it takes "
        f"{r['bytes_on_disk_per_array_byte']:.2f} bytes for each byte, and it is verified and restored in "
        f"{r['restore_s']:.2f} s."
    )


def train_gpu(records: list[Record]) -> str:
    """MFU on a GPU."""
    rows = [
        [
            r["shape"], f"{r['seq_len']:,}", f"{r['tokens_per_step']:,}", r["attention"], r["memory"]["model.remat"],
            f"{r['tokens_per_second']:,.0f}", f"{r['mfu']:.1%}" if r["mfu"] else "",
            f"{r['share_of_measured_peak']:.1%}",
        ]
        for r in records[-1]["results"]
        if "mfu" in r
    ]  # fmt: skip
    header = [
        "Model", "Row", "Tokens a step", "Attention", "Remat", "Tokens/s", "MFU", "Of measured peak",
    ]  # fmt: skip
    return (
        f"On one {records[-1]['results'][0]['device']}, layers unrolled. MFU is the share of the data sheet's peak.\n\n"
        f"{table(header, rows)}"
    )


def decode_gpu(records: list[Record]) -> str:
    """Generation on a GPU."""
    rows = [
        [
            str(case["batch"]), name, f"{r['prefill_ms']:.1f}", f"{r['tokens_per_second']:,.0f}",
            f"{r['share_of_bandwidth']:.0%}", "" if name == "minitext" else f"{r['decode_ratio']:.2f}",
        ]
        for case in records[-1]["cases"]
        for name, r in case["results"].items()
    ]  # fmt: skip
    header = [
        "Texts", "System", "Prefill, ms", "Tokens/s", "Of the bandwidth", "Its time for a token / minitext's",
    ]  # fmt: skip
    case = records[-1]["cases"][0]
    return (
        f"About 1B random parameters in bfloat16 on one {records[-1]['device']}: after {case['prompt_length']} tokens, "
        f"{case['new_tokens']} more. The share of the bandwidth counts the weights and the cache, which a decode step "
        f"must read once.\n\n{table(header, rows)}"
    )


def kernels_gpu(records: list[Record]) -> str:
    """Our kernels beside cuDNN's and XLA's programs."""
    r, rows = records[-1], []
    for name, case in r["cases"].items():
        theirs, unit = case["against"], f"T{case['unit']}"
        ours, other = (f"{case['rate'][side] / 1e12:,.3g} {unit}" for side in ("minitext", theirs))
        rows.append([name, ours, theirs, other, f"{case['ratio']:.2f}"])
    header = ["Operation", "minitext", "Other", "Its rate", "Its time / minitext's"]
    return (
        f"On one {r['device']}, in bfloat16. A causal mask halves attention's FLOPs, and gradients count without what "
        f"is recomputed; norms and pages count the bytes that must be moved.\n\n{table(header, rows)}"
    )


def check_gpu(records: list[Record]) -> str:
    """Whether what a GPU computes is right."""
    r = records[-1]
    types = ("bfloat16", "float32")
    worst = {
        t: max(max(k["errors"]) for n, k in r["kernels"].items() if n.endswith(t)) for t in types
    }
    training, generation = r["training"], r["generation"]
    tokens = "the same" if generation["engine_first_difference"] is None else "other"
    parts = [
        f"{len(r['kernels'])} cases of kernels, values and gradients, are at most {worst['bfloat16']:.1e} (bfloat16) "
        f"and {worst['float32']:.1e} (float32) from their definitions in float32, relative to the norm.",
        f"A tiny run of {training['lines']} steps went from a loss of {training['loss'][0]:.2f} to "
        f"{training['loss'][1]:.2f}; a second run was {_bit_equal(training['twice_bit_equal'])}, and one that was "
        f"interrupted and resumed {_bit_equal(training['resumed_bit_equal'])}.",
        f"The engine, with its paged kernels, drew {tokens} tokens as generation with one cache.",
    ]
    if "artefact" in r:
        same = "the same tokens as" if r["artefact"]["same_tokens"] else "other tokens than"
        parts.append(f"An artefact exported on a CPU gave {same} there.")
    return f"On one {r['device']}. " + " ".join(parts)


def _bit_equal(fact: bool) -> str:
    return "bit-equal" if fact else "not bit-equal"


def pods(records: list[Record]) -> str:
    """Steps compiled for whole pods."""
    rows = [
        [
            r["preset"], r["target"], f"{r['devices']:,}", "yes" if r["fits"] else "no",
            f"{r['total_bytes'] / 2**30:.2f} of {r['available_bytes'] / 2**30:.2f}",
            f"{r['networks']['ici']['sent'] / 1e9:,.1f}",
            f"{r['networks']['dcn']['sent'] / 1e9:,.2f}" if r["slices"] > 1 else "",
            f"{r['seconds']:,.0f} ({r['cpu_seconds']:,.0f})",
        ]
        for r in records[-1]["results"]
    ]  # fmt: skip
    header = [
        "Preset", "Target", "Devices", "Fits", "Memory of one, GiB", "Sent within a slice, GB", "Across slices, GB",
        "Seconds (of CPU)",
    ]  # fmt: skip
    return (
        "No chip was there: the compiler for TPUs ran on this machine's CPU. What is sent is of one device in one step."
        f"\n\n{table(header, rows)}"
    )


def tune_options(records: list[Record]) -> str:
    """What a search over settings found."""
    rows = []
    for name, r in records[-1]["runs"].items():
        for found in [c for c in r["ranked"] if not c["refusal"]][:5]:
            changes = [f"{key}={value}" for key, value in found["changes"].items()]
            rows.append([
                name, r["target"], f"`{' '.join(changes)}`" if changes else "none: the start",
                f"{1e3 * found['seconds']:.3f}", f"{found['gain']:+.1%}",
            ])  # fmt: skip
    header = ["Model", "Target", "What was changed", "Predicted, ms", "Faster than the start by"]
    tried = sum(len(r["ranked"]) for r in records[-1]["runs"].values())
    return (
        f"`minitext tune-options` compiled {tried} candidates and predicted their steps. The best are shown. No TPU "
        "was used, and what helps a model this small needn't help a large one.\n\n"
        + table(header, rows)
    )


def step_time(records: list[Record]) -> str:
    """Predicted steps beside published ones."""
    rows = [
        [
            name, r["kind"], r["target"],
            f"{r['without_options']['seconds']:.3f}",
            f"{r['predicted']['seconds']:.3f}",
            f"{r['predicted']['lower']:.3f} to {r['predicted']['upper']:.3f}", f"{r['published_seconds']:.3f}",
            f"{r['error']:+.1%}", r["differs"],
        ]
        for name, r in records[-1]["runs"].items()
    ]  # fmt: skip
    header = [
        "Model",
        "Kind",
        "Target",
        "Without options, s",
        "Predicted, s",
        "Interval, s",
        "Published, s",
        "Error",
        "What differs",
    ]
    return (
        "No chip was there: each step was compiled, without and with the compiler's options that are recommended for "
        "the chip, and its schedule walked, with no constant fitted. The published times are MaxText's. They were "
        "known, and minitext's kernels and options were improved with them as a goal.\n\n"
        f"{table(header, rows)}"
    )


def prediction_errors(records: list[Record]) -> str:
    """How far predicted steps are from published ones, in a sentence or two for the page of limits."""
    runs = records[-1]["runs"]
    errors = [f"{run['error']:+.0%} for {name} ({run['kind']})" for name, run in runs.items()]
    inside = sum(run["published_in_interval"] for run in runs.values())
    return (
        f"The record of {records[-1]['date']} has {len(runs)} of them: {inside or 'none'} of the published times "
        f"{'is' if inside <= 1 else 'are'} inside the predicted interval, and the best estimates are off by "
        f"{', '.join(errors[:-1])} and {errors[-1]}.\n"
    )


def blind_predictions(records: list[Record]) -> str:
    """Predictions that were written down before the published times were read."""
    rows = [
        [
            name, r["kind"], r["target"], f"{r['predicted']['seconds']:.3f}",
            f"{r['predicted']['lower']:.3f} to {r['predicted']['upper']:.3f}",
            "{:.3f} to {:.3f}".format(*r["interval"]),
            *((f"{r['published_seconds']:.3f}", f"{r['error']:+.1%}") if "error" in r else ("not yet read", "")),
            r["differs"],
        ]
        for name, r in records[-1]["runs"].items()
    ]  # fmt: skip
    header = [
        "Model", "Kind", "Target", "Predicted, s", "By overlap, s", "Interval, s", "Published, s", "Error",
        "What differs",
    ]  # fmt: skip
    return (
        "Here the predictions came first: they were committed before anybody looked at the published times. From the "
        "first interval's lower end everything overlaps, at its upper end nothing does. The second is wider, by the "
        f"factor {records[-1]['factor']:.3f} at each end, with which the four published times of the table above are "
        f"inside. {blind_counts(records)}\n\n{table(header, rows)}"
    )


def blind_counts(records: list[Record]) -> str:
    """How many of the blind predictions held, by kind, in a sentence each."""
    runs, told = records[-1]["runs"], []
    for kind in dict.fromkeys(run["kind"] for run in runs.values()):
        of = [run for run in runs.values() if run["kind"] == kind and "error" in run]
        near, between, inside = (
            sum(run[key] for run in of) for key in ("within_a_tenth", "in_scheduled", "in_interval")
        )
        told.append(
            f"{kind.capitalize()}: of {len(of)} published times, {near} are within a tenth of the prediction, "
            f"{between} inside the interval by overlap and {inside} inside the wider one."
        )
    return " ".join(told)


def kills(records: list[Record]) -> str:
    """What killed processes cost a run."""
    r = records[-1]
    victims = " and ".join(f"{count} times the {name}" for name, count in r["by_victim"].items())
    return (
        f"A run of {r['steps']} steps on two processes was killed {r['kills']} times at random moments ({victims}; "
        f"{r['caught_in_a_save']} times while a checkpoint was being written), and went on by itself each time. It "
        f"lost at most {r['most_steps_lost']} steps at once, with a checkpoint every {r['save_every']}. The job ended "
        f"at most {r['longest_seconds_to_end']:.1f} s after a kill. All {r['lines_compared']} lines of its metrics "
        "equal those of a run left alone, bit for bit."
    )


def observability(records: list[Record]) -> str:
    """What the ledger and a trace cost a step."""
    names = {
        "ledger": "the ledger",
        "trace": "the ledger and a trace",
        "control": "nothing once more",
    }
    rows = [
        [
            r["shape"], f"{r['step_seconds']['bare']['median'] * 1e3:,.0f}", name,
            f"{r['ratios'][key]['ratio']:.4f}", "{:.4f} to {:.4f}".format(*r["ratios"][key]["interval"]),
        ]
        for r in records
        for key, name in names.items()
    ]  # fmt: skip
    header = ["Model", "ms a step", "With", "Its time / with nothing", "Nine in ten redrawn ratios"]
    told = [
        f"Of a step of {r['shape']}, over {r['rounds']} rounds, the loop's thread spends "
        f"{r['ledger_seconds_a_step'] * 1e6:,.0f} µs in the ledger and in reading memory, "
        f"{r['ledger_share_of_step']:.2%} of the step; a trace of it has {r['events_a_step']:,} events."
        for r in records
    ]
    return (
        f"In one run of each model, whose steps take turns. {' '.join(told)} A ratio is the median over rounds of four "
        "steps, one with each of the three and one with nothing. The last row of a model is chance. A trace costs by "
        f"the event, so that it costs a longer step less of its time.\n\n{table(header, rows)}"
    )


ENVIRONMENTS = {"setup": "Its setup cell", "lab": "`make lab`", "lowest": "Lowest versions"}


def notebooks(records: list[Record]) -> str:
    """When each chapter last passed in each kind of environment, and with which versions."""
    records = sorted(
        records, key=lambda r: (list(ENVIRONMENTS).index(r["environment"]), r["python"])
    )
    links = {
        path.stem[:2]: f"[](../notebooks/{path.name})"
        for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    }
    seen: list[dict[str, str]] = []

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "not run"
        last = row["passed"]
        if last and last["versions"] not in seen:
            seen.append(last["versions"])
        passed = f"{last['date']} ({letter(last['versions'])})" if last else "never"
        return f"{passed}; failed {row['failed']['date']}" if row["failed"] else passed

    def letter(versions: dict[str, str]) -> str:
        return chr(ord("A") + seen.index(versions))

    others = sorted({name for r in records for name in r["rows"]} - set(links))
    rows = [
        [links.get(name, name), *(cell(r["rows"].get(name)) for r in records)]
        for name in [*links, *others]
    ]
    header = [
        "Chapter",
        *(f"{ENVIRONMENTS[r['environment']]}, Python {r['python']}" for r in records),
    ]
    names = list(dict.fromkeys(name for versions in seen for name in versions))
    versions = [[letter(v), *(v.get(name, "none") for name in names)] for v in seen]
    return (
        "When each chapter last ran to its end, from an empty folder with an empty home, in an environment that holds "
        "nothing but what its own setup cell installs (the newest versions that the Python of the column can have), "
        "what `make lab` installs, or the lowest versions that `pyproject.toml` allows. A letter stands for the "
        "versions of the second table. Below the chapters are the commands `minitext train` and `generate`, and the "
        f"tests that ran with the lowest versions.\n\n{table(header, rows)}\n\n"
        f"{table(['Versions', *names], versions)}"
    )


def two_processors(found: dict[str, list[Record]], other: Record) -> dict[str, tuple[float, float]]:
    """Times of others over minitext's, on the processor of the records and on the other one.

    Both train the 10.7M shape on 8 rows of 256 tokens in both types in one run, and generate from it for one text.
    """
    trained = next(
        r
        for r in found["train_cpu"]
        if r["shape"] == "10.7M" and r["seq_len"] == 256 and bfloat16_too(r)
    )
    decoded = next(r for r in found["decode_cpu"] if r["batch"] == 1)
    steps = trained["ms_per_step"], other["training"]["ms_per_step"]
    rates = (
        {name: side["tokens_per_second"] for name, side in decoded["results"].items()},
        other["decoding"]["tokens_per_second"],
    )
    fastest = [max(rate for name, rate in side.items() if name != "minitext") for side in rates]

    def of_step(dtype: str) -> tuple[float, float]:
        ours, theirs = f"minitext {dtype}", f"torch eager {dtype}"
        return steps[0][theirs] / steps[0][ours], steps[1][theirs] / steps[1][ours]

    return {
        "a training step in float32, beside PyTorch eager": of_step("float32"),
        "a training step in bfloat16, beside PyTorch eager": of_step("bfloat16"),
        "generating, beside `generate` as it comes": (
            rates[0]["minitext"] / rates[0]["transformers"],
            rates[1]["minitext"] / rates[1]["transformers"],
        ),
        "generating, beside `generate` at its fastest": (
            rates[0]["minitext"] / fastest[0],
            rates[1]["minitext"] / fastest[1],
        ),
    }


def two_processors_table(found: dict[str, list[Record]], other: Record) -> str:
    """`two_processors` as a table; the README has it too."""
    ratios = two_processors(found, other)
    header = [
        "Times as fast as Hugging Face's Llama",
        f"{found['train_cpu'][-1]['machine']['processor']}, no AMX",
        other["machine"]["processor"],
    ]
    return table(
        header, [[name, *(f"{ratio:.1f}" for ratio in pair)] for name, pair in ratios.items()]
    )


def on_another_processor(found: dict[str, list[Record]], other: Record) -> str:
    """What holds on both processors, and what on one alone."""
    steps = other["training"]["ms_per_step"]
    lean = other["training_beside_leaner_torch"]["ms_per_step"]
    cpp, ours = (
        other["decoding_beside_llama_cpp"]["tokens_per_second"][n]
        for n in ("llama.cpp", "minitext")
    )
    products, share = (
        other["products"]["gflops_per_second"],
        other["training"]["minitext_share_of_own_peak"],
    )
    return (
        f"{two_processors_table(found, other)}\n\nBoth columns are of two cores, 10.7M parameters, rows of 256 tokens "
        f"and one text. The left is from the records below. The right is of {other['date']} and of the same "
        f"commands: {other['kept']} (`benchmarks/results/elsewhere`).\n\n"
        "So the lead in float32 belongs to the AMD processor alone; that in bfloat16 and in generating holds on both, "
        f"but is smaller on the Intel one. There a step takes minitext {steps['minitext float32']} ms in float32 and "
        f"{steps['minitext bfloat16']} in bfloat16. A leaner PyTorch program of the same shape, compiled, takes "
        f"{lean['float32'][0]} to {lean['float32'][1]} and {lean['bfloat16'][0]}, and so is faster in both types. "
        f"minitext's step reaches {share['float32']:.0%} of that processor's float32 peak, and "
        f"{share['bfloat16']:.0%} of its bfloat16 peak, which is what AMX raises. llama.cpp is faster too: with "
        "SmolLM2-135M in float32 it reads "
        f"{cpp['prefill']:,} tokens/s and writes {cpp['decode']}, where minitext reads {ours['prefill']:,} and writes "
        f"{ours['decode']}.\n\nAsking for the sum in the type in which it is made pays more there than on AMD: XLA "
        f"multiplies bfloat16 at {products['jax bfloat16 to float32']:,} GFLOP/s into float32, and at "
        f"{products['jax bfloat16 to bfloat16']:,} into bfloat16. PyTorch reaches "
        f"{products['torch bfloat16'][0]:,} to {products['torch bfloat16'][1]:,}."
    )


SECTIONS = {
    "train_cpu": ("Training on a CPU", train_cpu),
    "step_limit": ("What the 10.7M step could reach", step_limit),
    "decode_cpu": ("Generating on a CPU", decode_cpu),
    "serve_cpu": ("Many texts at once", serve_cpu),
    "serve_load": ("A server under load", serve_load),
    "quantization_qwix": ("Quantized products, ours and Qwix's", quantization_qwix),
    "serve_compiled": ("The engine's programs for chips that aren't here", serve_compiled),
    "grpo_arithmetic": ("Learning from rewards", grpo_arithmetic),
    "post_training_tunix": ("Post-training, ours and Tunix's", post_training_tunix),
    "sft_smollm2": ("Fine-tuning a published model", sft_smollm2),
    "train_quantized": ("Quantized training to the end", train_quantized),
    "train_gpu": ("Training on a GPU", train_gpu),
    "decode_gpu": ("Generating on a GPU", decode_gpu),
    "kernels_gpu": ("Kernels on a GPU", kernels_gpu),
    "check_gpu": ("Results on a GPU", check_gpu),
    "compile": ("Starting and compiling", compile_),
    "data": ("Reading data", data),
    "checkpoint": ("Checkpoints", checkpoint),
    "kills": ("Processes killed", kills),
    "maxtext_explain": ("MaxText's settings", maxtext_explain),
    "drill": ("Faults on purpose", drill),
    "observability": ("What watching costs", observability),
    "pods": ("Compiling for pods", pods),
    "tune_options": ("Settings that a search found", tune_options),
    "step_time": ("Predicted steps beside published ones", step_time),
    "blind_predictions": ("Predictions before the answers", blind_predictions),
    "notebooks": ("Chapters in their readers' environments", notebooks),
}


def page(found: dict[str, list[Record]], other: Record) -> str:
    """The tables, with a section for every benchmark that has a record."""
    parts = ["## Two processors", on_another_processor(found, other)]
    for name, (title, section) in SECTIONS.items():
        if name in found:
            parts += [f"## {title}", taken_on(found[name]), section(found[name])]
        if name == "train_cpu" and name in found:
            processor = found[name][-1]["machine"]["processor"]
            alt = f"Tokens per second of each system over minitext's on an {processor}, by model"
            parts.append(f"```{{image}} _generated/measured.svg\n:alt: {alt}\n```")
    return "\n\n".join(parts) + "\n"


def figure(records: list[Record], path: Path) -> None:
    """Draws training speed relative to minitext's, a group of bars for each case."""
    import matplotlib.pyplot as plt

    from minitext.perf.figures import figure_style

    figure_style()
    plt.rcParams["svg.hashsalt"] = "minitext"  # the same records give the same file
    records = sorted(records, key=lambda r: (r["parameters"], r["seq_len"]))
    systems = sorted({name.rsplit(" ", 1)[0] for record in records for name in record["best"]})
    fig, axes = plt.subplots(figsize=(7.2, 3.4))
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        heights = []
        for record in records:
            rates = record["tokens_per_second"]
            name = next((n for n in record["best"] if n.rsplit(" ", 1)[0] == system), None)
            heights.append(rates[name] / rates[record["best"][0]] if name else 0)
        axes.bar(
            [x + (i - (len(systems) - 1) / 2) * width for x in range(len(records))],
            heights,
            width,
            label=system,
        )
    labels = [
        f"{r['parameters'] / 1e6:.1f}M\n{r['seq_len']}" + ("" if bfloat16_too(r) else "\nf32")
        for r in records
    ]
    axes.set_xticks(range(len(records)), labels)
    axes.set(xlabel="parameters and row length", ylabel="speed over minitext's")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=len(systems), loc="lower center", bbox_to_anchor=(0.5, 1))
    fig.savefig(path, metadata={"Date": None})


def main(results: Path = RESULTS, out: Path = OUT) -> None:
    """Writes the page and its figure."""
    found = newest(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "measured.md").write_text(page(found, elsewhere(results)), encoding="utf-8")
    (out / "prediction_errors.md").write_text(
        prediction_errors(found["step_time"]), encoding="utf-8"
    )
    blind = blind_counts(found["blind_predictions"])
    (out / "blind_predictions.md").write_text(f"{blind}\n", encoding="utf-8")
    if "train_cpu" in found:
        figure(found["train_cpu"], out / "measured.svg")
    print(f"wrote {out / 'measured.md'}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
