"""The commands for those who use MaxText: its commands explained, its checkpoints in and out.

Chapters: 27.
"""

import sys
from typing import Annotated, Literal

import typer

from minitext import files
from minitext.cli.arguments import Json, RunDir, answer, check_new, start
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError


def explain(
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND|FILE", help="MaxText's command in quotes, a script, or a .yml"
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="CHIP:SHAPE", help="chips, such as v5p:4x4x8 or 'v5e:16x16 slices=2'"),
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile", help="compile the step for the time that the compiler's schedule takes"
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a command of MaxText means here: each key, whether it fits, bytes on each network, a step's time.

    Such as minitext maxtext explain "python3 -m maxtext.trainers.pre_train.train base.yml model_name=llama2-7b ..."
    In xpk's commands, the device type names the chips. Nothing runs. Exits with 3 if the step does not fit.
    """
    start()
    from minitext.perf import maxtext

    found = maxtext.explain(command, target, compile_)
    answer(found, as_json, maxtext.print_explanation)
    if found.translation.refused is not None:
        raise typer.Exit(2)
    if found.answers is not None and not found.answers.fits:
        raise typer.Exit(3)


def import_(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="MaxText's checkpoint: its folder, a step, or items"
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="run directory to make; must not exist", callback=check_new
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="MaxText's words for the model: model_name=llama3.1-8b, or its config.yml",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="with tokenizer.json; by default texts are bytes"),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="read NaN and infinite numbers as they are")
    ] = False,
) -> None:
    """Make a run from MaxText's checkpoint: minitext maxtext import CHECKPOINT RUN model_name=llama3.1-8b.

    Layers may be scanned or not. Of a training state, only the parameters are read. minitext's settings, such as
    mesh.fsdp=4, go beside MaxText's words.
    """
    from minitext.config.config import load_config

    given = words or []
    for path in (checkpoint, tokenizer, *(word for word in given if "=" not in word)):
        files.local_path(path)
    ours = [word for word in given if "." in word.partition("=")[0] and "=" in word]
    theirs = [word for word in given if word not in ours]
    if not theirs:
        raise UserError(
            "a checkpoint doesn't name its model: add MaxText's words, such as model_name=llama3.1-8b"
        )
    mesh = load_config(None, ours).mesh
    start(simulate_for(list(mesh.sizes().values()), mesh.simulate))
    from minitext.terminal import show_bytes
    from minitext.training import maxtext

    found = maxtext.import_run(checkpoint, target, theirs, ours, tokenizer, allow_nonfinite)
    layers = "scanned" if found.is_scanned else "unscanned"
    print(
        f"{found.parameters:,} parameters ({found.block}, {layers}) are in {target}; peak memory "
        f"{show_bytes(found.peak_bytes)}",
        file=sys.stderr,
    )
    if found.left:
        print(f"left behind: {', '.join(found.left)}", file=sys.stderr)


def export(
    directory: RunDir,
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="folder to write; must not exist", callback=check_new
        ),
    ],
    scanned: Annotated[
        bool,
        typer.Option("--scan/--no-scan", help="stack the layers, as scan_layers=true has them"),
    ] = True,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="type of the numbers")
    ] = "float32",
) -> None:
    """Write a run's parameters as MaxText loads them, load_parameters_path=CHECKPOINT/0/items, and its model's keys.

    Adapters are merged. Scales that MaxText keeps in its weights, such as attention's, are multiplied into them.
    """
    start()
    from minitext.training import maxtext

    found = maxtext.export_run(directory, target, scanned, dtype)
    how = "as they are" if found.is_exact else "multiplied by the scales that MaxText keeps in them"
    print(
        f"step {found.step}, numbers {how}; for MaxText: {target}/model.yml in place of base.yml, and "
        f"load_parameters_path={found.items}",
        file=sys.stderr,
    )
