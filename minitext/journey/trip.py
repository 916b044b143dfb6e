"""What a journey leaves on disk: its settings, each stage's results, and the time spent on it.

runs/journey-d5/
  journey.json          what was asked for; another dial in the same folder is refused
  STAGE/stage.json      the results of a stage that is done: `figures`, the same each time, and `times`
  STAGE/...             what it made: runs, packed text, exports
  attempts/0001.json    an attempt at a stage: when it began; when the file was last touched, it was still alive
  report.html           made of the above, and report.json, its numbers
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.errors import UserError
from minitext.journey.dial import Recipe

SETTINGS, DONE, ATTEMPTS = "journey.json", "stage.json", "attempts"
LIMIT = 16 << 20  # bytes of a JSON file that is read
ALIVE_SECONDS = 0.5


class Result(NamedTuple):
    """What a stage found.

    Attributes:
      figures: everything in the report except times; the same for the same dial on the same machine.
      times: seconds by what took them.
    """

    figures: dict[str, Any]
    times: dict[str, Any]


class Attempt(NamedTuple):
    """One try at a stage.

    Attributes:
      stage: its name.
      began: seconds since 1970.
      seconds: until it ended, or was last alive.
      done: whether it ended the stage.
    """

    stage: str
    began: float
    seconds: float
    done: bool


@dataclass(frozen=True)
class Trip:
    """A journey's folder and what was asked for.

    Attributes:
      directory: the folder.
      recipe: of the model that the journey is about.
      study: of the smaller ones, ascending.
      settings: `key=value` of the command line, for the data and the mesh.
      quick: whether fine-tuning and reinforcement learning take only a few steps.
    """

    directory: Path
    recipe: Recipe
    study: tuple[Recipe, ...]
    settings: tuple[str, ...] = ()
    quick: bool = False

    def of(self, stage: str) -> Path:
        """Returns a stage's folder."""
        return self.directory / stage

    def result(self, stage: str) -> Result | None:
        """Returns what a stage found; None if it isn't done.

        Raises:
          UserError: for a file that isn't what was written.
        """
        path = self.of(stage) / DONE
        if not path.exists():
            return None
        found = files.read_json(path, LIMIT)
        if not isinstance(found, dict) or not {"figures", "times"} <= found.keys():
            raise UserError(f"{path} is not what was written: delete it, and the stage runs again")
        return Result(found["figures"], found["times"])

    def figures(self, stage: str) -> dict[str, Any]:
        """Returns the figures of a stage that another one needs.

        Raises:
          UserError: if it isn't done.
        """
        if (found := self.result(stage)) is None:
            raise UserError(f"stage {stage} of {self.directory} is not done: run it first")
        return found.figures

    def write(self, stage: str, result: Result) -> None:
        """Records that a stage is done, whole or not at all."""
        text = json.dumps({"figures": result.figures, "times": result.times}, indent=1)
        files.write(self.of(stage) / DONE, text + "\n")

    def asked(self) -> dict[str, Any]:
        """Returns what must be the same when the journey goes on."""
        return {
            "recipe": self.recipe.to_json(),
            "study": [each.to_json() for each in self.study],
            "settings": list(self.settings),
            "quick": self.quick,
        }

    def check(self) -> None:
        """Refuses a folder that holds another journey.

        Raises:
          UserError: if it does, or holds something else.
        """
        path = self.directory / SETTINGS
        if not path.exists():
            if self.directory.is_dir() and any(p.name != "lock" for p in self.directory.iterdir()):
                raise UserError(
                    f"{self.directory} has files in it and no {SETTINGS}: name an empty folder with --run"
                )
            return
        theirs, ours = files.read_json(path, LIMIT), json.loads(json.dumps(self.asked()))
        if theirs != ours:
            keys = [
                key for key in ours if not isinstance(theirs, dict) or theirs.get(key) != ours[key]
            ]
            said = theirs.get("recipe", {}).get("depth") if isinstance(theirs, dict) else None
            raise UserError(
                f"{self.directory} holds a journey of depth {said} with a different {' and '.join(keys)}: name another "
                "folder with --run, or give the arguments that it began with"
            )

    def begin(self) -> None:
        """Writes what was asked for, unless it is there."""
        if not (self.directory / SETTINGS).exists():
            files.write(self.directory / SETTINGS, json.dumps(self.asked(), indent=1) + "\n")

    @contextmanager
    def attempt(self, stage: str) -> Iterator[None]:
        """Records how long an attempt at a stage takes, even one that is killed, to half a second."""
        folder = self.directory / ATTEMPTS
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.glob('*.json'))) + 1:04}.json"
        began = time.time()
        files.write(path, json.dumps({"stage": stage, "began": began}))
        over = threading.Event()

        def live() -> None:
            while not over.wait(ALIVE_SECONDS):
                os.utime(path)

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        done = False
        try:
            yield
            done = True
        finally:
            over.set()
            thread.join()
            record = {"stage": stage, "began": began, "ended": time.time(), "done": done}
            files.write(path, json.dumps(record))

    def attempts(self) -> list[Attempt]:
        """Returns all attempts in the order in which they began."""
        found = []
        for path in sorted((self.directory / ATTEMPTS).glob("*.json")):
            said = files.read_json(path, LIMIT)
            ended = said.get("ended", path.stat().st_mtime)
            seconds = max(0.0, ended - said["began"])
            found.append(Attempt(said["stage"], said["began"], seconds, said.get("done", False)))
        return found


def thinned(values: Sequence[Any], most: int = 160) -> list[Any]:
    """Returns at most so many values, evenly spaced, the last one always among them."""
    if len(values) <= most:
        return list(values)
    step = len(values) / most
    return [values[min(len(values) - 1, round((i + 1) * step) - 1)] for i in range(most)]
