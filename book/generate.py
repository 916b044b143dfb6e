"""Writes the book's pages that are made from the code, into book/_generated (not in git).

Run before the book is built, as `make book` does:

    python book/generate.py
"""

import ast
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import minitext
from minitext import hardware as hw
from minitext.config import config, maxtext

BOOK = Path(__file__).resolve().parent
OUT = BOOK / "_generated"
GB, TERA = 1e9, 1e12


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; cells may hold any inline markup, pipes are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


# ---------------------------------------------------------------------------- hardware


def hardware() -> str:
    """The page about chips: every figure of `minitext.hardware.CHIPS` with its source."""
    rates, memory, sources = [], [], []
    for chip in hw.CHIPS.values():
        name = f"`{chip.name}`"
        flops = [f"{chip.flops[t] / TERA:,.0f}" if t in chip.flops else "" for t in FLOP_TYPES]
        ridge = chip.flops["bf16"] / chip.hbm_bandwidth
        rates.append([name, *flops, f"{chip.hbm_bandwidth / GB:,.0f}", f"{ridge:,.0f}"])
        vmem = f"{chip.vmem_bytes / 2**20:,.0f}" if chip.vmem_bytes else ""
        usable = f"{chip.usable_bytes / 2**30:,.2f}"
        link = f"{chip.links} x {chip.link_bandwidth / GB:,.0f}"
        hbm = f"{chip.hbm_bytes / 2**30:,.0f}"
        memory.append([name, hbm, str(chip.devices), usable, vmem, link])
        sources.append([name, chip.source])
    rate_header = ["Chip", *FLOP_TYPES, "HBM, GB/s", "Ridge, FLOP/byte"]
    memory_header = [
        "Chip", "HBM, GiB", "JAX devices", "Usable by a device, GiB", "VMEM, MiB", "Links x GB/s",
    ]  # fmt: skip
    return f"""# Hardware

The chips that `minitext` knows, generated from {{py:mod}}`minitext.hardware`. A name in the first column
is what `minitext compile` takes before the colon of a target. Figures are the makers' own, for one
chip and for dense arithmetic: none counts the doubling that 2:4 sparsity promises.

## Rates

Peak matrix multiplication in TFLOP/s by input type, a multiply-add counted as two operations, and
the bandwidth of the chip's own memory. An empty cell is a type that the matrix unit does not take.
The *ridge* is the bf16 peak over the memory bandwidth: a program that does fewer operations for
every byte it moves waits for memory.

{table(rate_header, rates)}

## Memory and links

*Usable* is what the compiler lets one program take on one JAX device, which is less than the chip
has where the runtime keeps a share. VMEM is the on-chip memory of one TensorCore. A link is one ICI
or NVLink connection, and its figure counts one direction.

{table(memory_header, memory)}

## Sources

{table(["Chip", "Where the figures stand"], sources)}
"""


FLOP_TYPES = ("bf16", "f8", "int8", "tf32")


# ---------------------------------------------------------------------------- configuration


def type_text(annotation: Any) -> str:
    """A setting's type in words: `"dp" or "fsdp"`, `integer or null`."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    if get_origin(annotation) is tuple:
        first = get_args(annotation)[0]
        return (
            "list of mappings" if get_origin(first) is Annotated else f"list of {type_text(first)}s"
        )
    kinds = get_args(annotation) or (annotation,)
    return " or ".join(names.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)


def limits_text(field: Any) -> str:
    """The bounds of a numeric setting, or nothing."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    found = [
        f"{word} {getattr(rule, attribute):,}"
        for rule in field.metadata
        for attribute, word in words.items()
        if getattr(rule, attribute, None) is not None
    ]
    return ", " + ", ".join(found) if found else ""


def default_text(value: Any) -> str:
    """A default as YAML writes it."""
    # By identity: 1 == True and 0 == False, but they are numbers.
    word = next(
        (w for v, w in ((None, "null"), (True, "true"), (False, "false")) if value is v), value
    )
    return f"`{word}`"


