"""Which devices take part in a collective, as the text of a compiled program writes it.

Chapters: 10.
"""

import math
import re

_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}')
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"(\w+)'?(?::\(\d+\)(\d+))?")


def group_size(line: str, devices: int) -> int:
    """Returns how many devices form a group; without a word of it, all.

    Compilers list the groups, count them, or name axes of a mesh, whose sizes are multiplied. Of a transfer between
    slices it is how many slices.

    Args:
      line: the collective's instruction.
      devices: how many the program is for.
    """
    if listed := _SLICES.search(line) or _LISTED.search(line):
        return listed[1].count(",") + 1
    if counted := _COUNTED.search(line):
        return max(1, int(counted[1]))
    if named := _NAMED.search(line):
        sizes = dict(re.findall(r"(\w+)'?=(\d+)", named[1]))
        # Of `'a':(2)4` it is 4 of axis a's devices, in steps that don't matter here.
        return max(1, math.prod(int(n or sizes.get(a, 1)) for a, n in _AXIS.findall(named[2])))
    return max(1, devices)
