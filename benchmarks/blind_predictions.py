"""Predicted step times of twelve configurations whose published times were read only afterwards.

    python benchmarks/blind_predictions.py

minitext's kernels and options were improved with the four cases of step_time.py as a goal. These twelve are the test:
MaxText's commands and recipes were read without their times, mapped as `minitext maxtext explain` maps them, compiled
with the options recommended for the chip, and predicted. The history of this file and of the record shows the order:
the list, then the predictions, then the published times. maxtext-32b, llama3.1-70b-64-chips and mistral-7b came first, and
showed two mistakes in minitext.compiler; these were corrected before the nine after them. The figures for v5e were seen
while looking for configurations, so none of the twelve is for v5e. A third mistake was found after all times had been
read: on tpu7x a device is one core, and kernels were predicted as if two shared their steps. The record has the
predictions as they were made.

Where a step needs more memory in minitext than the chips have, its batch is computed in two parts: the same products
with the same policy, and the weights are gathered twice.

There are two intervals. `scheduled` reaches from everything overlapped to nothing overlapped. It leaves out that
minitext's program is not MaxText's. `interval` is wider at both ends, by the factor that the four cases of step_time.py
need for the worst of them to be inside. If the twelve were drawn as those four were, four in five would be inside it.

Compiling takes minutes and some GB a case. The compiler's texts and the predictions are kept: the record is written a
second time, with the published times, from the predictions of the first.
"""

import json
from pathlib import Path

from common import kept_case, parser, write_record

V5P = "github.com/AI-Hypercomputer/maxtext at 76bd53b0f, MaxText/configs/v5p"
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes at c8cfe2f, training"
# As base.yml had them at that commit, times what global_parameter_scale says. There, layers had no gate: one two thirds
# as wide, rounded up to a multiple of 128, has as many parameters.
SIZES = "head_dim=256 vocab_size=32768 logits_via_embedding=true"
HALVES = {"train.microbatches": 2}
OFFLOADED = "decoder_layer_input=offload query_proj=offload key_proj=offload value_proj=offload"
OLD = "a program of December 2023, of layers without a gate; fsdp over all chips, where MaxText's has tensor={}"
# Of the recipe; minitext recommends none for this chip.
TPU7X = {
    "xla.options": [
        "xla_tpu_scoped_vmem_limit_kib=61440", "xla_tpu_bf16_emission_mode=NATIVE_EMISSION",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
        "xla_tpu_use_single_sparse_core_for_all_gather_offload=true",
    ]
}  # fmt: skip
LLAMA_70B = "model_name=llama3.1-70b per_device_batch_size=2 max_target_length=8192 remat_policy=custom " \
    "context=device query_proj=device key_proj=device value_proj=device"  # fmt: skip