def configuration() -> str:
    """The page about settings: every key with its type, default and meaning."""
    sections: dict[str, list[list[str]]] = {}
    for key, field in config.layout().keys.items():
        default = default_text(field.default)
        row = [f"`{key}`", type_text(field.annotation) + limits_text(field), default]
        sections.setdefault(key.split(".")[0], []).append([*row, str(field.description)])
    header = ["Key", "Type", "Default", "Meaning"]
    parts = []
    for name, rows in sections.items():
        kind = config.Config.model_fields[name].annotation
        summary = inspect.getdoc(kind).splitlines()[0]
        parts.append(f"## {name}\n\n{summary}\n\n{table(header, rows)}")
    presets = "\n\n".join(
        f"### {name}\n\n```yaml\n{preset_file(name).read_text(encoding='utf-8').strip()}\n```"
        for name in config.presets()
    )
    body = "\n\n".join(parts)
    count = sum(map(len, sections.values()))
    return f"""# Configuration

Every setting of `minitext`, generated from {{py:mod}}`minitext.config.config`: {count} keys. Set any of
them on the command line of any command that takes a preset:

```bash
minitext train laptop train.steps=300 model.layers=6
```

Later layers override earlier ones: defaults, then the preset, then `config=FILE`, then
`key=value`. `minitext config show laptop` prints the resolved configuration with the layer each
value came from, and `minitext config explain train.steps` explains one key. A value that does not
fit is refused with one line that says what to change.

{body}

## Presets

A preset holds only what differs from the defaults. Nothing in the package asks which preset a
configuration came from.

{presets}
"""


def preset_file(name: str) -> Path:
    """The YAML file of a preset."""
    return Path(config.__file__).parent / "presets" / f"{name}.yml"


# In the answers to MaxText's keys: our keys with their values, commands, options, files and environment variables.
LITERAL = re.compile(
    r"\b(?:" + "|".join(config.Config.model_fields) + r")\.[\w.]*\w(?:=(?:\w+|\[\w+\]))?"
    r"|\bminitext\.[\w.]*\w|(?:target|slices)=[\w:]+|RUN/[\w.]*\w|--[\w-]+|\b[A-Z]+_[A-Z_]+\b"
)


def maxtext_keys() -> str:
    """MaxText's keys and minitext's answers, a section for each group of `minitext/config/maxtext.yml`."""

    def code(text: str) -> str:
        return LITERAL.sub(lambda found: f"`{found[0]}`", text)

    def names(row: dict[str, Any]) -> str:
        keys = ", ".join(f"`{key}`" for key in row["maxtext"])
        return f"{keys} (removed in {row['until']})" if "until" in row else keys

    parts = []
    for group in maxtext.groups():
        found = [
            [names(row), code(row["here"]), code(row.get("note", ""))]
            for row in group["rows"]
            if "here" in row
        ]
        lacking = [
            f"- {names(row)}: {code(row['none'])}"
            + (f" ({code(row['note'])})" if "note" in row else "")
            for row in group["rows"]
            if "none" in row
        ]
        parts.append(f"### {group['title']}")
        parts += [table(["There", "Here", "Note"], found)] if found else []
        parts += ["No key here:\n\n" + "\n".join(lacking)] if lacking else []
    return "\n\n".join(parts) + "\n"


def size() -> str:
    """How much there is to read: lines of the package's code, without blank lines, comments and docstrings."""
    files = sorted(Path(minitext.__path__[0]).rglob("*.py"))
    count = 0
    for path in files:
        source = path.read_text(encoding="utf-8")
        words = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, words)]
        lines = {
            line
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
        for node in documented:
            if ast.get_docstring(node, clean=False) is not None:
                lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        count += len(lines)
    return (
        f"The package has {count:,} lines of code in {len(files)} files, without comments and docstrings. "
        "[The house](house.md) shows which of them a training run passes through.\n"
    )


LAYOUT = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER
}  # fmt: skip


