"""What minitext tune-options finds: by how much a searched step should be faster than its preset's.

    python benchmarks/tune_options.py [--save DIR] [--budget N]

The models are cut down until a candidate compiles in seconds: what helps a small model needn't help a large one. Nothing
runs on a TPU; the times are predictions from the compiled programs. With --save the same command goes on in DIR after it
was stopped.
"""

import tempfile
from pathlib import Path

from common import parser, write_record

CASES = {
    "gpt2-124m, small": {
        "preset": "gpt2-124m", "target": "v5e:2x4",
        "settings": [
            "model.layers=2", "model.embed=256", "model.heads=4", "model.mlp=1024", "model.vocab=1024",
            "model.attention.impl=xla", "data.seq_len=128", "mesh.data=1", "mesh.fsdp=8", "train.global_batch=128",
        ],
    },
}  # fmt: skip


def main():
    cli = parser(__doc__)
    cli.add_argument("--save", type=Path, help="folder for results")
    cli.add_argument("--budget", type=int, default=30, help="candidates of each case")
    args = cli.parse_args()

    from minitext.distributed import devices

    devices.start()
    from minitext.config.config import load_config
    from minitext.perf.tune_options import Search, Store, print_tuning

    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            cfg = load_config(case["preset"], case["settings"])
            search = Search(cfg, case["target"], args.budget, lambda what, done: print(done, what))
            with Store((args.save or Path(folder)) / name.replace(", ", "-")) as store:
                found = search.run(store)
            print_tuning(found)
            runs[name] = found.to_json() | case | {"gain": found.gain(found.best)}
    write_record(args.output, "tune_options", "", {"runs": runs})


if __name__ == "__main__":
    main()
