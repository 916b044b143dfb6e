"""The command that goes the whole way, from text to an assistant that a server offers."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minitext import files
from minitext.cli.arguments import Json, answer, refuse_options, start
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError

if TYPE_CHECKING:
    from minitext.journey.trip import Trip

ALLOWED = (
    "data.source=",
    "data.path=",
    "data.text_key=",
    "data.tfds_name=",
    "data.tfds_split=",
    "mesh.",
    "sharding.",
)


def journey(
    ctx: typer.Context,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="other text or a mesh: data.source=files data.path=DIR mesh.fsdp=8",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="the dial: layers of the model; all sizes follow  [default: 5]"),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="FLOPS",
            help="instead: the largest depth whose study and pretraining cost no more",
        ),
    ] = None,
    tokens_per_parameter: Annotated[
        float, typer.Option(help="length of pretraining; Hoffmann et al. found 20 best")
    ] = 3.0,
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="folder to work in  [default: runs/journey-dDEPTH]"),
    ] = None,
    stages: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="only these stages; by default all")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="a twentieth of the training, to see whether all of it works"),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="print what follows from the dial, and stop")
    ] = False,
    as_json: Json = False,
) -> None:
    """Go the whole way: data, tokenizer, scaling study, pretraining, evaluation, SFT, GRPO, int8, export, serving.

    One dial, the depth, says how large everything is: embed = 24 x depth, heads of 24 (of 128 from depth 16 on), mlp =
    64 x depth, tokens = 3 x parameters, batch = 2 x sqrt(tokens), learning rate = 0.05 / sqrt(embed). The default
    takes about half an hour on two cores; FLOPs grow with the sixth power of the depth.

    Smaller models are trained first, and predict the loss of the large one. The same command goes on where it was
    interrupted. At the end DIR/report.html has every curve. Needs the extra journey.
    """
    refuse_options(ctx, ["run", "stages"] if plan else [], "with --plan")
    words = _checked(settings or [])
    directory = Path(os.path.expanduser(files.local_path(run))) if run is not None else None
    if depth is not None and budget is not None:
        raise UserError(
            f"--depth {depth} and --budget {budget:g} both set the dial: give one of them"
        )
    _start(words, plan)
    from minitext.journey import dial
    from minitext.journey.run import check_stages
    from minitext.journey.trip import Trip

    names = check_stages([name.strip() for name in stages.split(",")] if stages is not None else [])
    depth, tokens = _dial(depth, budget, tokens_per_parameter, quick)
    recipe, study = dial.recipe(depth, tokens), dial.study_of(depth, tokens)
    if plan:
        found = {"recipe": recipe.to_json(), "study": [each.to_json() for each in study]}
        answer(found, as_json, lambda _: dial.print_plan(recipe, study, words))
        return
    name = f"journey-d{depth}{'-quick' if quick else ''}"
    trip = Trip(directory or Path("runs") / name, recipe, tuple(study), tuple(words), quick)
    _walk(trip, names, as_json)


def _dial(
    depth: int | None, budget: float | None, tokens_per_parameter: float, quick: bool
) -> tuple[int, float]:
    """Returns the depth, given or bought, and the tokens for each parameter."""
    from minitext.journey import dial

    dial.check(dial.DEFAULT_DEPTH if depth is None else depth, tokens_per_parameter)
    tokens = tokens_per_parameter * (dial.QUICK_SHARE if quick else 1)
    if budget is not None:
        return dial.depth_for(budget, tokens), tokens
    return (dial.DEFAULT_DEPTH if depth is None else depth), tokens


def _start(words: list[str], plan: bool) -> None:
    from minitext.config.config import load_config

    mesh = load_config(None, words).mesh
    if not plan:
        _check_extras()
    start(simulate_for(list(mesh.sizes().values()), mesh.simulate))


def _walk(trip: "Trip", names: tuple[str, ...], as_json: bool) -> None:
    from minitext.journey.run import run_journey
    from minitext.training.stopping import Interrupted

    try:
        page = run_journey(trip, names)
    except Interrupted as stop:
        print(f"{str(stop).partition(';')[0]}; the same command goes on", file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    answer({"report": str(page)}, as_json, lambda found: print(f"the report is {found['report']}"))


def _checked(words: list[str]) -> list[str]:
    """Refuses settings that follow from the dial."""
    for word in words:
        if "=" not in word:
            raise UserError(
                f"{files.shorten(word)!r} is not key=value: write such as data.path=DIR"
            )
        if not word.startswith(ALLOWED):
            key = files.shorten(word.partition("=")[0])
            raise UserError(
                f"{key} can't be set: sizes, batch, rates and steps follow from --depth; only data.source, data.path, "
                "data.text_key, data.tfds_*, mesh.* and sharding.* can be"
            )
    return words


def _check_extras() -> None:
    """Refuses to begin without what the last stages need."""
    import importlib.util

    for name in ("fastapi", "uvicorn", "openai", "gguf", "safetensors", "flatbuffers"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"the journey needs {name}: pip install 'minitext[journey]'")
