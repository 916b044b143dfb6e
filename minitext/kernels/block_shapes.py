"""The default block shapes of each kernel on each chip.

They are stored in `block_shapes.json`, written by `minitext tune OP chip=CHIP --write`.

Chapters: 16.
"""

import json
from pathlib import Path

import jax

from minitext.hardware import CHIPS, Chip, find_chip

FILE = Path(__file__).with_suffix(".json")


# (operation, chip) -> name of a block's dimension -> its length.
BLOCKS: dict[tuple[str, str], dict[str, int]] = {
    (op, chip): row
    for op, chips in json.loads(FILE.read_text(encoding="utf-8")).items()
    for chip, row in chips.items()
}


def find_this_chip() -> Chip | None:
    """Returns the chip of the current mesh, or of this machine if there's no mesh."""
    return find_chip(jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0])


def find(op: str) -> dict[str, int]:
    """Returns an operation's block shape for the chip of the current mesh, or of this machine if there's no mesh.

    A chip without a row, such as the simulator on a CPU, uses the first row of the operation.
    """
    chip = find_this_chip()
    rows = {name: row for (known, name), row in BLOCKS.items() if known == op}
    return rows.get(chip.name if chip else "") or next(iter(rows.values()))


def write(op: str, chip: str, blocks: dict[str, int]) -> None:
    """Writes a row into the table in memory and in its file.

    Raises:
      OSError: if the file can't be written, for instance in an installed package.
    """
    BLOCKS[op, chip] = dict(blocks)
    order = list(CHIPS)
    rows = sorted(BLOCKS.items(), key=lambda row: (row[0][0], order.index(row[0][1])))
    ops = []
    for name in dict.fromkeys(known for (known, _), _ in rows):
        lines = [f'    "{c}": {json.dumps(row)}' for (known, c), row in rows if known == name]
        ops.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    FILE.write_text("{\n" + ",\n".join(ops) + "\n}\n", encoding="utf-8")