GEMMA_12B = (
    "model_name=gemma3-12b per_device_batch_size=1 max_target_length=32768 num_vocab_tiling=16"
)
CASES = {
    "maxtext-32b": {
        "kind": "dense", "target": "v5p:4x4x4", "source": f"{V5P}/32b.sh",
        "command": f"{SIZES} base_emb_dim=10240 base_num_query_heads=32 base_num_kv_heads=32 base_mlp_dim=21888 "
        "base_num_decoder_layers=32 per_device_batch_size=8 max_target_length=2048 remat_policy=minimal",
        "settings": HALVES, "differs": f"{OLD.format(4)}; in two parts",
    },
    "maxtext-128b": {
        "kind": "dense", "target": "v5p:4x4x8", "source": f"{V5P}/128b.sh",
        "command": f"{SIZES} base_emb_dim=10240 base_num_query_heads=64 base_num_kv_heads=64 base_mlp_dim=43776 "
        "base_num_decoder_layers=64 per_device_batch_size=2 max_target_length=2048 remat_policy=minimal",
        "settings": HALVES, "differs": f"{OLD.format(8)}; in two parts",
    },
    "maxtext-256b": {
        "kind": "dense", "target": "v5p:8x8x8", "source": f"{V5P}/256b.sh",
        "command": f"{SIZES} base_emb_dim=20480 base_num_query_heads=64 base_num_kv_heads=64 base_mlp_dim=43776 "
        "base_num_decoder_layers=64 per_device_batch_size=2 max_target_length=2048 remat_policy=minimal",
        "settings": HALVES, "differs": f"{OLD.format(8)}; in two parts",
    },
    "maxtext-512b": {
        "kind": "dense", "target": "v5p:8x8x8", "source": f"{V5P}/512b.sh",
        "command": f"{SIZES} base_emb_dim=20480 base_num_query_heads=64 base_num_kv_heads=64 base_mlp_dim=43776 "
        "base_num_decoder_layers=128 per_device_batch_size=2 max_target_length=2048 remat_policy=full",
        "settings": {}, "differs": OLD.format(16),
    },
    "gemma3-12b": {
        "kind": "dense", "target": "v6e:16x16", "source": f"{RECIPES}/trillium/Gemma3-12B-MaxText/v6e-256",
        "command": GEMMA_12B, "settings": {},
        "differs": "scoped VMEM of 120 MiB there, 96 MiB and SparseCore collectives here",
    },
    "gemma3-12b-2-slices": {
        "kind": "dense", "target": "v6e:16x16 slices=2",
        "source": f"{RECIPES}/trillium/Gemma3-12B-MaxText/2x-v6e-256", "command": GEMMA_12B, "settings": {},
        "differs": "scoped VMEM of 120 MiB there, 96 MiB and SparseCore collectives here",
    },
    "llama3.1-70b-64-chips": {
        "kind": "dense", "target": "tpu7x:4x4x4", "source": f"{RECIPES}/ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4",
        "command": LLAMA_70B, "settings": TPU7X, "differs": "first moments in float32, in bfloat16 there",
    },
    "llama3.1-70b-256-chips": {
        "kind": "dense", "target": "tpu7x:4x8x8", "source": f"{RECIPES}/ironwood/llama3.1-70b/8k-bf16-tpu7x-4x8x8",
        "command": LLAMA_70B, "settings": TPU7X, "differs": "first moments in float32, in bfloat16 there",
    },
    "mistral-7b": {
        "kind": "host offload", "target": "v6e:2x4", "source": f"{RECIPES}/trillium/Mistral-7B-MaxText",
        "command": "model_name=mistral-7b per_device_batch_size=6 max_target_length=8192 remat_policy=custom "
        f"out_proj=offload {OFFLOADED}",
        "settings": HALVES, "differs": "what MaxText offloads is recomputed; in two parts",
    },
    "llama3.1-405b": {
        "kind": "host offload", "target": "v5p:8x8x8", "source": f"{RECIPES}/v5p/Llama3.1-405B-MaxText",
        "command": "model_name=llama3.1-405b per_device_batch_size=2 max_target_length=8192 num_vocab_tiling=4 "
        "remat_policy=custom context=offload mlpwo=offload",
        "settings": HALVES, "differs": "what MaxText offloads is recomputed; in two parts",
    },
    "mixtral-8x7b-dropped": {
        "kind": "experts", "target": "v6e:16x16", "source": f"{RECIPES}/trillium/Mixtral-8x7B-MaxText",
        "command": "model_name=mixtral-8x7b per_device_batch_size=12 max_target_length=4096 remat_policy=custom "
        f"out_proj=offload {OFFLOADED} sparse_matmul=false megablox=false capacity_factor=1.25",
        "settings": HALVES, "differs": "what MaxText offloads is recomputed; in two parts",
    },
    "llama4-scout": {
        "kind": "experts", "target": "v5p:4x4x8", "source": f"{RECIPES}/v5p/Llama4-Scout-17B-16E-Maxtext",
        "command": "model_name=llama4-17b-16e per_device_batch_size=8 max_target_length=8192 remat_policy=custom "
        "decoder_layer_input=offload sparse_matmul=true megablox=true",
        "settings": HALVES, "differs": "MaxText offloads the inputs of layers; in two parts",
    },
}  # fmt: skip
# Seconds a step, read after the predictions were committed. v5p's page gives TFLOP/s a chip: its script counts
# 6 x parameters x tokens and half of attention's 12 x heads x head x layers x T^2. Where nothing else is said, it's a line
# of the log in the recipe's README.md.
PUBLISHED = {
    "maxtext-32b": 3252.355 / 328,  # README.md beside the script: 1x v5p-128
    "maxtext-128b": 3227.616 / 315,  # 1x v5p-256
    "maxtext-256b": 6402.456 / 308,  # 1x v5p-1024
    "maxtext-512b": 12788.42 / 294,  # 1x v5p-1024
    "gemma3-12b": 7.318,
    "gemma3-12b-2-slices": 7.793,
    "llama3.1-70b-64-chips": 12.20,  # training/ironwood/README.md
    "llama3.1-70b-256-chips": 12.27,
    "mistral-7b": 6.320,
    "llama3.1-405b": 131.474,
    "mixtral-8x7b-dropped": 13.484,
    "llama4-scout": 31.652,
}


