"""Checkpoints that survive: asynchronous, atomic, verified, and restored onto any mesh.

A checkpoint is a directory named after its step:

    300/
      state/          an Orbax checkpoint with one array per leaf, each under the leaf's name
      facts.json      the step, the data iterator's state, the config, the shapes and sharding
      manifest.json   the size and SHA-256 of every file above

It is written as `300.1.tmp` and renamed once everything, including the manifest, is on the disk. The rename is the only
commit. A process killed at any moment leaves either a whole `300` or a directory ending in `.tmp`, which is never read
and which the next process to save deletes. A step with a missing, truncated or altered file is therefore damaged:
restoring reports it in one line and tries the step before. The next save renames it `300.damaged`; nothing deletes it.

Orbax's `CheckpointManager` (0.12.8, with `files.seal` hooked into its rename) breaks three of these promises. It won't
replace a step, keeps a damaged step in place of a good one and later deletes it, and leaves a failed save's files on a
full disk. On an AMD EPYC it also held the loop for 45 ms to save 100 MB, where this module holds it for 2.

Chapters: 8, 21.
"""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from minitext import files
from minitext.checkpoint import leaves, stacks
from minitext.errors import UserError

logger = logging.getLogger(__name__)

STATE, FACTS = "state", "facts.json"
TEMPORARY, DAMAGED = ".tmp", ".damaged"


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns."""

    state: Any
    data_state: dict[str, Any]
    step: int


class Checkpointer(AbstractContextManager):
    """Saves and restores a pytree with the position of its data, a directory for each step.

    All processes of a job make the same calls. Process 0 writes the facts and the manifest, renames, and deletes old
    steps. Reading changes nothing, so a run can be evaluated while it trains. Use it as a context manager or call
    `close`: a save under way at exit may be lost.

    Args:
        directory: holds the steps; made by the first save.
        keep: how many of the newest steps to keep, at least 1. The step just saved always stays.
        keep_every: also keeps the steps that are multiples of it.
        own: whether each process has its own directory, for the shards of its own devices only.
        at_once: bytes of arrays that are compressed and written at a time, at least the largest array's; None: all.
            Writing holds copies of them.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int = 3,
        keep_every: int | None = None,
        own: bool = False,
        at_once: int | None = None,
    ):
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep={keep}, keep_every={keep_every}: each is at least 1")
        self.directory = Path(files.local_path(directory)).absolute()
        self.keep, self.keep_every, self.own, self.at_once = keep, keep_every, own, at_once
        self._key = "checkpoint.local_dir" if own else "run.dir"  # which names the directory
        self._damaged: set[int] = set()  # found by `restore`, set aside by the next save
        self._saves = 0
        self._pending: Future[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @functools.cached_property
    def _orbax(self) -> Any:
        return leaves.checkpointer(self.own, self.at_once)

    def save(
        self,
        step: int,
        state: Any,
        data_state: dict[str, Any],
        config: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Saves `state` as `step`, in the background unless `wait`. A step that exists is replaced.

        Waits for the save before this one, and returns when the arrays are safe to donate.

        Args:
            step: the number of updates in `state`.
            state: any pytree of arrays (jax or numpy, typed PRNG keys too) and Python numbers.
            data_state: the data iterator's state, as JSON. Process 0's is stored.
            config: the resolved configuration, as JSON; stored for people and `facts`.
            wait: whether to return only after the checkpoint is committed. The arrays are then written from where they
                are, without a copy on the host of them all.

        Raises:
            UserError: the directory can't be written (full, read-only, no permission), for this
                save or the one before. Steps already saved are intact.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step={step}: a step is a count of updates, 0 or more")
        named = leaves.named(state)
        facts = {"step": step, "data_state": data_state, "config": config}
        text = json.dumps(facts | {"layout": leaves.layout(named)}, indent=1)
        self._saves += 1
        target = self._path(step, f".{self._saves}{TEMPORARY}")
        try:
            if self._is_primary():
                self._prepare(target)
            arrays, write = leaves.storable(named), None
            if jax.process_count() == 1 and not self.own:
                if not wait:  # Orbax's own preparations take longer than this copy, and can wait for the thread.
                    arrays = leaves.on_host(arrays)
                write = functools.partial(leaves.write, self._orbax, target / STATE, arrays)
            else:
                leaves.write(self._orbax, target / STATE, arrays)
        except BaseException as error:
            self._fail(error, step, target)
        self._pending = self._executor.submit(self._commit, step, target, text, write)
        if wait:
            self.wait()

    def restore(
        self, abstract_state: Any, step: int | None = None, partial: bool = False
    ) -> Restored | None:
        """Reads the newest undamaged checkpoint, or that of `step`, laid out as `abstract_state`.

        Each damaged step on the way is reported in one warning and skipped.

        Args:
            abstract_state: a pytree of the same names. `jax.ShapeDtypeStruct`s and jax arrays come back as jax arrays
                on their shardings, of any mesh (uncommitted if they have none), numpy arrays and numbers as such.
                Layers may have been saved one by one or stacked (`stacks`).
            step: the step to read; it must exist and be whole.
            partial: allows `abstract_state` to lack leaves that were saved; they aren't read.

        Returns:
            The state, the data iterator's state and the step; None if nothing has been saved yet.

        Raises:
            UserError: every checkpoint (or `step`'s) is damaged, or a leaf differs in shape or dtype or is missing on
                either side.
        """
        while (chosen := self.choose(step)) is not None:
            try:
                return self.read(abstract_state, chosen, partial)
            except Exception:
                if jax.process_count() > 1 or not self._was_deleted(chosen):
                    raise
        return None

    def choose(self, step: int | None = None) -> int | None:
        """Returns the newest undamaged step, or `step`, after reading all its files, as `restore` does; or None."""
        self.wait()
        return self._choose_together(step)

    def read(self, abstract_state: Any, chosen: int, partial: bool = False) -> Restored:
        """Reads a step that `choose` returned, as `restore` does."""
        facts = self.facts(chosen)
        wanted, saved = leaves.named(abstract_state), facts["layout"]["leaves"]
        to_read = stacks.as_stored(saved, wanted)
        self._check_layout(saved, to_read, partial)
        values = leaves.read(self._orbax, self._path(chosen) / STATE, to_read)
        state = leaves.rebuild(abstract_state, stacks.as_wanted(values, wanted))
        return Restored(state, facts["data_state"], chosen)

    def read_each(
        self, abstract_state: Any, step: int | None = None
    ) -> tuple[int, Iterator[tuple[str, np.ndarray]]] | None:
        """Reads what `restore` with `partial` would, a leaf at a time.

        Args:
            abstract_state: a pytree of arrays or their shapes; shardings don't matter.
            step: the step to read; it must exist and be whole. By default the newest undamaged one.

        Returns:
            The step, and the leaves' names and arrays on the host, each read when it's asked for; None if nothing has
            been saved yet.

        Raises:
            UserError: what `restore` raises.
        """
        if (chosen := self.choose(step)) is None:
            return None
        saved = self.facts(chosen)["layout"]["leaves"]
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, leaf in leaves.named(abstract_state).items()
        }
        self._check_layout(saved, stacks.as_stored(saved, wanted), partial=True)

        def each() -> Iterator[tuple[str, np.ndarray]]:
            for name, leaf in wanted.items():
                to_read = stacks.as_stored(saved, {name: leaf})
                try:
                    values = leaves.read(self._orbax, self._path(chosen) / STATE, to_read)
                except Exception as error:
                    if not self._was_deleted(chosen):
                        raise
                    raise UserError(
                        f"{self._path(chosen)} was deleted while it was read, as a run does that keeps newer ones: "
                        "wait until it ends, or give it a larger checkpoint.keep"
                    ) from error
                yield name, np.asarray(stacks.as_wanted(values, {name: leaf})[name])

        return chosen, each()

    def steps(self) -> list[int]:
        """The committed steps, oldest first, except those found damaged."""
        return sorted(self._committed() - self._damaged)

    def _committed(self) -> set[int]:
        try:
            names = [entry.name for entry in os.scandir(self.directory) if entry.is_dir()]
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise UserError(
                f"cannot look into {self.directory}: {error.strerror}; choose another {self._key}"
            ) from error
        return {int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)}

    def latest(self) -> int | None:
        """The newest committed step, or None. Only restoring verifies it."""
        return max(self.steps(), default=None)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays: `step`, `data_state`, `config` and `layout`."""
        return json.loads((self._path(step) / FACTS).read_text(encoding="utf-8"))

    def verify(self, step: int) -> str | None:
        """Reads every file of a step; returns the first fault found, or None."""
        return files.verify(self._path(step))

    def wait(self) -> None:
        """Blocks until the save under way is committed; raises its error, once."""
        if self._pending is None:
            return
        try:
            self._pending.result()
        finally:
            if self._pending.done():  # not after Ctrl-C: then it's still being written
                self._pending = None

    def close(self) -> None:
        """Waits for the save under way, raises its error, and ends the threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if "_orbax" in self.__dict__:
                self._orbax.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except UserError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # must not hide the exception already on its way

    def _check_layout(self, saved: Any, to_read: Any, partial: bool) -> None:
        if difference := leaves.difference(saved, to_read, partial):
            raise UserError(
                f"{self.directory} holds another model: {difference}: use the settings that it was trained with, or "
                "another folder"
            )

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"

    def _is_primary(self) -> bool:
        """Whether this process writes the facts and the manifest, renames, and deletes."""
        return self.own or jax.process_index() == 0

    def _prepare(self, target: Path) -> None:
        """Makes the directory to write in, clears what killed saves left, and sets damaged steps aside."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._saves == 1:
            files.sync(self.directory.parent)
            for path in self.directory.glob(f"[0-9]*{TEMPORARY}/"):
                shutil.rmtree(path)
        for damaged in sorted(self._damaged & self._committed()):
            count = len(list(self.directory.glob(f"{damaged}{DAMAGED}*")))
            aside = self._path(damaged, f"{DAMAGED}.{count + 1}" if count else DAMAGED)
            self._path(damaged).rename(aside)
        self._damaged.clear()
        target.mkdir()

    def _commit(self, step: int, target: Path, facts: str, write: Callable | None) -> None:
        """In the background: writes the arrays, seals the directory, renames it, and deletes old steps."""
        try:
            if write is not None:
                write()
            self._orbax.wait_until_finished()
            if not self._is_primary():
                return
            (target / FACTS).write_text(facts, encoding="utf-8")
            files.seal(target)
            replaced = self._set_aside(step) if self._path(step).exists() else None
            target.rename(self._path(step))
            files.sync(self.directory)
        except BaseException as error:
            self._fail(error, step, target)
        try:
            # Only now: deleting takes long, and a step is there all that time.
            if replaced is not None:
                shutil.rmtree(replaced)
            for old in self.steps()[: -self.keep]:
                if old != step and (self.keep_every is None or old % self.keep_every):
                    shutil.rmtree(self._set_aside(old))
        except OSError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    def _set_aside(self, step: int) -> Path:
        """Renames a step that is to be deleted: a process killed while deleting must not leave half a step."""
        return self._path(step).rename(self._path(step, f".old{TEMPORARY}"))

    def _fail(self, error: BaseException, step: int, target: Path) -> NoReturn:
        """Deletes what a failed save left and raises its error, as a UserError if the disk was the reason."""
        with contextlib.suppress(Exception):
            self._orbax.wait_until_finished()
        # TensorStore may still be writing other arrays there and doesn't say when it's done: that's why no two saves
        # share a name, and why the directory is deleted until it stays away.
        quiet, end = 0, time.monotonic() + 3
        while quiet < 3 and time.monotonic() < end:
            shutil.rmtree(target, ignore_errors=True)
            quiet = 0 if target.exists() or files.has_open_files(target) else quiet + 1
            time.sleep(0.05)
        fix = f"choose a {self._key} that can be written"
        if (cause := files.explain(error, fix)) is None:
            raise error
        good = self.latest()
        rest = "no step was saved before" if good is None else f"step {good} is intact"
        raise UserError(
            f"step {step} was not saved in {self.directory} ({rest}): {cause}"
        ) from error

    def _choose(self, step: int | None) -> int | None:
        """Returns the newest whole step, after a warning for each newer one that is damaged."""
        candidates = sorted(self._committed())  # of those found damaged, copies may be back
        if step is not None:
            if step not in candidates:
                raise UserError(
                    f"{self.directory} has no checkpoint of step {step}: choose among {candidates}"
                )
            candidates = [step]
        faults: dict[int, str] = {}
        for candidate in reversed(candidates):
            fault = self.verify(candidate)
            if fault is None:
                if step is None:
                    self._damaged = set(faults)
                return candidate
            if self._was_deleted(candidate):
                return self._choose(step)
            faults[candidate] = fault
            if candidate != candidates[0]:
                warning = "checkpoint %s is damaged: %s; trying the one before"
                logger.warning(warning, self._path(candidate), fault)
        if not faults:
            return None
        if step is None:
            self._damaged = set(faults)
        raise UserError(
            f"{'every' if step is None else 'the'} checkpoint in {self.directory} is damaged: "
            + "; ".join(f"step {number}: {fault}" for number, fault in faults.items())
            + "; nothing was deleted: put back a copy, or choose another run.dir to begin again"
        )

    def _was_deleted(self, step: int) -> bool:
        """Whether a step is gone because the run that saves here has newer ones."""
        return not self._path(step).exists()

    def _choose_together(self, step: int | None) -> int | None:
        """Returns process 0's choice on every process, unless each has its own directory."""
        if self.own or jax.process_count() == 1:
            return self._choose(step)
        from jax.experimental.multihost_utils import broadcast_one_to_all

        nothing, failed = -1, -2
        number = failed
        try:
            if jax.process_index() == 0:
                chosen = self._choose(step)
                number = nothing if chosen is None else chosen
        finally:  # after an error too: the others are waiting
            number = int(broadcast_one_to_all(np.int32(number)))
        if number == failed:
            raise UserError("no checkpoint to restore: see the error of process 0")
        return None if number == nothing else number
