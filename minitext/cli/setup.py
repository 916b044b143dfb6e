"""The commands that look at configurations and machines, and prepare data.

Chapters: 6.
"""

import sys
from typing import Annotated, Any

import typer

from minitext.cli.arguments import Json, Settings, answer, check_new, load, start


def config_show(settings: Settings = None, as_json: Json = False) -> None:
    """Print a resolved configuration with the origin of every value."""
    from minitext.config.config import to_yaml

    cfg = load(settings)
    shown = cfg.model_dump(mode="json") if as_json else to_yaml(cfg, provenance=True)
    answer(shown, as_json, lambda text: print(text, end=""))


def config_explain(
    key: Annotated[
        str, typer.Argument(help="dotted key, or the beginning of some, such as optim.")
    ],
    settings: Settings = None,
) -> None:
    """Explain keys: type, default, meaning, and the value in a preset."""
    from minitext.config.config import ConfigError, layout, unknown_key

    cfg = load(settings)
    found = {
        name: field
        for name, field in layout().keys.items()
        if name == key or name.startswith(key.rstrip(".") + ".")
    }
    if not found:
        raise ConfigError([unknown_key(key, "command line")])
    for name, field in found.items():
        value: Any = cfg
        for part in name.split("."):
            value = getattr(value, part, "not in use")
        kind = getattr(field.annotation, "__name__", str(field.annotation).replace("typing.", ""))
        print(f"{name} = {value}   ({cfg.provenance(name)})")
        print(f"    {field.description}; {kind}, default {field.default}")


def config_presets() -> None:
    """List the presets."""
    from minitext.config.config import presets

    print("\n".join(presets()))


def data_pack(
    target: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="where to write; must not exist", callback=check_new),
    ],
    settings: Settings = None,
    shards: Annotated[int, typer.Option(min=1, max=10_000, help="files of training rows")] = 4,
) -> None:
    """Tokenise a preset's text once, into ArrayRecord files that data.source=arrayrecord data.path=FOLDER reads."""
    cfg = load(settings)
    from minitext.data.rows import pack_source
    from minitext.training.run_dir import published_tokenizer

    rows = pack_source(
        cfg.data,
        target,
        vocab=cfg.model.vocab,
        shards=shards,
        tokenizer=published_tokenizer(cfg),
    )
    counts = ", ".join(f"{count:,} {split}" for split, count in rows.items())
    print(f"{target}: {counts} rows of {cfg.data.seq_len:,} tokens", file=sys.stderr)


def doctor(as_json: Json = False) -> None:
    """Say what this machine is and what minitext can do on it."""
    start()
    from minitext.cli.doctor import examine

    def show(facts: dict[str, str]) -> None:
        print("\n".join(f"{name:<22} {value}" for name, value in facts.items()))

    answer(examine(), as_json, show)
