"""The stages of a journey. Each reads what earlier ones left on disk, does one thing, and returns what it found.

A stage that trains goes on from its newest checkpoint when it is started again. The others take seconds and start anew.

Chapters: 27.
"""

import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from minitext import files
from minitext.config.config import Config, load_config
from minitext.data import rows, sources
from minitext.data.tokenizer import Tokenizer, train_bpe
from minitext.inference.generate import Sampling, generate
from minitext.journey import scaling, serving
from minitext.journey.dial import Recipe
from minitext.journey.exam import Examinee
from minitext.journey.lessons import SUMS, TAUGHT, TEMPLATE, question, questions, write_lessons
from minitext.journey.trip import Result, Trip, thinned
from minitext.models.flops import count_flops
from minitext.observability import goodput
from minitext.observability.metrics import read_metrics
from minitext.post_training import recipes
from minitext.post_training.tasks import task_of
from minitext.sharding.mesh import make_mesh
from minitext.training import artefact_run, interchange, quantize_run, run, run_dir
from minitext.training.capacity import check_memory
from minitext.training.run_dir import load_run
from minitext.training.step import check_trainable

PACKED, TOKENIZER, PREDICTION = "packed", "tokenizer.json", "prediction.json"
TAUGHT_COUNT = 60_000  # answers of the teacher
SFT_ROWS, SFT_LENGTH, SFT_STEPS = 16, 128, 400
PROMPTS, GROUP, ANSWER_TOKENS, GRPO_LENGTH, GRPO_STEPS = 64, 8, 4, 17, 40
QUICK_SFT_STEPS, QUICK_GRPO_STEPS = 20, 2
QUANTIZED = ("int8", "int4")
EXPORTED = {
    "stablehlo": "JAX alone, on CPUs, GPUs and TPUs: python generate.py",
    "hf": "transformers: AutoModelForCausalLM.from_pretrained",
    "model.gguf": "llama.cpp: llama-cli -m model.gguf",
}
BEGINNINGS = ("def ", "import ", "class ", question(37, 58) + "\n")


def check(trip: Trip) -> None:
    """Refuses what later stages could not do, before anything is written.

    Raises:
      UserError: for text that isn't there, or a mesh that can't divide a model.
      DoesNotFit: for a model that this machine's memory can't hold.
    """
    sources.read(_text_config(trip).data)
    for recipe in (*trip.study, trip.recipe):
        cfg = _pretraining(trip, recipe, trip.of("pretrain"), "run")
        mesh = make_mesh(cfg.mesh)
        check_trainable(cfg, mesh)
        check_memory(cfg, mesh)


def gather(trip: Trip) -> Result:
    """Finds the text, and writes the sums that come after it."""
    size, what, _ = sources.read(_text_config(trip).data)
    count = TAUGHT_COUNT // 20 if trip.quick else TAUGHT_COUNT
    sums = write_lessons(trip.of("data"), count)
    figures = {"source": _text_config(trip).data.source, "text": what, "bytes": size}
    return Result(figures | {"sums": sums, "answers_of_the_teacher": count}, {})


def tokenize(trip: Trip) -> Result:
    """Learns a tokenizer, and packs the text as rows of its ids.

    It learns from text without digits, so no merge has one in it: each digit stays a token of its own, as in Llama,
    and a sum is spelled the same way whatever its numbers.
    """
    cfg, recipe, folder = _text_config(trip), trip.recipe, trip.of("tokenizer")
    texts = (re.sub(r"\d+", "\n", text) for text in sources.sample(cfg.data))
    tokenizer = train_bpe(texts, recipe.vocab)
    tokenizer.save(folder / TOKENIZER)
    counts = rows.pack_source(
        cfg.data, folder / PACKED, vocab=recipe.vocab, shards=4, tokenizer=tokenizer
    )
    text_bytes = trip.figures("data")["bytes"]
    tokens = sum(counts.values()) * recipe.seq_len
    figures = {
        "ids": tokenizer.vocab_size, "rows": counts, "tokens": tokens, "bytes_per_token": text_bytes / tokens,
        "epochs": recipe.tokens / (counts["train"] * recipe.seq_len),
        "example": [tokenizer.decode([i]) for i in tokenizer.encode(question(37, 58))],
    }  # fmt: skip
    return Result(figures, {})


