"""What the commands share: their arguments, and how a configuration and JAX are brought up.

Chapters: 6.
"""

from typing import Annotated

import typer

from minitext.errors import UserError

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET] [KEY=VALUE]...", help="preset, then settings such as train.steps=300"
    ),
]
RunDir = Annotated[str, typer.Argument(metavar="RUN", help="run directory, such as runs/NAME")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]


def load(settings: list[str] | None):
    """Splits `[PRESET] [KEY=VALUE]...` and resolves it; a config file takes the default preset's place."""
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
        raise UserError(f"slices={slices[0]} are of a target: name one, such as target=v5e:16x16")
    if slices and "slices=" in targets[0]:
        raise UserError(f"slices={slices[0]} is said twice: target={targets[0]} has slices too")
    return (" slices=".join([*targets, *slices]) if targets else None), rest


def start(
    simulate: int | None = None,
    *,
    keep_memory: bool = False,
    join: bool = False,
    cache: bool = True,
) -> None:
    """Brings up JAX, on simulated devices if any are asked for, with the compilation cache unless it is unwanted."""
    from minitext.distributed import devices

    devices.start(simulate, keep_memory=keep_memory, join=join)
    if cache:
        devices.use_compilation_cache()
