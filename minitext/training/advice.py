"""What to change so that a step fits that does not.

Chapters: 22.
"""

import math
from collections.abc import Iterator

from minitext.compiler.report import Report, show_bytes
from minitext.config.sections import Config
from minitext.sharding.rules import RULES


def advise(report: Report, cfg: Config) -> Iterator[str]:
    """Yields what to change for a step that does not fit: setting or target, and why."""
    if report.fits:
        return
    available = report.available_bytes
    state = sum(size for part, size in report.arguments.items() if part.startswith("state"))
    share = f"{show_bytes(state)} of {show_bytes(available)}"
    ways = math.prod(report.mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    if 2 * state > available:
        if (
            not RULES[cfg.sharding.rules].table["embed"]
            or report.mesh.get("data", 1) > report.slices
        ):
            yield (
                f"every replica's parameters and optimizer state take {share}: shard them further "
                f"with mesh.data={report.slices} mesh.fsdp=-1 sharding.rules=fsdp"
            )
        elif report.slices > 1:
            least = math.ceil(2 * state * report.devices / report.slices / available)
            yield (
                f"parameters and optimizer state alone take {share} although a whole slice shares "
                f"them: choose slices of {least} devices or more"
            )
        else:
            # Half of the memory for the state leaves the other half to a step's temporaries.
            least = math.ceil(2 * state * report.devices / available)
            yield (
                f"parameters and optimizer state alone take {share} although they are fully "
                f"sharded: choose a target of {least} devices or more"
            )
    if 2 * report.temp_bytes > available:
        rows = cfg.train.global_batch // cfg.train.microbatches // ways
        if cfg.model.remat != "full":
            yield (
                f"model.remat={cfg.model.remat}: model.remat=full keeps one activation a layer and "
                "recomputes the others"
            )
        if rows > 1:
            yield (
                f"a device computes {rows} rows of {cfg.data.seq_len} tokens at once: raise "
                f"train.microbatches={cfg.train.microbatches}, or lower train.global_batch="
                f"{cfg.train.global_batch}"
            )
        else:
            yield f"a device computes one row at once: lower data.seq_len={cfg.data.seq_len}"
