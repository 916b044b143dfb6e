"""The commands that make and use a model.

Chapters: 6.
"""

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from minitext import files
from minitext.cli.arguments import (
    Json,
    MaxModelLen,
    Plot,
    RunDir,
    Settings,
    Temperature,
    TopK,
    TopP,
    answer,
    check_new,
    check_run,
    load,
    start,
)
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError
from minitext.terminal import print_tables, table


def check_licence(name: str) -> str:
    """Refuses what can't be the name of a licence, before a model is read."""
    if not name.strip() or len(name) > 100 or not name.isprintable():
        shown = files.shorten(name)
        raise UserError(f"--license {shown} is not the name of a licence: give one, such as mit")
    return name


def train(settings: Settings = None) -> None:
    """Train a model, by default the preset `laptop` on the text of the Python standard library.

    Interrupt with Ctrl-C: the state is saved, and the command to resume is printed.
    """
    began = time.time()
    cfg = load(settings)
    dump = cfg.profile.dump_hlo or cfg.profile.dump_llo
    if dump:
        from minitext.observability import profiler

        profiler.dump_programs(cfg)
    simulate = simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate)
    start(simulate, keep_memory=True, join=True, cache=not dump)
    from minitext.distributed import job
    from minitext.post_training.tasks import task_of
    from minitext.training import run
    from minitext.training.stopping import Interrupted

    try:
        directory = run.train(cfg, began=began, task=task_of(cfg))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    if not job.is_first():
        return
    prompt = "def " if cfg.data.source == "stdlib" else "the "
    shown = shlex.quote(str(directory))
    print(f"done; try: minitext generate {shown} --prompt '{prompt}'", file=sys.stderr)


def generate(
    directory: RunDir,
    prompt: Annotated[str | None, typer.Option(help="text to go on from")] = None,
    chat: Annotated[
        str | None, typer.Option(help="message to answer, with the chat template of the model")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate at most")] = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="the same seed gives the same text")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer a message, with a trained model, using a key-value cache."""
    if (prompt is None) == (chat is None):
        raise UserError(
            "give either --prompt, a text to go on from, or --chat, a message to answer"
        )
    start()
    from minitext.data.chat import read_chat
    from minitext.inference.generate import Sampling, generate
    from minitext.training import run_dir
    from minitext.training.run_dir import PUBLISHED

    sampling = Sampling(temperature, top_k, top_p)
    sampling.check()
    cfg, params, tokenizer, step = run_dir.load_run(directory)
    if chat is None:
        ids, stops, before = tokenizer.encode(prompt or ""), {tokenizer.eod_id}, prompt or ""
    else:
        conversation = read_chat(Path(directory) / PUBLISHED, tokenizer)
        text = conversation.render([{"role": "user", "content": chat}])
        # The template writes the token at the beginning itself.
        ids, stops, before = (
            tokenizer.encode_chat(text),
            conversation.stops,
            "",
        )
    tokens, shown = [], ""  # the prompt is shown with the first token, after what compiling may log
    for token in generate(
        cfg.model, params, ids, max_tokens=max_tokens, sampling=sampling, seed=seed, stop_id=stops,
    ):  # fmt: skip
        tokens.append(token)
        # A character may take several tokens: print what is complete.
        text = before + tokenizer.decode(tokens)
        if not as_json and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    text = before + tokenizer.decode(tokens)
    found = {"text": text, "tokens": len(tokens), "step": step}
    answer(found, as_json, lambda found: print(found["text"][len(shown) :]))


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Hugging Face folder, GGUF file, or smollm2"),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="run directory to make; must not exist", callback=check_new
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="settings of the run, such as mesh.fsdp=4"),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="read NaN and infinite numbers as they are")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="SOURCE has adapters in peft's format for this run"),
    ] = None,
) -> None:
    """Make a run of a published checkpoint, for generate, eval and checkpoint.load_parameters."""
    from minitext.config.config import load_config

    if base is not None:
        check_run(base)
        if settings or allow_nonfinite:
            given = settings[0] if settings else "--allow-nonfinite"
            raise UserError(f"{given} has no effect with --base: leave it out")
        start()
        from minitext.training.peft import import_peft

        count = import_peft(source, target, base)
        print(f"adapters of {count:,} parameters beside {base} are in {target}", file=sys.stderr)
        return

    mesh = load_config(None, settings or []).mesh
    start(simulate_for(list(mesh.sizes().values()), mesh.simulate))
    from minitext.terminal import show_bytes
    from minitext.training import interchange

    found = interchange.import_run(source, target, settings or [], allow_nonfinite)
    print(
        f"{found.parameters:,} parameters ({found.family}) are in {target}; peak memory {show_bytes(found.peak_bytes)}",
        file=sys.stderr,
    )
    if found.unread:
        print(found.unread, file=sys.stderr)