def study(trip: Trip) -> Result:
    """Trains the smaller models, fits a law to their losses, and writes what it predicts of the large one."""
    points, directories = [], []
    for recipe in trip.study:
        cfg = _pretraining(trip, recipe, trip.of("scaling"), f"depth-{recipe.depth}")
        directories.append(run.train(cfg))
        found = run_dir.evaluate_run(directories[-1])
        points.append(recipe.to_json() | {"loss": found["loss"]})
    compute, losses = [p["flops"] for p in points], [p["loss"] for p in points]
    predicted = scaling.predict(compute, losses, trip.recipe.flops)
    files.write(trip.directory / PREDICTION, json.dumps(predicted.to_json(), indent=1) + "\n")
    figures = {"points": points, "prediction": predicted.to_json()}
    return Result(figures | {"flops": planned_flops(trip)["scaling"]}, _times(*directories))


def pretrain(trip: Trip) -> Result:
    """Trains the model itself on the text."""
    cfg = _pretraining(trip, trip.recipe, trip.of("pretrain"), "run")
    directory = run.train(cfg)
    figures = {"flops": trip.recipe.flops, "curve": _curve(directory, ("loss", "val_loss"))}
    return Result(figures | {"samples": _samples(directory)}, _times(directory))


def evaluate(trip: Trip) -> Result:
    """Measures the loss on all held-out text, compares it with the prediction, and lets the model write."""
    directory = base_run(trip)
    found = run_dir.evaluate_run(directory)
    predicted = trip.figures("scaling")["prediction"]["loss"]
    figures = {key: found[key] for key in ("loss", "perplexity", "bits_per_byte", "tokens")}
    figures |= {"predicted": predicted, "error": predicted / found["loss"] - 1}
    cfg, params, tokenizer, _ = load_run(directory)
    figures["written"] = [
        {"before": text, "after": _written(cfg, params, tokenizer, text)} for text in BEGINNINGS
    ]
    return Result(figures, {})


def base_run(trip: Trip) -> Path:
    """Returns the pretrained model's run."""
    return trip.of("pretrain") / "run"


def _written(cfg: Config, params: Any, tokenizer: Tokenizer, text: str) -> str:
    tokens = generate(
        cfg.model, params, tokenizer.encode(text), max_tokens=60, seed=0, stop_id=tokenizer.eod_id,
        sampling=Sampling(temperature=0.7, top_k=40),
    )  # fmt: skip
    return tokenizer.decode(list(tokens))


def _text_config(trip: Trip) -> Config:
    """Returns where the text comes from and how long its rows are."""
    settings = [word for word in trip.settings if word.startswith("data.")]
    return load_config(
        None, ["data.source=stdlib", "data.tokenizer=bpe", *trip.recipe.settings(), *settings]
    )


def _pretraining(trip: Trip, recipe: Recipe, folder: Path, name: str) -> Config:
    """Returns the configuration of a run on the packed text."""
    every = max(1, math.ceil(recipe.steps / 10))
    words = [
        f"run.dir={folder}", f"run.name={name}", "data.source=arrayrecord", "data.tokenizer=bpe",
        f"data.path={trip.of('tokenizer') / PACKED}", f"train.save_every={every}", f"train.eval_every={every}",
        f"train.eval_batches={max(1, 64 // recipe.rows)}", "checkpoint.keep=1",
        f"train.sample_tokens={40 if recipe == trip.recipe else 0}", *recipe.settings(),
    ]  # fmt: skip
    return load_config(None, words + _placing(trip))


def _placing(trip: Trip) -> list[str]:
    return [word for word in trip.settings if not word.startswith("data.")]


def _curve(directory: Path, keys: Sequence[str]) -> dict[str, list[list[float]]]:
    """Returns points of (step, value) by name from a run's metrics."""
    lines = read_metrics(directory)
    return {key: thinned([[r["step"], r[key]] for r in lines if key in r]) for key in keys}


def _samples(directory: Path) -> list[dict[str, Any]]:
    """Returns what a run wrote on the way, the last sample of each step."""
    path = directory / "samples.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = re.split(r"^--- step (\d+)\n", text, flags=re.M)
    found = {int(step): text for step, text in zip(parts[1::2], parts[2::2], strict=True)}
    return [{"step": step, "text": text.rstrip("\n")} for step, text in sorted(found.items())]


