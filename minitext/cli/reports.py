"""The commands that say what a configuration needs and does, before it runs."""

import json
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minitext.cli.arguments import (
    Json,
    Plot,
    Settings,
    answer,
    load,
    refuse_options,
    refuse_settings,
    start,
    take_chip,
    take_target,
)
from minitext.config.sections import MeshConfig, SlicesConfig
from minitext.distributed.devices import simulate_for
from minitext.errors import UserError
from minitext.files import check_new_file, local_path, shorten

if TYPE_CHECKING:
    from minitext.config.config import Config

ACROSS = tuple(f"mesh.dcn.{name}" for name in SlicesConfig.model_fields)
SENT = "sharding.gather_dtype"
MESH = (*(f"mesh.{name}" for name in MeshConfig.model_fields), *ACROSS)


def check_save(path: str | None) -> str | None:
    """Refuses a file that couldn't be written, before JAX starts."""
    if path is not None:
        check_new_file("--save", path)
    return path


def compile_(
    settings: Settings = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="write the compiled step, for train.executable=FILE",
            callback=check_save,
        ),
    ] = None,
    options: Annotated[
        bool,
        typer.Option(
            "--options", help="only list the compiler's options, and check that it takes them"
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile a preset's train step for chips you don't have: target=v5e:2x2, target=v5e:16x16 slices=2.

    Prints whether it fits, bytes of arguments and temporaries per chip, collectives within slices and across, and
    compile time. Exits with 3, naming the largest tensors, if it does not fit. With --save and without a target the
    step is compiled for the devices that train would run on here.
    """
    target, settings = take_target(settings)
    if options and save is not None:
        raise UserError("--options compiles no step to save: leave out --save or --options")
    if target is None and save is None:
        raise UserError("name one target, such as target=v5e:2x2 or target=v5p:4x4x4")
    cfg = load(settings, target)
    if target is None:
        return _save_here(cfg, str(save), as_json)
    start()
    if options:
        return _print_options(cfg, target, as_json)
    from minitext.compiler.report import print_report
    from minitext.training.compile import compile_preset, save_for

    report = compile_preset(cfg, target) if save is None else save_for(cfg, target, save)
    answer(report, as_json, print_report)
    if not report.fits:
        raise typer.Exit(3)


def _print_options(cfg: "Config", target: str, as_json: bool) -> None:
    """Lists the options of the step's compiler, and those that could be set."""
    from minitext.compiler.options import KNOWN, RECOMMENDED, chosen, platform_of, refused
    from minitext.compiler.targets import parse_target, topology_mesh
    from minitext.terminal import print_tables, table

    parsed = parse_target(target)
    chip = parsed.chip
    mesh = topology_mesh(f"{chip.name}:{'x'.join('1' * len(parsed.shape))}")
    found = chosen(cfg.xla, mesh)
    wrong = [why for _, why in refused(found, mesh)]
    of_chip = RECOMMENDED.get(chip.name, {})
    known = {n: of_chip.get(n) for n in KNOWN if platform_of(n) in (None, chip.platform)}

    def show(_: object) -> None:
        rows = [(o.name, o.value, o.source, KNOWN.get(o.name, "")) for o in found]
        heads = ("option", "value", "from", "what it is for")
        others = [(n, v or "", KNOWN[n]) for n, v in known.items() if n not in {r[0] for r in rows}]
        print_tables(
            table(heads, rows, ()) if rows else "no option is on",
            table(
                ("others that recipes set", f"recommended for {chip.name}", "what it is for"),
                others,
                (),
            ),
        )

    answer({"on": [o._asdict() for o in found], "recommended": known}, as_json, show)
    if wrong:
        raise UserError(f"xla.options: {'; '.join(wrong)}")


def plan(
    settings: Settings = None,
    count: Annotated[int, typer.Option("--compile", min=1, help="candidates to compile")] = 3,
    as_json: Json = False,
) -> None:
    """Search for the mesh, batch and recomputation with which a preset trains fastest: target=v5p:4x4x4.

    Keys that you set are kept. The best by prediction are compiled and ranked by what the compiler reports; each row
    says what limits it. Exits with 3 if nothing fits.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5p:4x4x4 or target=v5e:16x16 slices=2")
    cfg = load(settings, target)
    start()

    from minitext import terminal
    from minitext.perf import plan

    with terminal.bar() as bar:
        task = bar.add_task(f"planning for {target}", total=None)
        found = plan.search(
            cfg, target, count,
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )  # fmt: skip
    chosen = found.best.settings if found.best else {}
    words = [word for word in settings if word.partition("=")[0] not in chosen]
    words += [f"{key}={value}" for key, value in chosen.items()]
    compiling = "minitext", "compile", *words, *f"target={target}".split()
    commands = [shlex.join(compiling), shlex.join(["minitext", "train", *words])]
    if as_json:
        print(json.dumps(found.to_json() | {"commands": commands if chosen else []}))
    else:
        plan.print_plan(found)
        print("\n".join(["", *commands]) if chosen else f"nothing fits: {plan.advise(found, cfg)}")
    if not chosen:
        raise typer.Exit(3)


def tune_options(
    settings: Settings = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="folder for results and best.yml  [default: runs/tune-PRESET-TARGET]",
            callback=local_path,
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, max=10_000, help="candidates to compile at most")
    ] = 30,
    as_json: Json = False,
) -> None:
    """Search for the compiler's options, recomputation and microbatches of the fastest step: target=v5e:2x4.

    Each candidate is compiled and its schedule walked, one dimension at a time from the best so far. Settings that you
    set are kept, and so is the mesh, which minitext plan chooses. DIR keeps each result: the same command goes on where
    it was stopped. The best is written to DIR/best.yml for config=. Exits with 3 if nothing fits.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5e:2x4 or target=v5p:4x4x4")
    cfg = load(settings, target)
    from minitext.config.config import DEFAULT_PRESET

    names = [
        Path(word.removeprefix("config=")).stem for word in settings if word.startswith("config=")
    ]
    names += [word for word in settings if "=" not in word]
    name = "-".join(["tune", *(names or [DEFAULT_PRESET]), *re.findall(r"\w+", target)])
    folder = Path(save or f"runs/{name}")
    start(cache=False)

    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    from minitext import terminal
    from minitext.perf import tune_options

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with terminal.bar(*columns) as bar:
        task = bar.add_task(f"searching for {target}", total=budget)
        search = tune_options.Search(
            cfg, target, budget,
            lambda what, done: bar.update(task, description=escape(what), completed=done),
        )  # fmt: skip
        with tune_options.Store(folder) as store:
            try:
                found = search.run(store)
            except KeyboardInterrupt:
                print(f"{folder} has all results; the same command goes on", file=sys.stderr)
                raise
    answer(found, as_json, tune_options.print_tuning)
    if found.best.seconds is None:
        raise typer.Exit(3)


def _save_here(cfg: "Config", file: str, as_json: bool) -> None:
    start(simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate))
    from minitext.sharding.mesh import make_mesh
    from minitext.training.compile import save

    def show(made: dict) -> None:
        devices, size = f"{made['devices']} x {made['device_kind']}", made["bytes"] / 2**20
        print(
            f"{file}: the step for {devices}, {size:,.1f} MiB; minitext train ... train.executable={file}"
        )

    answer(save(cfg, make_mesh(cfg.mesh), file), as_json, show)


def roofline(
    ctx: typer.Context,
    settings: Settings = None,
    rows: Annotated[int, typer.Option(min=0, help="operations to list, the longest first")] = 20,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a preset's train step from its FLOPs and bytes, here or on a chip: chip=v5p.

    On a chip the step is shared evenly by the devices of mesh.*, and communication takes no time. This
    machine's peak and bandwidth are measured once a day.
    """
    if as_json:
        refuse_options(ctx, ["rows"], "with --json, which lists all operations")
    chip, settings = take_chip(settings)
    cfg = load(settings)
    if chip is None:
        refuse_settings(cfg, MESH, "without a chip, such as chip=v5p: this machine is one device")
    else:
        refuse_settings(cfg, ["mesh.simulate", *ACROSS], f"with chip={chip}")
    refuse_settings(cfg, [SENT], "here, where communication takes no time")
    start()
    from minitext.perf import roofline

    prediction = roofline.predict_step(cfg, chip)
    answer(
        prediction, as_json, lambda found: roofline.print_prediction(found, cfg.model.dtype, rows)
    )
    if plot is not None:
        from minitext.perf.figures import draw_roofline, save_figure

        save_figure(plot, lambda: draw_roofline(prediction, cfg.model.dtype))


def optim_memory(settings: Settings = None, as_json: Json = False) -> None:
    """Compare the memory of a preset's training state under each optimizer, summed over all devices."""
    cfg = load(settings)
    refuse_settings(cfg, ["optim.kind"], "here, where all optimizers are compared")
    refuse_settings(cfg, [*MESH, SENT], "on sums over all devices")
    start()
    from minitext.perf import memory
    from minitext.training import step as train

    found = train.optimizer_memory(cfg)
    answer(found, as_json, memory.print_optimizers)


def shard(
    settings: Settings = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Print how every parameter of a preset is sharded on a mesh of any size: its dimensions, their axes, its bytes.

    No device is needed: minitext shard llama3-8b mesh.fsdp=16 mesh.tensor=4
    """
    cfg = load(settings)
    refuse_settings(cfg, ["mesh.simulate"], "here: no device is needed")
    refuse_settings(cfg, [SENT], "on what devices store")
    start()
    from minitext.perf import shard_report

    found = shard_report.parameters(cfg)
    rows = [asdict(parameter) for parameter in found] if as_json else found
    answer(rows, as_json, lambda found: shard_report.print_parameters(cfg, found))
    if plot is not None:
        from minitext.perf.figures import draw_sharding, save_figure
        from minitext.sharding.mesh import abstract_mesh

        save_figure(plot, lambda: draw_sharding(found, abstract_mesh(cfg.mesh)))


def memory_(settings: Settings = None, as_json: Json = False) -> None:
    """Predict the memory of a preset's train step, beside what the compiler says, here or for target=v5e:2x4."""
    target, settings = take_target(settings)
    cfg = load(settings, target)
    start(None if target else simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate))
    from minitext.perf import memory

    found = memory.predict_and_compile(cfg, target)
    answer(found, as_json, memory.print_memory)


def comms(settings: Settings = None, as_json: Json = False) -> None:
    """Predict what devices send each other in a step, beside the program for simulated ones or for target=v5e:2x4."""
    target, settings = take_target(settings)
    cfg = load(settings, target)
    if target:
        start()
    else:  # at least eight devices, if none are asked for: one sends nothing
        needed = simulate_for(list(cfg.mesh.sizes().values()), cfg.mesh.simulate)
        start(cfg.mesh.simulate or max(needed or 1, 8))
    from minitext.perf import comms_audit

    found = comms_audit.audit_preset(cfg, target)
    answer(found, as_json, comms_audit.print_audit)


def quantized(settings: Settings = None, as_json: Json = False) -> None:
    """List the products of a preset's train step, compiled for a target, with the types it multiplies: target=v5e:2x4.

    What model.quantization names shows up as s8 or f8, forward and backward. Products inside kernels aren't listed.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5e:2x2 or target=v6e:2x2")
    cfg = load(settings, target)
    start()
    from minitext.perf import product_types

    found = product_types.find_products(cfg, target)
    answer(found, as_json, product_types.print_products)


def llo(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KERNEL... [chip=v5e,v6e] [BLOCK=LENGTH]...", help="kernels, a block's lengths"
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compile kernels for TPUs you don't have, and read their machine code: matmul chip=v5e.

    Prints bundles, the share of them in which each unit is busy, spilled registers and vector memory; of one kernel on
    one chip also a strip. Several kernels or chips make one table: llo matmul jax_megablox_gmm chip=v5e,v6e m=256.
    Without a name all kernels are compiled.
    """
    chips, rest = take_chip(settings)
    names = [word for word in rest if "=" not in word]
    blocks = _lengths([word for word in rest if "=" in word])
    start()

    from minitext import terminal
    from minitext.compiler import llo
    from minitext.compiler.llo import compile_case
    from minitext.compiler.llo_compiler import tpu
    from minitext.kernels.cases import CASES

    where = [tpu(chip).name for chip in ("v5e" if chips is None else chips).split(",")]
    pairs = [(name, chip) for name in names or CASES for chip in where]
    with terminal.bar() as bar:
        found = [
            (name, kernel)
            for name, chip in bar.track(pairs, description="compiling")
            for kernel in compile_case(name, chip, **blocks)
        ]
    kernels = [kernel for _, kernel in found]
    if as_json:
        print(json.dumps([{"case": name, **kernel.to_json()} for name, kernel in found], indent=1))
    else:
        llo.print_kernels(kernels, strips=len(pairs) == 1)
    if plot is not None:
        from minitext.perf.figures import draw_bundles, save_figure

        save_figure(plot, lambda: draw_bundles(kernels))


def tune(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP chip=v5e", help="an operation with block shapes"),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="put the best into the table of block shapes")
    ] = False,
    as_json: Json = False,
) -> None:
    """Choose a kernel's block shape for a chip: matmul chip=v5e.

    Candidates are measured if the chip is here (that needs the extra tune). Otherwise each is compiled for it, and they
    are ranked by what the compiler's code and the copies of its blocks should take.
    """
    chip, words = take_chip(settings)
    names = [word for word in words if "=" not in word]
    if lengths := [word for word in words if "=" in word]:
        raise UserError(
            f"{' '.join(lengths)}: tune tries block lengths of its own; see one with minitext llo "
            f"{' '.join(names[:1] or ['OP'])} {' '.join(lengths)}"
        )
    if chip is None or len(names) != 1:
        raise UserError("name one operation and one chip, such as: minitext tune matmul chip=v5e")
    start()

    from minitext import terminal
    from minitext.kernels import block_shapes
    from minitext.perf import tune

    with terminal.bar() as bar:
        task = bar.add_task(f"{names[0]} for {chip}", total=None)
        found = tune.tune(
            names[0], chip, lambda done, total: bar.update(task, completed=done, total=total)
        )
    rows = [candidate.to_json() for candidate in found] if as_json else found
    answer(rows, as_json, lambda found: tune.print_candidates(names[0], chip, found))
    if write:
        try:
            block_shapes.write(names[0], chip, tune.best(names[0], found).blocks)
        except OSError as error:
            raise UserError(f"cannot write {block_shapes.FILE}: {error.strerror}") from error


def judge(
    file: Annotated[
        str, typer.Argument(metavar="FILE.py", help="with the kernels; it is executed")
    ],
    chip: Annotated[str, typer.Option(help="TPUs to compile for, such as v5e,v6e")] = "v5e",
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="vmem=12MiB, spills=0, bundles=4000 or mxu=50%"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="time limit for everything")
    ] = 600,
    memory: Annotated[float, typer.Option(min=0.5, max=1024, help="memory limit in GiB")] = 8,
    as_json: Json = False,
) -> None:
    """Judge anyone's Pallas TPU kernel without a TPU: simulated strictly, compiled for real chips.

    minitext judge FILE.py --chip v5e,v6e --budget vmem=12MiB --budget spills=0

    FILE.py defines kernel(x, y), which calls pl.pallas_call; example_inputs(), which returns a tuple of (small) arrays;
    and, if you like, reference(x, y), which computes the same in plain JAX. Or a list CASES = [Case(fn, inputs,
    reference), ...] with Case from minitext.perf.judge, for several kernels or shapes, jax.vmap(kernel) or jax.grad of
    it. That module's docstring is a whole example: python -m pydoc minitext.perf.judge.

    The simulator looks for races, accesses out of bounds and reads of memory that nothing initialized, and compares
    values. The TPU compiler then says how many bundles a kernel has, how busy they keep the matrix units, how many
    registers it spills and how much VMEM it takes. FILE.py is executed, in a process of its own: judge only what you
    would run. Exits with 1 if a check fails, with 2 if the file can't be executed or exceeds --seconds or --memory.
    """
    from minitext import terminal
    from minitext.perf import judge

    local_path(file)
    chips, limits = judge.check_chips(chip), judge.parse_budget(budget or [])
    with terminal.bar() as bar:
        task = bar.add_task("judging", total=None)
        found = judge.judge(
            file, chips, limits, seconds=seconds, memory_gib=memory,
            say=lambda what: bar.update(task, description=what),
        )  # fmt: skip
    answer(found, as_json, judge.print_verdict)
    if not found.passed:
        raise typer.Exit(1)


def _lengths(words: list[str]) -> dict[str, int]:
    """Reads `BLOCK=LENGTH` words."""
    pairs = [word.partition("=")[::2] for word in words]
    for name, length in pairs:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", length):
            raise UserError(
                f"{name}={shorten(length)}: a block's length is a whole number, such as {name}=512"
            )
    lengths = {name: int(length) for name, length in pairs}
    if len(lengths) < len(pairs):
        twice = next(name for name in lengths if sum(name == other for other, _ in pairs) > 1)
        raise UserError(f"{twice} is given twice: give a block's length once")
    return lengths


def predict(settings: Settings = None, as_json: Json = False) -> None:
    """Predict how long a preset's train step takes on TPUs you don't have: target=v5e:2x4.

    Compiles the step and walks through the compiler's schedule: an interval from everything overlapped to nothing, a
    best estimate, and what the core does or waits for. Exits with 3 if the step does not fit.
    """
    target, settings = take_target(settings)
    if target is None:
        raise UserError("name one target, such as target=v5e:2x4 or target=v5p:4x4x4")
    cfg = load(settings, target)
    start()
    from minitext.perf import step_time

    found = step_time.predict_preset(cfg, target)
    answer(found, as_json, step_time.print_step_time)