def letters() -> str:
    """The letter table, with the key that sets each dimension and its value in two presets."""
    laptop, llama = (config.load_config(name) for name in ("laptop", "llama3-8b"))

    def row(letter: str, meaning: str, key: str = "") -> list[str]:
        values = [str(resolved(cfg, key)) if key else "" for cfg in (laptop, llama)]
        return [f"${letter}$", meaning, f"`{key}`" if key else "", *values]

    rows = [
        row("B", "batch: rows in a step", "train.global_batch"),
        row("T", "query length: tokens in a row", "data.seq_len"),
        row("S", "key and value length; equals $T$ in training", "data.seq_len"),
        row("D", "model: width of the residual stream", "model.embed"),
        row("N", "query heads", "model.heads"),
        row("K", "key and value heads; $K$ divides $N$", "model.kv_heads"),
        row("H", "head dimension: width of one head", "model.head_dim"),
        row("F", "feed-forward: width inside the feed-forward layer", "model.mlp"),
        row("V", "vocabulary: rows of the embedding table", "model.vocab"),
        row("L", "layers", "model.layers"),
        row("E", "experts of a mixture-of-experts layer"),
        row("C", "capacity: tokens that one expert takes"),
    ]
    return table(["Letter", "Dimension", "Key", "`laptop`", "`llama3-8b`"], rows)


def resolved(cfg: config.Config, key: str) -> Any:
    """A key's value, with the defaults that depend on other values filled in."""
    derived = {"model.kv_heads": cfg.model.K, "model.head_dim": cfg.model.H}
    section, name = key.split(".")
    return derived.get(key, getattr(getattr(cfg, section), name))


# ---------------------------------------------------------------------------- reference


def modules() -> dict[str, list[str]]:
    """The package's modules by room, but not those of the command line, which `minitext --help` documents.

    For a folder in a room, the folder, and the modules that a public function's arguments come from.
    """
    rooms: dict[str, list[str]] = {}
    for room in pkgutil.iter_modules(minitext.__path__):
        if room.name in ("__main__", "cli"):
            continue
        rooms[room.name] = [room.name]
        if room.ispkg:
            folder = importlib.import_module(f"minitext.{room.name}").__path__
            found = [f"{room.name}.{module.name}" for module in pkgutil.iter_modules(folder)]
            rooms[room.name] += [name for name in found if not name.endswith(".presets")]
    rooms["kernels"] += ["kernels.attention.mask", "kernels.linear.xla"]
    return rooms


def docstring(name: str) -> str:
    """A module's docstring, read without importing the module, which may need what isn't installed."""
    spec = importlib.util.find_spec(f"minitext.{name}")
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""


def reference() -> dict[str, str]:
    """The pages of the API reference: an overview, and for each room a page with autodoc for its modules."""
    pages, parts = {}, []
    for room, names in modules().items():
        rows, sections = [], []
        for name in names:
            doc = docstring(name)
            chapters = re.search(r"^Chapters: (.*)\.$", doc, flags=re.MULTILINE)
            summary = doc.split("\n\n")[0].replace("\n", " ")
            rows.append([f"{{py:mod}}`minitext.{name}`", summary, chapters[1] if chapters else ""])
            sections.append(
                f"## minitext.{name}\n\n```{{eval-rst}}\n.. automodule:: minitext.{name}\n"
                f"   :members:\n   :exclude-members: model_config, model_post_init\n```\n"
            )
        pages[f"api/{room}.md"] = "\n".join([f"# {room}\n", *sections])
        header = ["Module", "What is in it", "Chapters"]
        parts.append(f"## [{room}](api/{room}.md)\n\n{table(header, rows)}\n")
    pages["api.md"] = f"""# API reference

Generated from the package's docstrings, room by room. Array names end in the letters of their
dimensions, so `x_BTNH` has the shape `[B, T, N, H]`: see [](../letters.md). The last column names
the chapters that build the module.

{chr(10).join(parts)}"""
    return pages


# ---------------------------------------------------------------------------- first result


def first_result() -> str:
    """The index page's example with the output that it really gives."""
    script = BOOK / "first_result.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr}")
    code = script.read_text(encoding="utf-8").strip()
    return f"```python\n{code}\n```\n\n```none\n{done.stdout.strip()}\n```\n"


def main() -> None:
    """Writes every page; pages from an earlier run that are no longer made are removed."""
    import house  # beside this script

    pages = {
        "hardware.md": hardware(),
        "configuration.md": configuration(),
        "letters_table.md": letters(),
        "maxtext_keys.md": maxtext_keys(),
        "size.md": size(),
        "first_result.md": first_result(),
        **reference(),
        **house.parts(),
    }
    shutil.rmtree(OUT, ignore_errors=True)
    for name, text in pages.items():
        path = OUT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {len(pages)} pages to {OUT.relative_to(BOOK.parent)}")


if __name__ == "__main__":
    main()