def _times(*directories: Path) -> dict[str, Any]:
    """Returns where runs' time went, in seconds by kind, and the MFU of their steps."""
    runs = [goodput.measure(directory) for directory in directories]
    seconds = {kind: sum(one.seconds[kind] for one in runs) for kind in goodput.KINDS}
    at_peak = [one.mfu * one.seconds["step"] for one in runs if one.mfu is not None]
    mfu = sum(at_peak) / seconds["step"] if len(at_peak) == len(runs) else None
    return {"seconds": {k: value for k, value in seconds.items() if value >= 0.05}, "mfu": mfu}


def planned_flops(trip: Trip) -> dict[str, float]:
    """Returns the FLOPs of the stages that train.

    GRPO takes six forward passes' worth of each row: a step's three, one to draw answers, and two to say how likely the
    model and the one it began from find them.
    """
    cfg = load_config(None, trip.recipe.settings()).model
    sft = count_flops(cfg, SFT_ROWS * SFT_LENGTH, SFT_LENGTH)
    grpo = 2 * count_flops(cfg, PROMPTS * GROUP * GRPO_LENGTH, GRPO_LENGTH)
    return {
        "scaling": float(sum(each.flops for each in trip.study)),
        "pretrain": trip.recipe.flops,
        "sft": float(sft * _steps(trip)["sft"]),
        "grpo": float(grpo * _steps(trip)["grpo"]),
    }


def _steps(trip: Trip) -> dict[str, int]:
    if trip.quick:
        return {"sft": QUICK_SFT_STEPS, "grpo": QUICK_GRPO_STEPS}
    return {"sft": SFT_STEPS, "grpo": GRPO_STEPS}


def fine_tune(trip: Trip) -> Result:
    """Teaches the model to answer, by the answers of a teacher who errs."""
    lessons, recipe = trip.of("data"), trip.recipe
    steps = _steps(trip)["sft"]
    words = [
        f"data.path={lessons / TAUGHT}", f"data.chat_template={lessons / TEMPLATE}", f"data.seq_len={SFT_LENGTH}",
        f"train.global_batch={SFT_ROWS}", f"train.steps={steps}", f"train.save_every={math.ceil(steps / 8)}",
        f"train.eval_every={math.ceil(steps / 8)}", "optim.kind=muon", "optim.b2=0.95", "checkpoint.keep=1",
        f"optim.learning_rate={recipe.learning_rate * 2 / 3:.3g}", f"optim.warmup_steps={math.ceil(steps / 20)}",
    ]  # fmt: skip
    cfg = _tuning(trip, base_run(trip), "sft", words)
    directory = run.train(cfg, task=task_of(cfg))
    figures = {
        "flops": planned_flops(trip)["sft"], "curve": _curve(directory, ("loss", "val_loss")),
        "answers": _exam(trip, directory),
    }  # fmt: skip
    return Result(figures, _times(directory))


def reward(trip: Trip) -> Result:
    """Lets the model answer sums that it was taught, and rewards right answers (GRPO)."""
    lessons, recipe = trip.of("data"), trip.recipe
    steps = _steps(trip)["grpo"]
    every = math.ceil(steps / 6)
    words = [
        f"data.path={lessons / SUMS}", f"data.chat_template={lessons / TEMPLATE}", f"data.seq_len={GRPO_LENGTH}",
        "data.validation_fraction=0.1", f"objective.prompts={PROMPTS}", f"objective.group={GROUP}",
        f"objective.max_tokens={ANSWER_TOKENS}", "objective.kl=0.1", f"train.global_batch={PROMPTS * GROUP}",
        f"train.steps={steps}", f"train.save_every={every}", f"train.eval_every={every}", "train.eval_batches=8",
        "train.sample_tokens=8", "optim.kind=adamw", "optim.schedule=cosine", "optim.min_ratio=0", "optim.b2=0.99",
        "optim.weight_decay=0", f"optim.learning_rate={recipe.learning_rate / 20:.3g}",
        f"optim.warmup_steps={math.ceil(steps / 12)}", "checkpoint.keep=1",
    ]  # fmt: skip
    cfg = _tuning(trip, trip.of("sft") / "run", "grpo", words)
    directory = run.train(cfg, task=task_of(cfg))
    keys = ("reward", "kl", "entropy", "val_correct", "val_correct_greedy")
    figures = {
        "flops": planned_flops(trip)["grpo"], "curve": _curve(directory, keys),
        "answers": _exam(trip, directory), "samples": _samples(directory),
    }  # fmt: skip
    _finish(trip, directory)
    # Answers can't be drawn before the last step ends, so most of a step's time is counted as waiting for them.
    return Result(figures, _times(directory) | {"mfu": None})


