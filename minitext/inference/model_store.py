"""The models that a server of artefacts has: found in folders, loaded and unloaded while requests run.

A folder named on the command line is an artefact, or holds some: DIR/NAME or DIR/NAME/VERSION, as in Triton's model
repositories. Names and versions are those of the manifests. Requests hold on to the version that they began with. An
unloaded version answers what it was asked, and then its weights and programs are freed.

Chapters: 27.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from minitext import files, hardware
from minitext.errors import UserError
from minitext.inference import artefact
from minitext.inference.batching import DEFAULT_SIZES, Batcher, BatchSizes, Call, Program
from minitext.inference.protocol import Refused
from minitext.terminal import show_bytes

log = logging.getLogger("minitext.server")

MANIFEST_LIMIT = 64 << 20  # bytes
MOST_FOLDERS = 10_000  # looked at in a repository
CALL_SHARE = 4  # a call may take this part of the device's memory


class Found(NamedTuple):
    """An artefact in a folder.

    Attributes:
      name: of the model.
      version: of the model.
      folder: where it is.
      seal: SHA-256 of its manifest, which names those of all other files.
      bytes: of its weights.
    """

    name: str
    version: str
    folder: Path
    seal: str
    bytes: int


@dataclass(eq=False)
class Model:
    """A loaded version of a model.

    Attributes:
      found: which.
      batchers: by function; each has its program.
    """

    found: Found
    batchers: dict[str, Batcher]

    @property
    def called(self) -> dict[str, Batcher]:
        """The functions by the names that clients use: MODEL.FUNCTION, or MODEL if it's the only one."""
        return {_called(self.found.name, n, self.batchers): b for n, b in self.batchers.items()}

    def close(self, drain_seconds: float) -> None:
        """Answers what was asked, and ends the threads."""
        for batcher in self.batchers.values():
            batcher.close(drain_seconds)


class Function(NamedTuple):
    """What a client may call, by its name in `Model.called`."""

    name: str
    model: Model
    batcher: Batcher