def predict(name, programs):
    """One case in this process: what `StepTime.to_json` says."""
    from minitext.distributed import devices

    devices.start()
    from minitext.config import maxtext_command, maxtext_map
    from minitext.perf.maxtext import machine_for
    from minitext.perf.step_time import predict_preset, predict_program

    case = CASES[name]
    reading = maxtext_command.read(f"python3 train.py base.yml {case['command']}")
    machine, target = machine_for(reading, case["target"])
    cfg = maxtext_map.translate(reading, machine).cfg
    cfg = cfg.replace(case["settings"] | {"xla.recommended": True})
    text = Path(programs, f"{name}.txt")
    if text.exists():
        return predict_program(text.read_text(), cfg, target).to_json()
    return predict_preset(cfg, case["target"], text).to_json()


def learned():
    """The factor at each end of an interval with which all four published times of step_time.py are inside."""
    newest = max((Path(__file__).parent / "results").glob("step_time-*.json"))
    return max(
        max(run["published_seconds"] / run["predicted"]["upper"],
            run["predicted"]["lower"] / run["published_seconds"])
        for run in json.loads(newest.read_text())["runs"].values()
    )  # fmt: skip


def compare(case, found, factor, published):
    """A case's row: the prediction and, if it has been read, what was published."""
    scheduled = [found["lower"], found["upper"]]
    interval = [scheduled[0] / factor, scheduled[1] * factor]
    row = case | {"predicted": found, "interval": interval}
    if published is not None:
        row |= {
            "published_seconds": published,
            "error": found["seconds"] / published - 1,
            "within_a_tenth": abs(published / found["seconds"] - 1) <= 0.1,
            "in_scheduled": scheduled[0] <= published <= scheduled[1],
            "in_interval": interval[0] <= published <= interval[1],
        }
    return row


def main():
    cli = parser(__doc__)
    cli.add_argument(
        "--programs", type=Path, default=Path("programs"),
        help="folder for the compiler's texts and the predictions; what is there isn't made again (%(default)s)",
    )  # fmt: skip
    cli.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="these cases")
    args = cli.parse_args()
    if args.case:
        print(json.dumps(predict(**args.case)))
        return
    factor, runs = learned(), {}
    args.programs.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        case = CASES[name]
        to = args.programs / f"{name}.json"
        found = kept_case(__file__, to, {"name": name, "programs": str(args.programs)})
        runs[name] = compare(case, found, factor, PUBLISHED.get(name))
        print(f"{name} on {case['target']}: {found['seconds']:.3f} s", flush=True)
    figures = {"published_times_read": bool(PUBLISHED), "factor": factor, "runs": runs}
    write_record(args.output, "blind_predictions", "", figures)


if __name__ == "__main__":
    main()