def final_model(trip: Trip) -> Path:
    """Returns the run directory of what the journey made, its parameters alone."""
    return trip.of("grpo") / "model"


def _finish(trip: Trip, directory: Path) -> None:
    """Writes the model as one for texts as long as pretraining's: GRPO's rows are short to save time."""
    cfg, params, tokenizer, step = load_run(directory)
    data = cfg.data.model_copy(update={"seq_len": trip.recipe.seq_len})
    shutil.rmtree(final_model(trip), ignore_errors=True)
    run_dir.write_parameters(
        directory, final_model(trip), cfg.model_copy(update={"data": data}), params, tokenizer, step
    )


def _tuning(trip: Trip, source: Path, recipe: str, words: Sequence[str]) -> Config:
    """Returns the configuration of a run that begins with another's parameters, in the stage of the recipe's name."""
    where = [f"run.dir={trip.of(recipe)}", "run.name=run"]
    return recipes.new_config(source, recipe, [*where, *words])


def _exam(trip: Trip, directory: Path) -> dict[str, Any]:
    """Returns the share of right answers to sums that were held out, and to some of a kind that never occurred."""
    examinee, count = Examinee(directory), 40 if trip.quick else None
    held_out = questions("validation")[:count]
    longer = questions("validation", least=100, most=140)[:count]
    return {"held_out": examinee.grade(held_out), "three_digits": examinee.grade(longer)}


def quantize(trip: Trip) -> Result:
    """Stores the weights in 8 and in 4 bits, and asks again."""
    source = trip.of("grpo") / "run"
    held_out = questions("validation")[: 40 if trip.quick else None]
    size = sum(x.nbytes for x in jax.tree.leaves(load_run(source)[1]))
    greedy = trip.figures("grpo")["answers"]["held_out"]["greedy"]
    found = [{"rules": "float32", "bytes": size, "error": 0.0, "worst": 0.0, "greedy": greedy}]
    for rules in QUANTIZED:
        target = trip.of("quantize") / rules
        stored = quantize_run.quantize_run(source, target, quantize_run.read_rules(rules))
        worst = max(stored, key=lambda row: row.worst)
        found.append({
            "rules": rules, "bytes": sum(row.after for row in stored),
            "error": math.sqrt(sum(row.error**2 * row.numbers for row in stored) / sum(r.numbers for r in stored)),
            "worst": worst.worst, "worst_weight": worst.weight,
            "greedy": Examinee(target).share_right(held_out, greedy=True),
        })  # fmt: skip
    return Result({"stored": found}, {})


def export(trip: Trip) -> Result:
    """Writes the model in the formats that others read."""
    source, folder = final_model(trip), trip.of("export")
    interchange.export_hf(source, folder / "hf")
    interchange.export_gguf(source, folder / "model.gguf", "float16")
    artefact_run.export_artefact(source, folder / "stablehlo")
    found = []
    for name, reader in EXPORTED.items():
        path = folder / name
        files_there = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        size = sum(p.stat().st_size for p in files_there)
        found.append({"name": name, "files": len(files_there), "bytes": size, "reader": reader})
    return Result({"exports": found}, {})


def serve(trip: Trip) -> Result:
    """Serves the model with its weights in 8 bits, and asks it as a client."""
    prompts = [record["prompt"] for record in questions("validation")[:5]]
    prompts += ["What is 123+456?", "What is 7-3?", "Who are you?"]
    began = time.perf_counter()
    with serving.served(trip.of("quantize") / QUANTIZED[0], "journey") as address:
        started = time.perf_counter() - began
        found = serving.ask_client(address, "journey", prompts)
        began = time.perf_counter()
    times = {"start": started, "answers": [one.pop("seconds") for one in found]}
    return Result({"asked": found}, times | {"stop": time.perf_counter() - began})