class Store:
    """The models of one server. All methods may be called from any thread.

    Args:
      places: folders that are artefacts or hold artefacts.
      sizes: how requests are joined.
      watched: called after each call of a program, with the function's name, the version, the requests and the rows.
      drain_seconds: how long an unloaded model may go on answering.
    """

    def __init__(
        self,
        places: Sequence[Path | str],
        sizes: BatchSizes = DEFAULT_SIZES,
        watched: Callable[[str, str, Sequence[Call], int], None] = lambda *_: None,
        drain_seconds: float = 30.0,
    ):
        self._places = [Path(files.local_path(place)) for place in places]
        self._sizes, self._watched, self._drain = sizes, watched, drain_seconds
        self._models: dict[str, dict[str, Model]] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()  # of the dictionaries
        self._changing = threading.Lock()  # held while a model is loaded or unloaded
        self.memory = hardware.memory_bytes(jax.local_devices()[0])

    # --- what is there

    def scan(self) -> dict[tuple[str, str], Found]:
        """Returns the artefacts that the folders hold now, by name and version.

        Raises:
          UserError: a folder holds none, a manifest can't be read, or two have the same name and version.
        """
        found: dict[tuple[str, str], Found] = {}
        for place in self._places:
            for folder in _folders(place):
                one = _look(folder)
                other = found.setdefault((one.name, one.version), one)
                if other.folder.resolve() != one.folder.resolve():
                    raise UserError(
                        f"{other.folder} and {one.folder} are both {one.name} version {one.version}: "
                        "export one of them with another name or version"
                    )
        return found

    def index(self) -> list[dict[str, str]]:
        """Returns every version that could be loaded, as the protocol's repository index has it."""
        try:
            there = set(self.scan())
        except UserError as error:
            log.warning("%s", error)
            there = set()
        with self._lock:
            ready = {(name, version) for name, its in self._models.items() for version in its}
            return [
                {
                    "name": name, "version": version,
                    "state": "READY" if (name, version) in ready else "UNAVAILABLE",
                    "reason": "" if (name, version) in ready else self._reasons.get((name, version), ""),
                }
                for name, version in sorted(there | ready, key=lambda pair: (pair[0], _order(pair[1])))
            ]  # fmt: skip

    def loaded(self) -> list[Model]:
        """Returns the versions that are loaded."""
        with self._lock:
            return [model for its in self._models.values() for model in its.values()]

    def versions(self, name: str) -> list[str]:
        """Returns the loaded versions of a function or a model, oldest first."""
        with self._lock:
            its = self._models.get(name) or self._models.get(name.rpartition(".")[0], {})
            return sorted(its, key=_order)

    def has(self, name: str, version: str | None) -> bool:
        """Returns whether a model or a function is loaded, in a version or in any."""
        for model in self.loaded():
            its = model.found.name
            named = name in (its, *(f"{its}.{function}" for function in model.batchers))
            if named and version in (None, model.found.version):
                return True
        return False

    def find(self, name: str, version: str | None) -> Function:
        """Returns a function; of a model with several versions the latest, unless another is named.

        Raises:
          Refused: there is none.
        """
        with self._lock:
            whole, _, part = name.rpartition(".")
            its, function = self._models.get(name), None
            if its is None:
                its, function = self._models.get(whole), part
            if not its:
                raise Refused(f"there is no model {files.shorten(name)} loaded here", 404)
            chosen = max(its, key=_order) if version is None else version
            if chosen not in its:
                known = ", ".join(sorted(its, key=_order))
                said = f"{name} has no version {files.shorten(chosen)} loaded: ask for {known}"
                raise Refused(said, 404)
            model = its[chosen]
        if function is None and len(model.batchers) == 1:
            return Function(name, model, next(iter(model.batchers.values())))
        if function in model.batchers:
            return Function(name, model, model.batchers[function])
        names = " or ".join(model.called)
        raise Refused(f"{files.shorten(name)} is not a function: ask for {names}", 404)

    # --- loading and unloading

    def load(self, name: str, version: str | None = None) -> None:
        """Loads a model's versions that are in the folders now, or one of them; what hasn't changed stays as it is.

        Raises:
          Refused: there is none, it is damaged, or memory doesn't hold it.
        """
        with self._changing:
            try:
                there = self.scan()
            except UserError as error:
                raise Refused(str(error)) from None
            asked = [
                one for one in there.values() if one.name == name and version in (None, one.version)
            ]
            if not asked:
                more = "" if version is None else f" version {files.shorten(version)}"
                raise Refused(f"there is no artefact of {files.shorten(name)}{more} here", 404)
            for one in sorted(asked, key=lambda one: _order(one.version)):
                self._load(one)

    def load_all(self) -> None:
        """Loads everything in the folders.

        Raises:
          UserError: something can't be loaded.
        """
        with self._changing:
            for one in self.scan().values():
                try:
                    self._load(one)
                except Refused as error:
                    raise UserError(str(error)) from None

    def _load(self, one: Found) -> None:
        with self._lock:
            before = self._models.get(one.name, {}).get(one.version)
        if before is not None and before.found.seal == one.seal:
            return
        try:
            model = self._make(one)
        except Refused as error:
            with self._lock:
                self._reasons[one.name, one.version] = str(error)
            raise
        with self._lock:
            self._models.setdefault(one.name, {})[one.version] = model
            self._reasons.pop((one.name, one.version), None)
        if before is not None:
            before.close(self._drain)

    def _make(self, one: Found) -> Model:
        taken = sum(model.found.bytes for model in self.loaded())
        if self.memory is not None and taken + one.bytes > self.memory:
            raise Refused(
                f"{one.name} version {one.version} has weights of {show_bytes(one.bytes)}, and the loaded models leave "
                f"{show_bytes(max(self.memory - taken, 0))}: unload one first"
            )
        try:
            manifest, functions = artefact.load(one.folder)
            most = None if self.memory is None else self.memory // CALL_SHARE
            programs = {
                name: Program(run, manifest["functions"][name], most)
                for name, run in functions.items()
            }
        except UserError as error:
            raise Refused(str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            said = files.shorten(f"{type(error).__name__}: {error}")
            raise Refused(f"{one.folder} can't be served ({said})") from error
        batchers = {}
        for name, program in programs.items():
            watched = partial(self._watched, _called(one.name, name, programs), one.version)
            batchers[name] = Batcher(program, self._sizes, watched)
        return Model(one, batchers)

    def unload(self, name: str, version: str | None = None) -> None:
        """Unloads a model's versions, or one; returns when their requests are answered and their memory is free.

        Raises:
          Refused: it isn't loaded.
        """
        with self._changing:
            with self._lock:
                its = self._models.get(name, {})
                leaving = [version] if version is not None else list(its)
                if not leaving or not set(leaving) <= set(its):
                    more = "" if version is None else f" version {files.shorten(version)}"
                    raise Refused(f"{files.shorten(name)}{more} isn't loaded", 404)
                models = [its.pop(one) for one in leaving]
                if not its:
                    del self._models[name]
                for model in models:
                    self._reasons[name, model.found.version] = "unloaded"
            for model in models:
                model.close(self._drain)

    def close(self, drain_seconds: float) -> None:
        """Answers what was asked and frees everything."""
        closing = [
            threading.Thread(target=model.close, args=(drain_seconds,)) for model in self.loaded()
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        with self._lock:
            self._models.clear()


def _called(model: str, function: str, functions: Sized) -> str:
    return model if len(functions) == 1 else f"{model}.{function}"


def is_artefact(folder: Path | str) -> bool:
    """Returns whether a folder is an artefact, by its manifest."""
    return (Path(folder) / artefact.MANIFEST).is_file()


def _folders(place: Path) -> list[Path]:
    """Returns the artefacts in a folder: itself, or DIR/NAME and DIR/NAME/VERSION."""
    if is_artefact(place):
        return [place]
    found, looked = [], 0
    try:
        for name in sorted(place.iterdir()):
            inside = [name]
            if name.is_dir() and not is_artefact(name):
                inside = sorted(name.iterdir())
            looked += 1 + len(inside)
            if looked > MOST_FOLDERS:
                raise UserError(
                    f"{place} has more than {MOST_FOLDERS:,} entries: name the artefacts"
                )
            found += [folder for folder in inside if folder.is_dir() and is_artefact(folder)]
    except OSError as error:
        said = error.strerror or str(error)
        raise UserError(f"{files.shorten(str(place))} cannot be read ({said})") from error
    if not found:
        raise UserError(
            f"{files.shorten(str(place))} is not an artefact and holds none: make one with minitext export "
            "--format stablehlo"
        )
    return found


def _look(folder: Path) -> Found:
    path = folder / artefact.MANIFEST
    said = files.read_json(path, MANIFEST_LIMIT)
    try:
        name, version, seal = said["name"], said["version"], said["sha256"]
        weights = folder / (folder / said["weights"]["file"]).name
        size = weights.stat().st_size
        words = all(isinstance(x, str) for x in (name, version, seal))
    except (LookupError, TypeError, OSError) as error:
        reason = "it has other keys" if not isinstance(error, OSError) else str(error.strerror)
        raise UserError(
            f"{path} is not an artefact's manifest ({reason}): make one with minitext export --format stablehlo"
        ) from None
    if not words or not all(re.fullmatch(r"[\w.-]{1,100}", x, re.ASCII) for x in (name, version)):
        raise UserError(
            f"{path}: the name {files.shorten(str(name))} or the version {files.shorten(str(version))} has other "
            "characters than letters, digits, dots, dashes and _, or more than 100: export it with another"
        )
    return Found(name, version, folder, seal, size)


def _order(version: str) -> list[tuple[int, int, str]]:
    """Returns a version's sort key, in which numbers count as numbers: 10 follows 9."""
    parts = re.findall(r"\d+|[^\d.]+", version)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]
