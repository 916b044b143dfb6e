"""What the commands share: their arguments, how a configuration is loaded and JAX started, and how they answer.

Chapters: 6.
"""

import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minitext import files
from minitext.errors import UserError

if TYPE_CHECKING:
    from minitext.config.config import Config

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET] [KEY=VALUE]...", help="preset, then settings such as train.steps=300"
    ),
]


def check_run(path: str) -> str:
    """Refuses what can't be a run directory, before JAX starts."""
    files.local_path(path)
    try:
        problem = None if stat.S_ISDIR(os.stat(path).st_mode) else "is a file"
        if problem is None and not os.access(path, os.R_OK | os.X_OK):
            problem = "cannot be read (Permission denied)"
    except FileNotFoundError:  # `watch` waits for it
        problem = None
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise UserError(f"{files.shorten(path)} {problem}: name a run directory, such as runs/NAME")
    return path


def check_new(path: str) -> str:
    """Refuses what can't be a new folder, before anything is computed for it."""
    if os.path.lexists(files.local_path(path)):
        raise UserError(f"{files.shorten(path)} exists: name a folder that does not")
    above = next(folder for folder in Path(path).absolute().parents if os.path.lexists(folder))
    try:  # permissions say nothing to root, or of a read-only file system
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        reason = files.explain(error, "name a folder where one can be made")
        raise UserError(f"cannot write {files.shorten(path)}: {reason}") from error
    return path


def check_plot(path: str | None) -> str | None:
    """Refuses a file that couldn't be drawn into, before anything is computed for it."""
    if path is not None:
        files.check_new_file("--plot", path)
        if not path.lower().endswith(PICTURES):
            raise UserError(
                f"--plot {files.shorten(path)} is not a picture: end its name in {' or '.join(PICTURES)}"
            )
    return path


PICTURES = (".svg", ".png", ".pdf")
RunDir = Annotated[
    str,
    typer.Argument(metavar="RUN", help="run directory, such as runs/NAME", callback=check_run),
]
Plot = Annotated[
    str | None, typer.Option(metavar="FILE", help="draw it: .svg, .png, .pdf", callback=check_plot)
]
Temperature = Annotated[float, typer.Option(help="0: always the most likely token")]
TopK = Annotated[int, typer.Option(help="draw among this many most likely tokens; 0: all")]
TopP = Annotated[
    float, typer.Option(help="draw among the most likely tokens that sum to this probability")
]
MaxModelLen = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**24,
        help="tokens of a text, prompt included; 0: as the model was trained",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


def load(settings: list[str] | None, target: str | None = None) -> "Config":
    """Resolves `[PRESET] [KEY=VALUE]...`; a config file replaces the default preset.

    Args:
      settings: the words.
      target: the chips to compile for, if any: nothing is then simulated.
    """
    from minitext.config.config import DEFAULT_PRESET, load_config

    words = [s for s in settings or [] if "=" not in s]
    pairs = [s for s in settings or [] if "=" in s]
    if len(words) > 1:
        raise UserError(
            f"one preset at most: got {', '.join(map(repr, words))}; settings are written KEY=VALUE"
        )
    from_file = any(p.startswith("config=") for p in pairs)
    named = words[0] if words else None if from_file else DEFAULT_PRESET
    cfg = load_config(named, pairs)
    if target is not None:
        refuse_settings(cfg, ["mesh.simulate"], f"with target={target}")
    return cfg


def refuse_settings(cfg: "Config", keys: Sequence[str], where: str) -> None:
    """Refuses keys on the command line that would change nothing; a preset's and a file's are for training too."""
    for key in keys:
        if cfg.provenance(key) == "command line":
            raise UserError(f"{key} has no effect {where}: leave it out")


def refuse_options(ctx: typer.Context, names: Sequence[str], where: str) -> None:
    """Refuses options on the command line that would change nothing."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.strip('_').replace('_', '-')}"
            raise UserError(f"{option} has no effect {where}: leave it out")


def split_off(settings: list[str] | None, key: str) -> tuple[list[str], list[str]]:
    """Takes `key=value` out of the settings: returns its values, and the other settings."""
    values = [s.partition("=")[2] for s in settings or [] if s.startswith(f"{key}=")]
    return values, [s for s in settings or [] if not s.startswith(f"{key}=")]


def take_chip(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """Takes `chip=NAME` out of the settings: returns the name or names, and the rest."""
    chips, rest = split_off(settings, "chip")
    if len(chips) > 1:
        raise UserError(f"chip={' and chip='.join(chips)}: name a chip once")
    return (chips[0] if chips else None), rest


def take_target(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """Takes `target=CHIP:SHAPE` and `slices=N` out of the settings: returns both as one target, and the rest."""
    targets, rest = split_off(settings, "target")
    slices, rest = split_off(rest, "slices")
    if len(targets) > 1 or len(slices) > 1 or (targets and not targets[0].strip()):
        raise UserError("name one target, such as target=v5e:2x4 or target=v5e:16x16 slices=2")
    if slices and not targets:
        raise UserError(
            f"slices={slices[0]} belongs to a target: name one, such as target=v5e:16x16"
        )
    if slices and "slices=" in targets[0]:
        raise UserError(f"slices={slices[0]} is given twice: target={targets[0]} has slices too")
    return (" slices=".join([*targets, *slices]) if targets else None), rest


def start(
    simulate: int | None = None,
    *,
    keep_memory: bool = False,
    join: bool = False,
    cache: bool = True,
) -> None:
    """Starts JAX, on simulated devices if asked for, and with the compilation cache unless it is unwanted."""
    from minitext.distributed import devices

    devices.start(simulate, keep_memory=keep_memory, join=join)
    if cache:
        devices.use_compilation_cache()


def answer(found: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Prints what a command found, as one JSON object or as `show` prints it."""
    if as_json:
        print(json.dumps(_for_json(found.to_json() if hasattr(found, "to_json") else found)))
    else:
        show(found)


def _for_json(found: Any) -> Any:
    """Returns a value with NaN and infinite numbers as text, as in metrics.jsonl: JSON has none."""
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, dict):
        return {key: _for_json(value) for key, value in found.items()}
    return [_for_json(value) for value in found] if isinstance(found, (list, tuple)) else found
