"""Memory and speed of reading published weights onto 8 simulated devices, against the disk's own speed in one run.

    python benchmarks/import_weights.py [--gigabytes 1] [--dtype F32] [--rounds 7]

Writes random sharded files, and reads them as bytes and imports them in turns, each time dropped from the page cache
before. Speeds are medians of the rounds. A virtual machine's disk varies threefold, and other programs take more from the
import, which needs two cores, than from the reading, which waits for the disk: run it on a quiet machine. Peak memory is
that of this process above what it had before the first import, and is compared with the parameters' own.
"""

import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from common import parser, write_record
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from minitext.checkpoint import safetensors, stored
from minitext.checkpoint.weights import INDEX, open_weights
from minitext.models import convert
from minitext.models.convert import TRANSPOSED, Row, Table

D, F, LAYERS_PER_GB = 2048, 5632, 7


def write_files(folder: Path, layers: int, dtype: str) -> None:
    rng, where = np.random.default_rng(0), {}
    shapes = {"q": (D, D), "o": (D, D), "gate": (F, D), "up": (F, D), "down": (D, F)}
    for layer in range(layers):
        file = f"model-{layer:05}.safetensors"
        described = {f"{layer}.{name}": (shape, dtype) for name, shape in shapes.items()}
        values = (
            rng.standard_normal(s, np.float32).astype(stored.PLAIN[dtype]) for s in shapes.values()
        )
        safetensors.write(folder / file, described, values, {})
        where |= dict.fromkeys(described, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(folder: Path) -> float:
    """Returns the seconds to read all files once, in pieces of 16 MiB."""
    buffer, began = bytearray(16 << 20), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    cli = parser(__doc__ or "")
    cli.add_argument("--gigabytes", type=float, default=1.0)
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument("--dtype", choices=list(stored.PLAIN), default="F32")
    wanted = cli.parse_args()
    width = stored.PLAIN[wanted.dtype].itemsize
    layers = max(1, round(wanted.gigabytes * LAYERS_PER_GB * 4 / width))
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def leaf(rows: int, columns: int, *names: str) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, PartitionSpec(None, *names))
        return jax.ShapeDtypeStruct((layers, rows, columns), np.float32, sharding=where)

    params = {
        "q": leaf(D, D, "fsdp", "tensor"), "o": leaf(D, D, "tensor", "fsdp"), "gate": leaf(D, F, "fsdp", "tensor"),
        "up": leaf(D, F, "fsdp", "tensor"), "down": leaf(F, D, "tensor", "fsdp"),
    }  # fmt: skip
    table = Table(tuple(Row(f"{{layer}}.{n}", n, TRANSPOSED, range(layers)) for n in params))
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        write_files(folder, layers, wanted.dtype)
        os.sync()
        jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))
        disk, seconds, processor, over = [], [], [], []
        for _ in range(wanted.rounds):
            drop_from_cache(folder)
            disk.append(read_bytes(folder))
            drop_from_cache(folder)
            Path("/proc/self/clear_refs").write_text("5")
            before, began, used = peak(), time.perf_counter(), time.process_time()
            with open_weights(folder) as weights:
                read = jax.block_until_ready(convert.load(weights, table, params))
                seconds.append(time.perf_counter() - began)
                size, numbers = weights.size, weights.count
            processor.append(time.process_time() - used)
            over.append(peak() - before)
            del read
    tensor = D * F * 4
    reading, importing = np.median(disk), np.median(seconds)
    figures = {
        "files_gb": size / 1e9, "disk_gb_per_s": size / reading / 1e9, "import_gb_per_s": size / importing / 1e9,
        "share_of_disk": reading / importing, "cpu_s": np.median(processor), "disk_s": disk, "import_s": seconds,
        "parameters_gb": numbers * 4 / 1e9, "peak_gb": over[0] / 1e9,
        "over_in_tensors": (over[0] - numbers * 4) / tensor,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    write_record(wanted.output, "import_weights", wanted.dtype, figures)


if __name__ == "__main__":
    main()
