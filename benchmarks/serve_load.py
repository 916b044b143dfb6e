"""A server under rising load: how long its readers wait, and how many tokens it writes a second.

    pip install -e '.[serve]'
    python -m venv /tmp/locust && /tmp/locust/bin/pip install locust    (it asks for other versions than minitext[test])
    python benchmarks/serve_load.py runs/smollm2 --locust /tmp/locust/bin/locust

Starts `minitext serve`, then locust with 1, 2, 4, ... readers, each of whom asks again as soon as an answer is
complete. Server and readers share the machine's cores.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from common import parser, write_record

READER = Path(__file__).parent / "locust" / "reader.py"
SHOWN = {"first token": "first_token", "next tokens": "next_tokens"}


def serve(run, readers):
    """Starts the server; returns its process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minitext", "serve", run, "--port", "0", "--warm-up", str(readers)],
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"served at (http://\S+);", line):
            return process, found[1]
    sys.exit("the server ended: see its messages above")


def metric(address, name):
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    return float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)[1])


def load(address, locust, readers, seconds, tokens):
    """Lets so many readers ask for so long; returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = metric(address, "minitext_generation_tokens_total"), time.perf_counter()
        done = subprocess.run(
            [
                locust, "-f", READER, "--headless", "--host", address, "--users", str(readers), "--spawn-rate", "100",
                "--run-time", f"{seconds}s", "--stop-timeout", "60", "--csv", f"{folder}/load", "--only-summary",
            ],
            env=os.environ | {"READER_TOKENS": str(tokens)}, capture_output=True, text=True,
        )  # fmt: skip
        taken = time.perf_counter() - began
        written = metric(address, "minitext_generation_tokens_total") - before
        if not Path(folder, "load_stats.csv").exists():
            sys.exit(f"locust failed: {done.stderr.strip().splitlines()[-1]}")
        with open(f"{folder}/load_stats.csv") as file:
            rows = {row["Name"]: row for row in csv.DictReader(file)}
    found = {"readers": readers, "answers": int(rows["answer"]["Request Count"]), "seconds": taken}
    found["failures"] = int(rows["answer"]["Failure Count"])
    found["tokens_per_second"] = written / taken
    for name, key in SHOWN.items():
        found |= {
            f"{key}_p50_ms": float(rows[name]["50%"]),
            f"{key}_p95_ms": float(rows[name]["95%"]),
        }
    return found


def main():
    cli = parser(__doc__)
    cli.add_argument("run", help="the run to serve")
    cli.add_argument("--locust", default="locust", help="the command (default: locust)")
    cli.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    cli.add_argument("--seconds", type=int, default=20, help="of each load (default 20)")
    cli.add_argument("--tokens", type=int, default=32, help="of each answer (default 32)")
    args = cli.parse_args()
    process, address = serve(args.run, min(max(args.readers), 32))
    try:
        loads = []
        for readers in args.readers:
            load(address, args.locust, readers, 3, args.tokens)  # compiles what is missing
            found = load(address, args.locust, readers, args.seconds, args.tokens)
            loads.append(found)
            print(
                f"{readers:>3} readers  {found['tokens_per_second']:7.1f} tokens/s  first token "
                f"{found['first_token_p50_ms']:.0f} ms (p95 {found['first_token_p95_ms']:.0f})  between tokens "
                f"{found['next_tokens_p50_ms']:.0f} ms (p95 {found['next_tokens_p95_ms']:.0f})  "
                f"{found['failures']} failures",
                flush=True,
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    figures = {"model": Path(args.run).name, "tokens": args.tokens, "loads": loads}
    write_record(args.output, "serve_load", Path(args.run).name, figures)


if __name__ == "__main__":
    main()