Format = Annotated[
    Literal["orbax", "hf", "gguf", "peft", "onnx", "stablehlo"],
    typer.Option(
        "--format",
        help="minitext's own, Hugging Face's, llama.cpp's, peft's of the adapters alone, onnxruntime's, or "
        "programs for JAX alone",
    ),
]


def export(
    directory: RunDir,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="directory to write, or of gguf the file; must not exist",
            callback=check_new,
        ),
    ],
    format_: Format = "orbax",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "q8_0", "q4_0"],
        typer.Option(
            help="type of the numbers: bfloat16 for hf alone, q8_0 and q4_0 for gguf alone"
        ),
    ] = "float32",
    licence: Annotated[
        str,
        typer.Option(
            "--license",
            metavar="NAME",
            help="for the model card, such as apache-2.0",
            callback=check_licence,
        ),
    ] = "unknown",
) -> None:
    """Write a run's parameters alone, a third of its checkpoint: for minitext, or as others publish them.

    Adapters are merged into the weights beside which they were trained, except with --format peft. Each folder has a
    model card, README.md: data, sizes, losses, evaluation, and the commands to run it. gguf is one file without.
    """
    if format_ == "gguf" and licence != "unknown":
        raise UserError(
            f"--license {files.shorten(licence)} has no effect with --format gguf: leave it out"
        )
    if format_ in ("orbax", "peft", "onnx", "stablehlo") and dtype != "float32":
        other = "gguf" if dtype in ("q8_0", "q4_0") else "hf"
        raise UserError(
            f"--dtype {dtype} has no effect with --format {format_}: add --format {other}"
        )
    start()
    from minitext.training import interchange, run_dir

    match format_:
        case "hf":
            step = interchange.export_hf(directory, target, dtype, licence=licence)
        case "gguf":
            step = interchange.export_gguf(directory, target, dtype)
        case "peft":
            from minitext.training import peft

            step = peft.export_peft(directory, target, licence)
        case "onnx":
            from minitext.training import onnx_export

            step = onnx_export.export_onnx(directory, target, licence)
        case "stablehlo":
            from minitext.training import artefact_run

            step = artefact_run.export_artefact(directory, target, licence)
        case _:
            step = run_dir.export_run(directory, target, licence)
    print(f"step {step} of {directory} is in {target}", file=sys.stderr)


def quantize(
    directory: RunDir,
    target: Annotated[
        str | None, typer.Argument(metavar="OUT", help="run directory to make; must not exist")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="int8 (the default), fp8, int4, nf4, a YAML file, or '[{module: blocks/.*, dtype: int4, block: 32}]'",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="text for which to round projections in 4 bits (GPTQ); data: the run's own",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="compare the presets, and make no run")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="with --sweep: text to measure; else validation data"),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Store a run's weights in 4 or 8 bits, for generate, serve and eval: quantize runs/NAME OUT --rules int4.

    The first rule that a module's path matches says how its weights are stored: int8, fp8, int4, nf4 or none, with a
    scale for each output, or for each block of its inputs. Prints the error of each weight and the sizes. With --sweep
    it prints the size and the perplexity of every preset instead.
    """
    written_here = rules is not None and rules.lstrip().startswith("[")
    for path in (target, None if written_here else rules, calibrate, text):
        files.local_path(path)
    if sweep and (target or rules):
        raise UserError(f"{target or rules} has no effect with --sweep: it makes no run")
    if not sweep and (text or plot):
        raise UserError(f"{text or plot} has no effect without --sweep: add it")
    if not sweep and target is None:
        raise UserError("OUT is missing: name a run directory to make, or add --sweep")
    if target is not None:
        check_new(target)
    start()
    from minitext.terminal import show_bytes
    from minitext.training import quantize_run
    from minitext.training.interchange import peak_bytes

    if sweep:
        found = quantize_run.sweep(directory, text, calibrate)
        as_rows = [row._asdict() for row in found] if as_json else found
        answer(as_rows, as_json, quantize_run.print_sweep)
        if plot is not None:
            from minitext.perf.figures import draw_storage, save_figure

            save_figure(plot, lambda: draw_storage(found))
        return
    chosen = quantize_run.read_rules(rules or "int8")
    rows = quantize_run.quantize_run(directory, str(target), chosen, calibrate)
    as_rows = [row._asdict() for row in rows] if as_json else rows
    answer(as_rows, as_json, quantize_run.print_errors)
    print(f"{target} is made; peak memory {show_bytes(peak_bytes())}", file=sys.stderr)


def parity(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="a Hugging Face folder: config.json and safetensors"),
    ],
    length: Annotated[int, typer.Option(min=1, max=1 << 20, help="tokens of the text")] = 32,
    continued: Annotated[
        int, typer.Option("--continue", min=1, max=4096, help="tokens that follow it")
    ] = 16,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="of the text's random tokens")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint's model here with transformers' on the same files: layers, logits, greedy tokens.

    Both compute in float32, so this needs memory for both. Exits with 1, naming the first layer that differs, if they
    differ by more than rounding. Needs the extra parity.
    """
    start()
    from minitext.inference import parity

    found = parity.compare(directory, length=length, continued=continued, seed=seed)
    answer(found, as_json, parity.print_parity)
    if not found.holds:
        raise typer.Exit(1)


