"""Nine hundred hostile command lines over all commands: each is refused in one line, quickly, and writes nothing."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import TINY

LONG = "x" * 400
DEEP = "/".join(["deep"] * 1200)
HUGE = "9" * 20
NUL, BELL, HALF = (f'"a\\{escape}b"' for escape in ("0", "u0007", "ud800"))  # as YAML reads them
PATHS = ["", LONG, DEEP, "{file}/below"]
FILES = [*PATHS, "{folder}", "x.docx"]
NOWHERE = [LONG, DEEP, '""', NUL, "nowhere", "{folder}", "/dev/null"]
SMALL = [*TINY, "train.steps=2", "train.eval_batches=1"]
GENERATE = ["generate", "{run}", "--prompt", "x"]
LOCAL, SLURM = ["launch", "local"], ["launch", "slurm", "--name", "a"]
XPK = ["launch", "xpk", "--name", "a", "--image", "i"]

# Words in braces are folders and files that the fixture makes.
READERS = {
    "generate": ["--prompt", "x"],
    "export": ["out"],
    "eval": [],
    "goodput": [],
    "profile": [],
    "watch": ["--once"],
}
PREDICTORS = ["compile", "plan", "tune-options", "predict", "memory", "comms"]

# Settings that train must refuse, added to SMALL.
SETTINGS = {
    "run.name": [
        LONG,
        "../../x",
        "a/b",
        "/tmp/x",
        "..",
        ".",
        '""',
        NUL,
        "[1]",
        BELL,
        HALF,
        "é" * 200,
    ],
    "run.dir": [LONG, DEEP, '""', NUL, "{file}", "{file}/below", "1", "[]"],
    "checkpoint.load_parameters": NOWHERE,
    "checkpoint.load_full_state": NOWHERE,
    "train.executable": NOWHERE,
    "config": [LONG, DEEP, '""', NUL, "nowhere", "{folder}"],
    "checkpoint.local_dir": [LONG, '""', NUL, "{file}"],
    "train.global_batch": ["100000000", HUGE, "0", "-8", "nan", "1e9", "true", "null", '""'],
    "train.steps": [HUGE, "0", "-1", ".inf", "1.5"],
    "train.seed": [HUGE, "-1"],
    "data.seed": [HUGE, "-1"],
    "train.sample_tokens": [HUGE, "100000000000", "-1"],
    "train.hang_seconds": ["0", "-1", ".nan", ".inf", "1e300"],
    "optim.learning_rate": [".nan", ".inf", "-1", "0", "1e400"],
    "optim.b1": [HUGE, "1", "-1"],
    "optim.warmup_steps": [HUGE, "-1"],
    "model.vocab": [HUGE, "2000000000"],
    "model.layers": [HUGE, "100000000"],
    "model.embed": [HUGE, "400000"],
    "model.mlp": [HUGE, "1000000000"],
    "model.heads": [HUGE],
    "model.head_dim": [HUGE],
    "mesh.simulate": ["0", "-1", "100000", HUGE],
    "mesh.data": ["0", "-2", HUGE, "1000000"],
    "mesh.fsdp": ["1000000"],
    "mesh.tensor": ["1000000"],
    "mesh.stage": ["1000000"],
}
IGNORED = [  # by eval
    "model.layers=3", "optim.learning_rate=1", "train.steps=9", "run.name=b", "mesh.fsdp=2", "data.tokenizer=bpe",
    "data.seq_len=1", "config={other}", "model.headz=1", "laptop", "", "=", "checkpoint.keep=9", "data.path=nowhere",
]  # fmt: skip
LLO = [
    "nonsense",
    "",
    "matmul chip=v9",
    "matmul chip=",
    "matmul m=0",
    "matmul m=-1",
    f"matmul m={HUGE}",
    "matmul z=8",
]
TUNE = [
    "",
    "matmul",
    "matmul chip=v9",
    "nonsense chip=v5e",
    "matmul chip=v5e m=0",
    "matmul chip=h100",
    "matmul chip=",
]
LINES = [
    # A run that is none.
    *([name, path, *rest] for name, rest in READERS.items() for path in [*PATHS, "{file}", "/dev/null"]),
    *([name, path, *rest] for name, rest in READERS.items() if name != "watch" for path in ["nowhere", "{folder}"]),
    *([name] for name in READERS),
    *([name, "{run}", *rest, "--nonsense"] for name, rest in READERS.items()),
    ["watch", "{file}"],
    ["watch", "{file}", "--json"],
    # Numbers out of range.
    *([*GENERATE, "--seed", seed] for seed in [HUGE, "-1", "1.5", "nan", ""]),
    *([*GENERATE, "--max-tokens", n] for n in [HUGE, "100000000000", "0", "-5", "1e3", ""]),
    *([*GENERATE, "--temperature", t] for t in ["nan", "inf", "-1", "hot", ""]),
    *([*GENERATE, "--top-p", p] for p in ["nan", "0", "1.5", "-inf"]),
    *([*GENERATE, "--top-k", k] for k in ["-1", "1.5"]),
    ["generate", "{run}", "--prompt", ""],
    ["generate", "{run}", "--prompt", "not UTF-8: \udcff"],
    ["eval", "not UTF-8: \udcff"],
    ["train", *SMALL, "run.name=\udcff"],
    ["train", "\udcff"],
    ["generate", "{run}", "--prompt", "x" * 100_000, "--max-tokens", "100000000"],
    ["generate", "{wide}", "--prompt", "x" * 100_000],
    *(["watch", "{run}", "--every", s] for s in ["0", "-1", "nan", "inf", "1e300", ""]),
    *(["profile", "{run}", "--rows", n] for n in ["-1", "x"]),
    *(["data", "pack", "out", *SMALL, "--shards", n] for n in ["0", "-1", HUGE, "1000000000"]),
    *([*LOCAL, "--processes", n, "--", "train"] for n in ["0", "-1", HUGE, "1000000"]),
    *([*LOCAL, "--devices", n, "--", "train"] for n in ["0", HUGE, "1000000"]),
    [*LOCAL, "--restarts", "-1", "--", "train"],
    *(["drill", "--faults", n] for n in ["0", "-1", "1001", HUGE, "x"]),
    *(["drill", "--processes", n] for n in ["0", "-1", "1000000"]),
    *(["drill", "--devices", n] for n in ["0", HUGE]),
    *(["drill", "--seed", n] for n in ["-1", HUGE]),
    *(["drill", "--kinds", kinds] for kinds in ["", "kil", "kill,", "kill,,nan", LONG, "all"]),
    ["drill", "--kinds", "nan", "train.on_nan=skip"],
    ["drill", "--kinds", "tear", "checkpoint.keep=1"],
    *(["drill", "--plot", file] for file in FILES),
    *(["drill", word] for word in ["laptp", "model.headz=1", "", "train.steps=10", "run.name=../x", "run.dir={file}",
      "train.hang_seconds=0", "checkpoint.load_full_state={run}", "run.name=run run.dir={home}"]),
    *(["judge", path] for path in [*PATHS, "{folder}", "{file}", "{binary}", "/dev/null", "/dev/zero", "nowhere.py"]),
    *(["judge", "{kernel}", "--chip", chip] for chip in ["", "v9", "h100", "v5e,", LONG]),
    *(["judge", "{kernel}", "--budget", b] for b in ["", "vmem", "vmem=-1", "vmem=1e3", f"speed={HUGE}", "mxu=1MiB"]),
    *(["judge", "{kernel}", "--seconds", n] for n in ["0", "nan", "inf", "-1"]),
    *(["judge", "{kernel}", "--memory", n] for n in ["0", "nan", "1e9"]),
    ["judge", "{kernel}"],
    *(["grade", "--seed", s] for s in ["-1", "soon"]),
    *(["grade", "--jobs", n] for n in ["0", "-1", "x"]),
    *(["serve", path] for path in [*PATHS, "nowhere", "{folder}", "{file}", "/dev/null"]),
    ["serve", "{run}", "{folder}"],
    ["serve", "{run}", "{run}"],
    *(["serve", "{run}", option, "4"] for option in ["--max-batch", "--max-wait-ms", "--max-body-mb"]),
    *(["serve", "{run}", "--max-batch", n] for n in ["0", "-1", HUGE, "x"]),
    *(["serve", "{run}", "--max-wait-ms", n] for n in ["nan", "-1", "inf"]),
    # Files that can't be written, before anything is computed.
    *(["goodput", "{run}", "--plot", file] for file in [*FILES, "{folder}/", "plain", "no/such/x.svg"]),
    *(["roofline", *SMALL, "--plot", file] for file in FILES),
    *(["shard", *SMALL, "--plot", file] for file in FILES),
    *(["llo", "matmul", "--plot", file] for file in FILES),
    *(["compile", *SMALL, "--save", file] for file in [*PATHS, "{folder}", "no/such/x.bin"]),
    *(["compile", *SMALL, "target=v5e:2x2", "--save", file] for file in ["", "{folder}", LONG]),
    *(["export", "{run}", path] for path in ["", LONG, DEEP, "{folder}", "{file}", "{file}/below"]),
    ["export", "{run}", "out", "--format", "onnx", "--dtype", "float16"],
    ["export", "nowhere", "out", "--format", "onnx"],
    *(["export", "{run}", path, "--format", "stablehlo"] for path in [*PATHS, "{folder}", "{file}"]),
    *(["export", "{run}", "out", "--license", name] for name in ["", " ", LONG, "a\nb"]),
    ["export", "{run}", "out", "--format", "gguf", "--license", "mit"],
    ["export", "{run}", "out", "--format", "stablehlo", "--dtype", "bfloat16"],
    ["export", "nowhere", "out", "--format", "stablehlo"],
    *(["data", "pack", path, *SMALL] for path in ["", LONG, DEEP, "{folder}", "{file}", "{file}/below"]),
    *(["grade", "01", option, "{folder}"] for option in ["--json", "--gradescope"]),
    # Settings.
    *(["train", *SMALL, f"{key}={value}"] for key, values in SETTINGS.items() for value in values),
    *(["train", *SMALL, f"data.source={source}", f"data.path={path}"] for source in ["files", "arrayrecord"]
      for path in [LONG, DEEP, '""', NUL, "nowhere", "{folder}", "/dev/null"]),
    *(["train", f"config={{{file}}}"] for file in ["selfref", "bomb", "binary", "loop", "python", "list"]),
    ["config", "show", "config={selfref}"],
    *(["train", word] for word in ["", " ", "=", "=1", "train.steps", "a b", "é", LONG, "laptop ", "../x"]),
    ["train", "laptop", ""],
    ["train", *SMALL, "data.seq_len=16777216", "train.global_batch=1024"],
    *(["config", "show", word] for word in ["", "=", "laptp"]),
    *(["config", "explain", word] for word in ["", ".", LONG, "nonsense"]),
    *(["eval", "{run}", word] for word in IGNORED),
    # Targets, chips and kernels.
    *([name, *SMALL, f"target={target}"] for name in PREDICTORS
      for target in ["", "v9:2x2", f"v5e:{HUGE}x2", "v5e:0x0", "v5e"]),
    *([name, *SMALL, "slices=2"] for name in PREDICTORS),
    *(["compile", *SMALL, "target=v5e:2x2", f"slices={n}"] for n in ["x", "-1", HUGE]),
    ["plan", *SMALL, "target=v5e:2x2", "--compile", "0"],
    *(["tune-options", *SMALL, "target=v5e:2x2", "--budget", n] for n in ["0", "-1", "x", HUGE]),
    *(["tune-options", *SMALL, "target=v5e:2x2", "--save", where] for where in ["{file}", "{run}", "", NUL, LONG]),
    ["tune-options", *SMALL, "target=h100:1x8"],
    *([name, *SMALL, "mesh.data=1000000"] for name in ["comms", "memory"]),
    ["compile", *SMALL, "mesh.data=1000000", "--save", "x.bin"],
    *(["roofline", *SMALL, f"chip={chip}"] for chip in ["", "v9", LONG]),
    ["roofline", *SMALL, "chip=v5e", "chip=v6e"],
    ["llo", "matmul", "chip=v5e", "chip=v6e"],
    *(["llo", *words.split(" ")] for words in LLO),
    *(["tune", *words.split(" ")] for words in TUNE),
    # Launchers.
    *([*LOCAL, "--", word] for word in ["generate", ""]),
    *([*LOCAL, "--", "train", word] for word in ["laptp", "model.headz=1", ""]),
    *(["launch", "slurm", "--name", name, "--", "train"] for name in ["", "A", "../x", LONG, "a b", "-x"]),
    *([*SLURM, "--time", t, "--", "train"] for t in ["", "soon", "-1"]),
    *([*SLURM, "--partition", p, "--", "train"] for p in ["", "x\ny"]),
    [*SLURM, "--nodes", "0", "--", "train"],
    [*SLURM, "--", "train", "laptp"],
    ["launch", "k8s", "--name", "a", "--image", "", "--", "train"],
    ["launch", "k8s", "--name", "a", "--image", "i", "--claim", "", "--", "train"],
    [*XPK, "--cluster", "", "--tpu-type", "v5p-8", "--", "train"],
    [*XPK, "--cluster", "c", "--tpu-type", "", "--", "train"],
    # Grading.
    *(["grade", word] for word in ["99", "", "01.nothing", LONG, "../x", "é"]),
    *(["grade", "01", "--answers", path] for path in ["{file}", "nowhere"]),
    *(["grade", "01", "--notebook", path] for path in ["", "nowhere.ipynb", "{folder}", "{binary}", "/dev/null"]),
    ["grade", "--start", "a", "b"],
    ["grade", "--start", "{file}"],
    # The journey.
    *(["journey", "--depth", d] for d in ["0", "-1", "2", "129", HUGE, "5.5", "x", ""]),
    *(["journey", "--budget", b] for b in ["0", "-1", "nan", "1e9", "x", ""]),
    *(["journey", "--tokens-per-parameter", t] for t in ["0", "-1", "nan", "inf", "1e9"]),
    *(["journey", "--run", path] for path in ["", LONG, DEEP, "{file}", "{file}/below", "{home}", "gs://b/r"]),
    *(["journey", "--stages", names] for names in ["", "sftt", "data,,serve", "evaluate", LONG]),
    *(["journey", word] for word in [
        "", "=", "laptop", "model.embed=9", "train.steps=3", "data.seq_len=9", "data.source=grammar", "mesh.fsdp=7",
        "data.path=nowhere", "mesh.data=1000000",
    ]),
    *(["journey", "data.source=files", f"data.path={path}"] for path in ["nowhere", "{folder}"]),
    ["journey", "--depth", "5", "--budget", "1e13"],
    # MaxText's commands and checkpoints.
    *(["maxtext", "explain", text] for text in [
        "", "hello", "base.yml model_name='x", "base.yml model_name=llama9", "base.yml steps=[1]", LONG, DEEP,
        "nowhere.yml", "{folder}", "base.yml base_emb_dim=wide", "base.yml ici_fsdp_parallelism=0",
        f"base.yml base_num_decoder_layers={HUGE}", "other.yml steps=1",
    ]),
    *(["maxtext", "explain", "base.yml steps=1", "--target", target] for target in ["", "v5e", "v9:2x2", HUGE]),
    *(["maxtext", "import", path, "out", "model_name=llama2-7b"] for path in [
        "", LONG, DEEP, "{file}", "{folder}", "nowhere",
    ]),
    *(["maxtext", "import", "{folder}", "out", *words] for words in [
        [], ["llama2-7b"], ["model_name=llama9"], ["model_name=gpt3-175b"], ["model_name=llama2-7b", "mesh.fsdp=x"],
        ["model_name=llama2-7b", "model.nonsense=1"],
    ]),
    ["maxtext", "import", "{folder}", "{run}", "model_name=llama2-7b"],
    *(["maxtext", "export", run, "out"] for run in ["nowhere", "{folder}", "{file}", ""]),
    *(["maxtext", "export", "{run}", path] for path in ["{folder}", "{file}", "{file}/below", ""]),
    ["maxtext", "export", "{run}", "out", "--dtype", "int8"], ["maxtext", "nonsense"],
    # Pipes, files that swell, links that lead to themselves, and runs of which a part is missing.
    *([*words, f"config={{{name}}}"] for name in ("pipe", "merges", "twice", "round")
      for words in [["train"], ["config", "show"], ["optim", "memory"], ["shard"], ["drill"], ["sft", "{run}"]]),
    *([name, f"{{{half}}}", *rest] for half in ("torn", "cut", "mixed", "pipe", "round") for name, rest in {
        "generate": ["--prompt", "x"], "chat": [], "serve": ["--port", "0"], "export": ["out"], "quantize": ["out"],
        "eval": [],
    }.items()),
    *(["maxtext", "export", f"{{{half}}}", "out"] for half in ("torn", "cut", "mixed", "round")),
    *([recipe, "{run}", *words] for recipe in ("sft", "dpo", "grpo", "ppo") for words in [
        [], ["laptop"], ["data.path=nowhere.jsonl"], ["data.path={pipe}"], ["data.path={deep}"],
        ["data.path={records}"], ["data.path={records}", "data.seq_len=0"], ["data.path={records}", "train.steps=-1"],
    ]),
    *(["grpo", "{run}", "data.path={records}", f"objective.{word}"] for word in (
        "rewards=[]", "rewards=exact", "rewards=[{{name: exact, weight: .nan}}]", "rewards=[{{name: 'nowhere.py:f'}}]",
        "rewards=[{{name: 'gs://b/r.py:f'}}]", "max_tokens=1000", "group=129", "discount=1",
    )),
    *(["chat", "{run}", *words] for words in [[], ["--temperature", "nan"], ["--max-tokens", "0"], ["--seed", "-1"]]),
    *(["data", "preview", "byte", f"{{{name}}}"] for name in ("pipe", "deep", "round", "binary")),
    *(["grade", "--notebook", f"{{{name}}}"] for name in ("pipe", "round", "deep")),
    ["grade", "01", "--json", "{round}"], ["judge", "{pipe}"], ["judge", "{round}"],
    ["judge", "{kernel}", "--budget", "mxu=200%"],
    *(["import", path, "out"] for path in ["{pipe}", "{round}", "{folder}", "{binary}", "nowhere", "", "gs://b/m"]),
    *(["import", "{folder}", "out", word] for word in ["laptop", "model.headz=1", "mesh.fsdp=0"]),
    *(["parity", path] for path in ["{pipe}", "{round}", "{folder}", "{run}", "nowhere", ""]),
    *(["parity", "{folder}", *words] for words in [["--length", "0"], ["--continue", "4097"], ["--seed", "-1"]]),
    *(["quantize", "{run}", "out", "--rules", rules] for rules in [
        "int3", "[", "[]", "{pipe}.yml", "[{{module: '(', dtype: int8}}]", "[{{module: nothing, dtype: int8}}]",
    ]),
    *(["quantize", "{run}", *words] for words in [[], ["--sweep", "out"], ["out", "--text", "{file}"], ["{run}"]]),
    *(["predict-serving", *words] for words in [
        ["llama3-8b"], ["llama3-8b", "target=v5e"], ["llama3-8b", "target=v5e:2x4", "--texts", "0"],
        ["llama3-8b", "target=v5e:2x4", "--context", HUGE], ["nope", "target=v5e:2x4"],
    ]),
    *(["quantized", *SMALL, *words] for words in [[], ["target=v5e"], ["target=v5e:2x2", "mesh.fsdp=5"]]),
    *(["optim", "memory", word] for word in ["optim.kind=adam", f"model.layers={HUGE}", "mesh.fsdp=0"]),
    *([*SLURM, option, HUGE, "--", "train"] for option in ["--nodes", "--restarts", "--gpus-per-node"]),
    *([*SLURM, "--partition", p, "--", "train"] for p in ["a;b", "$(x)", "-p"]),
    ["launch", "k8s", "--name", "a", "--image", "i", "--claim", "A_b", "--", "train"],
    ["goodput", "{run}", "--record", ""], ["goodput", "{run}", "--record", "a\nb"],
    ["llo", "matmul", "chip=v5e,"], ["llo", "matmul", "m=8", "m=16"], ["journey", "--budget", "inf"],
    # Two things that are wrong, and numbers in all the forms that somebody may write.
    *(["train", *words] for words in [
        ["laptp", "model.headz=1"], ["train.steps=0", "optim.learning_rate=-1"], ["train..steps=3"], ["train.steps.=3"],
        ["TRAIN.STEPS=3"], ["--train.steps=3"], ["train.steps=3 train.seed=1"], ["mesh.data=-1", "mesh.fsdp=-1"],
        ["objective.kind=grpo"], ["objective=grpo"], ["data=5"], ["train={{steps: 3, seed: -1}}"], ["profile.port=1"],
        ["profile.dump_hlo=true"], ["mesh.stage=3", "model.layers=4"], ["data.source=hf", "data.hf_name=/dev/zero"],
    ]),
    *(["train", f"train.steps={n}"] for n in ("1e999", "1:30", "0b2", ".5e1", "+-3", "\u0663", "*a", "-0", "-0.5")),
    *(["train", f"{key}={n}"] for key in ("optim.learning_rate", "optim.clip_norm") for n in ("-0.0", "1e-400")),
    ["train", "model.layers=\uff12"], ["train", "mesh.fsdp=\xbd"], ["llo", "matmul", "m=\u0663"],
    ["compile", "target=v5e:2\u0663x2"], ["compile", "target=v5e:2x2", "slices=\u0662"],
    ["config", "explain", "\u6a21"],
    ["judge", "{kernel}", "--budget", "vmem=\u0663MiB"], ["judge", "{kernel}", "--budget", "vmem=1,vmem=2"],
    ["launch", "k8s", "--name", "\uff41", "--image", "i", "--", "train"], ["predict-serving", "target=v5e:\uff12x2"],
    ["journey", "--budget", "-0.0"], ["journey", "--tokens-per-parameter", "-0.0"], ["llo", "matmul", "m=-0"],
    ["judge", "{kernel}", "--memory", "-0.0", "--seconds", "inf"], ["compile", "target=v5e:-2x2", "mesh.fsdp=0"],
    [*GENERATE, "--chat", "y"], [*GENERATE, "--top-p", "0", "--top-k", "-1"],
    ["serve", "{run}", "--max-num-seqs", "257", "--speculate", "17"], ["serve", "{run}", "--port", "65536"],
    ["serve", "{run}", "--max-model-len", HUGE], ["eval", "{run}", "--tasks", "a.yaml", "--max-model-len", HUGE],
    ["serve", "{run}", "--host", "256.1.1.1"], ["serve", "{run}", "--port", "0", "--tensor-parallel-size", "3"],
    ["serve", "{run}", "--tensor-parallel-size", "1024", "--data-parallel-size", "1024"], ["serve", "{run}", "--port",
     "0", "--adapter", "run={run}"], ["eval", "{run}", "--limit", "3"], ["eval", "{run}", "--tasks", ""],
    ["eval", "{run}", "--tasks", "a.yaml", "train.steps=3"], ["memory", "mesh.tensor=3"], ["comms", "mesh.context=3"],
    ["comms", "target=v5e:2x2", "mesh.data=3"], ["drill", "--kinds", "kill", "--faults", "1000", "train.steps=3"],
    ["quantize", "{run}", "out", "--rules", "fp8", "--calibrate", "data"],
    ["export", "{run}", "out", "--format", "peft"],
    ["export", "{run}", "out", "--dtype", "bfloat16", "--license", ""], ["journey", "--stages", "sft,sft"],
    # Control characters at the end, which a regular expression may overlook.
    *([*words, "a\n"] for words in [["config", "explain"], ["generate", "--prompt", "x"], ["llo"], ["grade"]]),
    ["roofline", "chip=v5e\n"], ["export", "{run}", "out\n"],
    ["shard", "--plot", "a\n.svg"], ["launch", "slurm", "--name", "a\n", "--", "train"],
    [*SLURM, "--time", "1:00:00\n#SBATCH --x", "--", "train"], ["launch", "k8s", "--name", "a", "--image", "i\nj", "--",
     "train"],
    # Devices, and file systems in which no folder can be made.
    *(["train", f"config={path}"] for path in ("/dev/zero", "/dev/stdin", "/dev/tty", "/proc/self/mem", "/dev/full")),
    *(["train", f"{key}={path}"] for key in ("train.executable", "checkpoint.load_parameters")
      for path in ("/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self")),
    *(["train", *SMALL, f"run.dir={path}", "run.name=q"] for path in ("/proc/x", "/sys", "/dev/full", "/dev/null/x")),
    ["train", *SMALL, "run.dir={home}", "run.name=q", "checkpoint.local_dir=/proc/x"],
    *(["train", "data.source=files", f"data.path={path}"] for path in ("/dev/zero", "/proc/self/mem", "/dev")),
    *([*words, path] for path in ("/proc/q", "/sys/q", "/dev/full", "/dev/null/q") for words in [
        ["export", "{run}"], ["export", "{run}", "--format", "gguf"], ["quantize", "{run}"], ["import", "nowhere"],
        ["data", "pack"], ["maxtext", "export", "{run}"], ["grade", "--start"],
    ]),
    *(["import", path, "out"] for path in ("/dev/zero", "/proc/self", "/proc/self/mem")),
    *([name, path] for name in ("parity", "judge") for path in ("/dev/tty", "/proc/self")),
    *(["compile", "target=v5e:2x2", "--save", path] for path in ("/dev/full", "/proc/x.bin", "/dev/null")),
    *(["data", "preview", "byte", path] for path in ("/dev/zero", "/proc/self/environ")),
    *(["grade", "01", option, path] for option in ("--json", "--gradescope") for path in ("/dev/full", "/proc/x.json")),
    *(["grade", "--notebook", path] for path in ("/dev/zero", "/proc/self/mem")),
    *(["drill", f"run.dir={path}"] for path in ("/proc/x", "/dev/null")), ["journey", "--run", "/proc/x"],
    ["profile", "/proc"], ["eval", "/dev"], ["goodput", "/proc/self"], ["serve", "/proc/self"], ["chat", "/proc/self"],
    ["sft", "{run}", "data.path=/dev/zero"], ["ppo", "/dev/full"],
    ["quantize", "{run}", "--sweep", "--text", "/dev/zero"],
    ["maxtext", "explain", "/dev/zero"], ["maxtext", "import", "/proc/self", "out", "model_name=llama2-7b"],
    # What would change nothing.
    *([name, "target=v5e:2x2", "mesh.simulate=8"] for name in ("predict-serving", "quantized", *PREDICTORS)),
    ["roofline", "mesh.fsdp=4096"], ["optim", "memory", "mesh.fsdp=8"], ["shard", "mesh.simulate=8"],
    ["memory", "train.global_batch=100000000000"], ["compile", "target=v5e:2x4", "train.global_batch=100000000000"],
    *([*words, "--", "train", "config=nowhere.yml"]
      for words in (SLURM, [*XPK, "--cluster", "c", "--tpu-type", "v5p-8"])),
    ["profile", "{run}", "--rows", "3", "--json"], ["watch", "{run}", "--every", "3", "--once"],
    ["grade", "04", "--all"], ["grade", "04", "--solutions", "--json", "x.json"], ["journey", "--plan", "--run", "x"],
    # Words that no command has.
    ["nonsense"], [""], ["--nonsense"], ["é"], ["config", "nonsense"], ["data", "pack"], ["doctor", "x"],
    ["config", "presets", "x"],
    ["optim", "memory", "laptp"],
]  # fmt: skip


# Variables of the environment, None for those that are unset, and a line.
HERE = ["train", "train.steps=1", "run.dir={home}", "run.name=q"]
ENVIRONMENTS = [
    *(({"MINITEXT_CACHE": path}, HERE) for path in ("/proc/x", "gs://b/c", "/dev/null", "~nobodyhere/x", "a\nb")),
    *(({"JAX_PLATFORMS": "nonsense"}, words) for words in (["memory"], ["doctor"], ["train", *SMALL])),
    *(({"MINITEXT_LOCAL_DEVICES": n}, HERE) for n in ("abc", "-1")),
    ({"MINITEXT_COORDINATOR": "nowhere:x", "MINITEXT_PROCESSES": "2"}, HERE),
    ({"OMPI_COMM_WORLD_SIZE": "-3", "OMPI_COMM_WORLD_RANK": "x"}, HERE),
    ({"COLUMNS": "-1", "TERM": "dumb"}, ["shard", "laptp"]),
    ({"HOME": None, "MINITEXT_CACHE": None, "LANG": "C"}, ["train", "é"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(server, tmp_path_factory):
    """What the lines name: runs, files of many kinds, and an empty folder."""
    home = tmp_path_factory.mktemp("places")
    for name, more in {"run": [], "wide": ["model.heads=16"]}.items():
        words = [*SMALL, *more, f"run.dir={home}", f"run.name={name}"]
        code, printed = server.run("train", *words, output=home / "output")
        assert code == 0, printed
    texts = {
        "file": b"a plain file\n",
        "selfref": b"train: &a {steps: *a}\n",
        "loop": b"train: &a [*a]\n",
        "list": b"- 1\n",
        "python": b"train: !!python/object/apply:os.system ['touch hacked']\n",
        "binary": bytes(range(256)),
        "other": b"train: {steps: 9}\n",
        "kernel": b"1 / 0\n",  # for judge, which refuses everything else first
        "twice": b"train: {steps: 3}\ntrain: {seed: 1}\n",
        "records": b'{"text": "x"}\n',
        "deep": b"[" * 100_000,
        "merges": "\n".join(
            ["a0: &a0 {x: 1}"]
            + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
        ).encode(),
        "bomb": "\n".join(
            ["a0: &a0 {x: 1}"]
            + [f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 12)]
        ).encode(),
    }  # fmt: skip
    for name, content in texts.items():
        (home / name).write_bytes(content)
    (home / "folder").mkdir()
    os.mkfifo(home / "pipe")
    (home / "round").symlink_to("round")
    # Of a run: its newest checkpoint damaged, its configuration cut, or that of another model.
    for name in ("torn", "cut", "mixed"):
        shutil.copytree(home / "run", home / name)
    for file in (home / "torn" / "checkpoints").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    whole = (home / "run" / "config.yml").read_text()
    (home / "cut" / "config.yml").write_text(whole[: whole.index("model:")] + "model:\n  lay")
    (home / "mixed" / "config.yml").write_text(whole.replace("embed: 32", "embed: 16"))
    names = [*texts, "run", "wide", "folder", "pipe", "round", "torn", "cut", "mixed"]
    return {"home": str(home)} | {name: str(home / name) for name in names}


def everything(folder):
    return {str(path) for path in Path(folder).rglob("*")}


def test_there_are_nine_hundred():
    assert len(LINES) >= 900 and len({tuple(line) for line in LINES}) == len(LINES)


SLICES = (
    20  # each short enough to be run again alone: pytest -m audit "tests/test_hostile.py::...[7]"
)


@pytest.mark.audit
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(SLICES))
def test_each_is_refused_in_one_line(server, places, tmp_path, part):
    here = tmp_path / "here"
    here.mkdir()
    cases, faults = [*(({}, line) for line in LINES), *ENVIRONMENTS][part::SLICES], []
    for env, line in cases:
        before = everything(tmp_path) | everything(places["home"])
        began = time.monotonic()
        pid = server.start(
            *(word.format(**places) for word in line),
            output=places["home"] + "/output",
            folder=here,
            env=env,
        )
        # Other work on the machine makes everything slower, and takes no seconds of the command's own.
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        # One that isn't refused would go on.
        killer = threading.Timer(10 * busy, os.kill, [pid, signal.SIGKILL])
        killer.start()
        code = server.wait()
        killer.cancel()
        seconds = time.monotonic() - began
        printed = Path(places["home"], "output").read_text(errors="replace")
        written = (everything(tmp_path) | everything(places["home"])) - before
        said = printed.splitlines()
        # A configuration's problems are reported together, each in its line.
        one_line = 1 <= len(said) <= 2 and len(printed) < 1000
        one_line &= all(text.startswith("error: ") for text in said)
        words = [f"{name}={value}" for name, value in env.items()] + line
        shown = " ".join(repr(word[:60]) for word in words if word not in SMALL)
        result = (
            f"{seconds:.1f} s, {server.seconds:.1f} of the processor, exit code {code}, {len(said)} lines, "
            f"{len(written)} files: {printed[-1000:]}"
        )
        print(shown, result)
        quick = server.seconds < 5 and seconds < 5 * busy
        if code not in (2, 3) or not one_line or not quick or written:
            faults.append(f"{shown}: {result}{sorted(written)[:3]}")
    assert not faults, f"{len(faults)} of {len(cases)}:\n" + "\n".join(faults)
