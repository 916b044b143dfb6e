"""What the commands share: their arguments, how a configuration is loaded and JAX started, and how they answer.

Chapters: 6.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from minitext import files
from minitext.errors import UserError

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET] [KEY=VALUE]...", help="preset, then settings such as train.steps=300"
    ),
]
RunDir = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="run directory, such as runs/NAME", callback=files.local_path
    ),
]
Plot = Annotated[
    str | None, typer.Option(metavar="FILE", help="draw it: .svg, .png", callback=files.local_path)
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


def load(settings: list[str] | None):
    """Resolves `[PRESET] [KEY=VALUE]...`; a config file replaces the default preset."""
    from minitext.config.config import DEFAULT_PRESET, load_config

    words = [s for s in settings or [] if "=" not in s]
    pairs = [s for s in settings or [] if "=" in s]
    if len(words) > 1:
        raise UserError(
            f"one preset at most: got {', '.join(words)}; settings are written KEY=VALUE"
        )
    named = words[0] if words else None
    from_file = any(p.startswith("config=") for p in pairs)
    return load_config(named if named or from_file else DEFAULT_PRESET, pairs)


def split_off(settings: list[str] | None, key: str) -> tuple[list[str], list[str]]:
    """Takes `key=value` out of the settings: returns its values, and the other settings."""
    values = [s.partition("=")[2] for s in settings or [] if s.startswith(f"{key}=")]
    return values, [s for s in settings or [] if not s.startswith(f"{key}=")]


def take_target(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """Takes `target=CHIP:SHAPE` and `slices=N` out of the settings: returns both as one target, and the rest."""
    targets, rest = split_off(settings, "target")
    slices, rest = split_off(rest, "slices")
    if len(targets) > 1 or len(slices) > 1:
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
        print(json.dumps(found.to_json() if hasattr(found, "to_json") else found))
    else:
        show(found)