def evaluate(
    directory: RunDir,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="other data, such as data.path=FILE"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="tasks of lm-eval, by name or as YAML files"),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="folder of your own tasks, to name them")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="solved examples before each question")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="ask as in a conversation")
    ] = False,
    max_model_len: MaxModelLen = 0,
    as_json: Json = False,
) -> None:
    """Measure a trained model's loss on all of its validation text, or its scores on benchmarks.

    Benchmarks are tasks of EleutherAI's lm-eval: --tasks my_task.yaml, or --tasks arc_easy with a network. A task file
    can run code: use only those you trust. Needs the extra eval.
    """
    if include_path is not None:
        files.local_path(include_path)
    if tasks is not None:
        if settings:
            raise UserError(
                f"{settings[0]} has no effect with --tasks, which bring data of their own"
            )
        names = [files.local_path(name.strip()) for name in tasks.split(",") if name.strip()]
        scores = _score_tasks(
            directory, names, include_path, max_model_len,
            num_fewshot=num_fewshot, limit=limit, apply_chat_template=apply_chat_template,
        )  # fmt: skip
        answer(scores, as_json, _show_scores)
        return
    if unused := [
        name
        for name, value in (
            ("--include-path", include_path), ("--num-fewshot", num_fewshot), ("--limit", limit),
            ("--apply-chat-template", apply_chat_template or None), ("--max-model-len", max_model_len or None),
        )
        if value is not None
    ]:  # fmt: skip
        raise UserError(f"{unused[0]} belongs to benchmarks: name some with --tasks")
    start()
    from minitext.training import model_card, run_dir

    found = run_dir.evaluate_run(directory, settings or [])
    what = " ".join(["validation", *(settings or [])])
    model_card.keep_evaluation(directory, found["step"], what, found)
    answer(found, as_json, _show_loss)


def _show_loss(r: dict[str, Any]) -> None:
    floor = f", floor {r['floor']:.4f}" if r["floor"] else ""
    print(
        f"step {r['step']}: validation loss {r['loss']:.4f} nats/token{floor}, perplexity {r['perplexity']:.2f}, "
        f"{r['bits_per_byte']:.3f} bits/byte, over {r['tokens']:,} tokens"
    )


def _score_tasks(
    directory: str, names: list[str], folder: str | None, longest: int, **options: Any
) -> dict[str, Any]:
    """Returns the scores of a run's model by task; `longest` 0 is the longest text it was trained for."""
    if not names:
        raise UserError("--tasks names no task: give a name or the path of a YAML file")
    if folder is not None and not Path(folder).is_dir():
        raise UserError(
            f"--include-path {files.shorten(folder)} is not a folder: name the one with your tasks"
        )
    start()
    try:
        from minitext.inference.evaluate import MinitextLM, evaluate, load_tasks
    except ImportError as error:
        raise UserError(f"benchmarks need {error.name}: pip install 'minitext[eval]'") from error
    from minitext.data.chat import read_chat
    from minitext.training.interchange import longest_text
    from minitext.training.model_card import keep_evaluation
    from minitext.training.run_dir import PUBLISHED, load_run

    tasks, run = load_tasks(names, folder), Path(directory)
    cfg, params, tokenizer, step = load_run(run)
    chat = read_chat(run / PUBLISHED, tokenizer)
    length = longest or longest_text(cfg, run / PUBLISHED)
    model = MinitextLM(cfg.model, params, tokenizer, chat, max_length=length)
    scores = evaluate(model, tasks, **options)
    for task, values in scores.items():
        keep_evaluation(run, step, task, values)
    return scores


def _show_scores(scores: dict[str, Any]) -> None:
    rows = []
    for task, values in scores.items():
        for metric in [key for key in values if key != "samples" and not key.endswith("_stderr")]:
            error = values.get(f"{metric}_stderr")
            known = "" if error is None else f"{error:.4f}"
            count = str(values.get("samples", ""))
            rows.append((task, metric, f"{values[metric]:.4f}", known, count))
    heads = ("task", "metric", "value", "standard error", "documents")
    print_tables(table(heads, rows, right=(2, 3, 4)))
