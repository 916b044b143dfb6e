"""The command line: `minitext` and `python -m minitext`.

Commands parse, call one function, and print; JAX is imported only by the commands that compute. Exit codes: 0 done,
1 failed, 2 bad input, 3 does not fit, 130 interrupted.

Chapters: 6.
"""

import json
import sys
from typing import Annotated, Any

import typer

from minitext.errors import UserError
from minitext.grading.command import grade

app = typer.Typer(
    name="minitext",
    help="Train language models the way MaxText does, in code small enough to read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, help="Show and explain configurations.")
app.add_typer(config_app, name="config")
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
app.add_typer(data_app, name="data")
optim_app = typer.Typer(no_args_is_help=True, help="What optimizers cost.")
app.add_typer(optim_app, name="optim")
app.command("grade")(grade)

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET] [KEY=VALUE]...", help="preset, then settings such as train.steps=300"
    ),
]
RunDir = Annotated[str, typer.Argument(metavar="RUN", help="run directory, such as runs/NAME")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


@app.command()
def train(settings: Settings = None) -> None:
    """Train a model, by default the preset `laptop` on the text of the Python standard library.

    Interrupt with Ctrl-C: the state is saved, and the command to resume is printed.
    """
    cfg = _load(settings)
    _start(cfg.mesh.simulate, keep_memory=True)
    from minitext import run

    try:
        directory = run.train(cfg)
    except run.Interrupted as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(130) from None
    prompt = "def " if cfg.data.source == "stdlib" else "the "
    print(f"done; try: minitext generate {directory} --prompt '{prompt}'", file=sys.stderr)


@app.command()
def generate(
    directory: RunDir,
    prompt: Annotated[str, typer.Option(help="text to go on from")],
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.8,
    top_k: Annotated[int, typer.Option(help="draw among this many most likely tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="draw among the most likely tokens that sum to this probability")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, using a key-value cache."""
    _start()
    from minitext import rundir
    from minitext.generate import Sampling
    from minitext.generate import generate as stream

    how = Sampling(temperature, top_k, top_p)
    how.check()
    cfg, params, tokenizer, step = rundir.load_run(directory)
    tokens, shown = [], ""  # the prompt is shown with the first token, after what compiling may log
    for token in stream(
        cfg.model, params, tokenizer.encode(prompt), max_tokens=max_tokens, how=how, seed=seed,
        stop_id=tokenizer.eod_id,
    ):  # fmt: skip
        tokens.append(token)
        # A character may take several tokens: print what is complete.
        text = prompt + tokenizer.decode(tokens)
        if not as_json and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    text = prompt + tokenizer.decode(tokens)
    found = {"text": text, "tokens": len(tokens), "step": step}
    print(json.dumps(found) if as_json else text[len(shown) :])


@app.command()
def export(
    directory: RunDir,
    target: Annotated[str, typer.Argument(metavar="DIRECTORY", help="must not exist")],
) -> None:
    """Write a run's parameters alone, a third of its checkpoint, for generate, eval and checkpoint.load_parameters."""
    _start()
    from minitext import rundir

    step = rundir.export_run(directory, target)
    print(f"step {step} of {directory} is in {target}", file=sys.stderr)


@app.command("eval")
def evaluate(
    directory: RunDir,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="other data, such as data.path=FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model's loss on all of its validation text."""
    _start()
    from minitext import rundir

    result = rundir.evaluate_run(directory, settings or [])
    if as_json:
        print(json.dumps(result))
        return
    floor = f", floor {result['floor']:.4f}" if result["floor"] else ""
    print(
        f"step {result['step']}: validation loss {result['loss']:.4f} nats/token{floor}, perplexity "
        f"{result['perplexity']:.2f}, {result['bits_per_byte']:.3f} bits/byte, over {result['tokens']:,} tokens"
    )


@app.command("compile")
def compile_(settings: Settings = None, as_json: Json = False) -> None:
    """Compile a preset's train step for chips that need not be there: target=v5e:2x2.

    Prints whether it fits, bytes of arguments and temporaries per chip, collectives and compile time. Exits with 3,
    naming the largest tensors, if it does not fit.
    """
    targets, rest = _split("target", settings)
    if len(targets) != 1:
        raise UserError("name one target, such as target=v5e:2x2 or target=v5p:4x4x4")
    cfg = _load(rest)
    _start()
    from minitext import aot

    report = aot.compile_preset(cfg, targets[0])
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        aot.print_report(report)
    if not report.fits:
        raise typer.Exit(3)


@app.command()
def comms(settings: Settings = None, as_json: Json = False) -> None:
    """Predict what devices send each other in a step, beside the program for simulated ones or for target=v5e:2x4."""
    targets, rest = _split("target", settings)
    cfg = _load(rest)
    _start(None if targets else cfg.mesh.simulate or 8)
    from minitext import comms_report

    found = comms_report.audit_preset(cfg, targets[-1] if targets else None)
    print(json.dumps(found.to_json())) if as_json else comms_report.print_audit(found)


@app.command()
def roofline(
    settings: Settings = None,
    rows: Annotated[int, typer.Option(min=0, help="operations to list, the longest first")] = 20,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="draw them: .svg, .png")] = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a preset's train step from its FLOPs and bytes, here or on a chip: chip=v5p.

    On a chip the step is shared evenly by the devices of mesh.*, and what they tell each other takes no time. This
    machine's peak and bandwidth are measured once a day.
    """
    chips, rest = _split("chip", settings)
    cfg = _load(rest)
    _start()
    from minitext import roofline

    prediction = roofline.predict_step(cfg, chips[-1] if chips else None)
    if as_json:
        print(json.dumps(prediction.to_json()))
    else:
        roofline.print_prediction(prediction, cfg.model.dtype, rows)
    if plot is not None:
        from minitext.notebook import save_roofline

        save_roofline(plot, prediction, cfg.model.dtype)


@config_app.command("show")
def config_show(settings: Settings = None, as_json: Json = False) -> None:
    """Print a resolved configuration with the origin of every value."""
    from minitext.config import to_yaml

    cfg = _load(settings)
    shown = json.dumps(cfg.model_dump(mode="json")) if as_json else to_yaml(cfg, provenance=True)
    print(shown, end="\n" * as_json)


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="dotted key, or the start of some, such as optim.")],
    settings: Settings = None,
) -> None:
    """Explain keys: type, default, meaning, and the value in a preset."""
    from minitext.config import ConfigError, keys, suggest

    cfg = _load(settings)
    below = key.rstrip(".") + "."
    found = {n: field for n, field in keys().items() if n == key or n.startswith(below)}
    if not found:
        raise ConfigError([f"unknown key {key!r}{suggest(key, list(keys()))}"])
    for name, field in found.items():
        value: Any = cfg
        for part in name.split("."):
            value = getattr(value, part)
        kind = getattr(field.annotation, "__name__", None)
        kind = kind or str(field.annotation).replace("typing.", "")
        print(
            f"{name} = {value}   ({cfg.provenance(name)})\n    {field.description}; {kind}, default {field.default}"
        )


@config_app.command("presets")
def config_presets() -> None:
    """List the presets."""
    from minitext.config import presets

    print("\n".join(presets()))


@data_app.command("pack")
def data_pack(
    target: Annotated[str, typer.Argument(metavar="FOLDER", help="where to write; must not exist")],
    settings: Settings = None,
    shards: Annotated[int, typer.Option(min=1, help="files of training rows")] = 4,
) -> None:
    """Tokenise a preset's text once, into ArrayRecord files that data.source=arrayrecord data.path=FOLDER reads."""
    cfg = _load(settings)
    from minitext.data.rows import pack_source

    rows = pack_source(cfg.data, target, vocab=cfg.model.vocab, shards=shards)
    said = ", ".join(f"{count:,} {split}" for split, count in rows.items())
    print(f"{target}: {said} rows of {cfg.data.seq_len:,} tokens", file=sys.stderr)


@optim_app.command("memory")
def optim_memory(settings: Settings = None, as_json: Json = False) -> None:
    """Compare the memory of a preset's training state under each optimizer, summed over all devices."""
    cfg = _load(settings)
    _start()
    from minitext.compile_report import print_tables, show_bytes, table
    from minitext.train import optimizer_memory

    found = optimizer_memory(cfg)
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        (kind, *(show_bytes(size) for size in (*parts.values(), sum(parts.values()))))
        for kind, parts in found.items()
    ]
    heads = ("optimizer", "parameters", "gradients", "state", "sum")
    print_tables(table(heads, rows, right=(1, 2, 3, 4)))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine is and what minitext can do on it."""
    _start()
    from minitext.doctor import examine

    facts = examine()
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:<22} {value}")


def _split(key: str, settings: list[str] | None) -> tuple[list[str], list[str]]:
    """Returns the values of `key=` among the settings, and the other settings."""
    mine = [s for s in settings or [] if s.startswith(f"{key}=")]
    return [s.partition("=")[2] for s in mine], [s for s in settings or [] if s not in mine]


def _load(settings: list[str] | None):
    """Splits `[PRESET] [KEY=VALUE]...` and resolves it; a config file takes the default preset's place."""
    from minitext.config import DEFAULT_PRESET, load_config

    words = [s for s in settings or [] if "=" not in s]
    pairs = [s for s in settings or [] if "=" in s]
    if len(words) > 1:
        raise UserError(
            f"one preset at most: got {', '.join(words)}; settings are written KEY=VALUE"
        )
    from_file = any(p.startswith("config=") for p in pairs)
    return load_config(words[0] if words else None if from_file else DEFAULT_PRESET, pairs)


def _start(simulate: int | None = None, *, keep_memory: bool = False) -> None:
    from minitext import devices

    devices.start(simulate, keep_memory=keep_memory)
    devices.use_compilation_cache()


def main() -> None:
    """Runs the command line; a UserError becomes one line on stderr and its exit code."""
    import logging

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("minitext").setLevel(logging.INFO)
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
