"""The grading engine on exercises of its own: hostile answers, hints, reports, notebooks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from minitext.book.grading import answering, answers, check, registry, runner, source
from minitext.book.grading.command import grade
from minitext.errors import UserError
from tests.conftest import audit_but

# Each section answers the same task: return twice the array.
PREAMBLE = '''"""Hostile answers."""

import os
import sys

import numpy as np

'''
ANSWERS = r'''
# EXERCISE 90.honest
def honest(x):
    return 2 * x

# EXERCISE 90.square
def square(x):
    y = x
    return np.multiply(y, y)

# EXERCISE 90.unlike
def unlike(x):
    return 3 * x + 1

# EXERCISE 90.odd
def odd(x):
    raise KeyError("double")

# EXERCISE 90.triple
def triple(x):
    return 3 * x

# EXERCISE 90.missing
def missing(x):
    return {}["twice"]

# EXERCISE 90.sign
def sign(x):
    return -2 * x

# EXERCISE 90.untouched
def untouched(x):
    """Twice the array."""
    # my thoughts
    raise NotImplementedError("90.untouched")

# EXERCISE 90.halfway
def halfway(x):
    y = 2 * x
    raise NotImplementedError("90.halfway")

# EXERCISE 90.loops
def loops(x):
    while True:
        try:
            pass
        except BaseException:
            pass

# EXERCISE 90.sleeps
def sleeps(x):
    import time
    time.sleep(600)

# EXERCISE 90.hog
def hog(x):
    keep = []
    while True:
        keep.append(np.ones(2_000_000))

# EXERCISE 90.prints
def prints(x):
    print("spam" * 2_000_000)
    return 2 * x

# EXERCISE 90.exits
def exits(x):
    sys.exit(0)

# EXERCISE 90.dies
def dies(x):
    os._exit(0)

# EXERCISE 90.aborts
def aborts(x):
    os.abort()

# EXERCISE 90.fills
def fills(x):
    with open("big", "wb") as file:
        file.truncate(2**31)

# EXERCISE 90.patches_trial
def patches_trial(x):
    import minitext.book.grading.trial as t
    t.Trial.close = lambda *a, **k: None

# EXERCISE 90.patches_code
def patches_code(x):
    import minitext.book.grading.trial as t
    t.Trial.close.__code__ = (lambda *a, **k: None).__code__

# EXERCISE 90.patches_numpy
def patches_numpy(x):
    np.abs = lambda x: np.zeros(())
    return x

# EXERCISE 90.patches_testing
def patches_testing(x):
    import numpy.testing
    numpy.testing.assert_allclose = print
    return 2 * x

# EXERCISE 90.patches_modules
def patches_modules(x):
    sys.modules["numpy"] = None
    return 2 * x

# EXERCISE 90.patches_builtins
def patches_builtins(x):
    import builtins
    builtins.max = min
    return 2 * x

# EXERCISE 90.network
def network(x):
    import socket
    socket.create_connection(("127.0.0.1", 9), 1)

# EXERCISE 90.process
def process(x):
    import subprocess
    subprocess.run(["true"])

# EXERCISE 90.kills
def kills(x):
    os.kill(os.getppid(), 9)

# EXERCISE 90.reads
def reads(x):
    return open(os.environ["TREE"] + "/solutions/ch90_hostile.py").read()

# EXERCISE 90.imports
def imports(x):
    sys.path.insert(0, os.environ["TREE"] + "/solutions")
    import ch90_hostile
    return ch90_hostile.imports(x)

# EXERCISE 90.links
def links(x):
    os.link(os.environ["TREE"] + "/solutions/ch90_hostile.py", "copy")
    return 2 * x

# EXERCISE 90.forges
def forges(x):
    for fd in range(3, 60):
        try:
            os.write(fd, b'{"kind": "result", "status": "passed"}\n')
        except OSError:
            pass
    os._exit(0)

# EXERCISE 90.peeks
def peeks(x):
    return sys._getframe(1).f_locals["want"]

# EXERCISE 90.climbs
def climbs(x):
    try:
        1 / 0
    except ZeroDivisionError as error:
        return error.__traceback__.tb_frame.f_back.f_locals["want"]

# EXERCISE 90.threads
def threads(x):
    import threading
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
    return 2 * x

# EXERCISE 90.forbidden
def forbidden(x):
    import math as m
    return m.fabs(2) * x

# EXERCISE 90.hidden
def hidden(x):
    return __import__("math").fabs(2) * x

# EXERCISE 90.fetched
def fetched(x):
    return fabs(2) * x
fabs = sys.modules["ma" + "th"].fabs

# EXERCISE 90.broken
def broken(x):
    return 2 * (x

# EXERCISE 90.stuck
def stuck(x):
    return 2 * x
while True:
    pass

# EXERCISE 90.raising
def raising(x):
    return 2 * x
raise RuntimeError("at import")

# EXERCISE 90.renamed
def named_otherwise(x):
    return 2 * x

# EXERCISE 90.helped
def helped(x):
    return helper(x)

# EXERCISE 90.nothing
def nothing(x):
    return None

# EXERCISE 90.properties
def properties(x):
    import minitext.book.grading.evaluate as e
    e.Attempt.passed = e.CheckResult.passed = property(lambda self: True, lambda self, value: None)
    return x

# EXERCISE 90.getattribute
def getattribute(x):
    import minitext.book.grading.trial as t
    t.Trial.__getattribute__ = lambda self, name: (lambda *a, **k: None)
    return x

# EXERCISE 90.generator
def generator(x):
    np.random.default_rng = lambda seed: type("Rng", (), {"normal": lambda self, size: np.zeros(size)})()
    return np.zeros_like(x)

# EXERCISE 90.walks
def walks(x):
    code = """
import sys, os, json
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_locals.items()):
        if name == "want":
            found = value
        if name == "send":
            value("result", status="passed", message="", checks=[], seconds=0.0)
            value("done")
            os._exit(0)
    frame = frame.f_back
"""
    exec(compile(code, "elsewhere.py", "exec"), {})
    return x

# EXERCISE 90.relative
def relative(x):
    folder = os.open(os.environ["TREE"], os.O_RDONLY)
    file = os.open("solutions/ch90_hostile.py", os.O_RDONLY, dir_fd=folder)
    os.read(file, 100)
    return 2 * x

# EXERCISE 90.rewrites
def rewrites(x):
    folder = os.open(os.environ["TREE"], os.O_RDONLY)
    file = os.open("checks/ch90_hostile.py", os.O_WRONLY | os.O_APPEND, dir_fd=folder)
    os.write(file, b"# mine")
    return 2 * x

# EXERCISE 90.notebooks
def notebooks(x):
    return open(os.path.dirname(os.environ["TREE"]) + "/notebooks/90_hostile.md").read()

# EXERCISE 90.detaches
def detaches(x):
    import ctypes
    ctypes.CDLL(None).system(b"setsid sleep 333 & (sleep 334 &)")
    return 2 * x

# EXERCISE 90.double_fork
def double_fork(x):
    import ctypes
    libc = ctypes.CDLL(None)
    if libc.fork() == 0:
        libc.setsid()
        if libc.fork() == 0:
            libc.sleep(333)
        libc._exit(0)
    return 2 * x

# EXERCISE 90.twins
def twins(x):
    import ctypes
    twin = ctypes.CDLL(None).fork() == 0
    return 2 * x if twin else x

# EXERCISE 90.answers_first
def answers_first(x):
    import msgpack, struct
    zeros = ["new", 1, ["array", "<f8", [3], bytes(24), True]]
    data = msgpack.packb(["return", [], zeros, None, []])
    os.write(3, struct.pack("<Q", len(data)) + data)
    return x

# EXERCISE 90.long_header
def long_header(x):
    os.write(3, b"\xff" * 7 + b"\x7f")
    return 2 * x

# EXERCISE 90.giant
def giant(x):
    return np.ones(2**28)

# EXERCISE 90.noise
def noise(x):
    import threading, time
    def write():
        while True:
            os.write(3, b"garbage")
    threading.Thread(target=write, daemon=True).start()
    time.sleep(0.2)
    return 2 * x

# EXERCISE 90.deaf
def deaf(x):
    os.close(3)
    while True:
        pass

# EXERCISE 90.floods
def floods(x):
    import threading
    def write():
        while True:
            os.write(1, b"spam" * 1000)
    threading.Thread(target=write, daemon=True).start()
    return 2 * x

# EXERCISE 90.reduces
def reduces(x):
    class Array:
        shape = (0,)
        def __reduce__(self):
            return os.system, ("touch " + os.environ["TREE"] + "/left",)
    return Array()

# EXERCISE 90.converts
def converts(x):
    class Array:
        shape, dtype, ndim = x.shape, x.dtype, 1
        def __array__(self, *args, **kwargs):
            return 2 * x
    return Array()

# EXERCISE 90.equals
def equals(x):
    class Array(np.ndarray):
        def __eq__(self, other):
            return True
        def __array_ufunc__(self, *args, **kwargs):
            return np.ones((), bool)
    return np.asarray(x).view(Array)

# EXERCISE 90.names
def names(x):
    from minitext.book.grading import wire
    wire.Codec.encode = lambda self, value: ["class", "os", "system"]
    return x

# EXERCISE 90.builds
def builds(x):
    from minitext.book.grading import wire
    made = ["data", "minitext.book.grading.evaluate", "CheckResult", [["passed", True]]]
    wire.Codec.encode = lambda self, value: made
    return x

# EXERCISE 90.nests
def nests(x):
    found = []
    for _ in range(100_000):
        found = [found]
    return found

# EXERCISE 90.circles
def circles(x):
    found = []
    found.append(found)
    return found

# EXERCISE 90.forever
def forever(x):
    return iter(int, 1)

# EXERCISE 90.kills_all
def kills_all(x):
    import ctypes
    libc = ctypes.CDLL(None)
    for pid in (os.getppid(), -1):
        libc.kill(pid, 9)
    return x

# EXERCISE 90.stops
def stops(x):
    import ctypes
    ctypes.CDLL(None).kill(os.getpid(), 19)
    while True:
        pass

# EXERCISE 90.traces
def traces(x):
    import ctypes
    libc = ctypes.CDLL(None)
    pid = os.getppid()
    attached = libc.ptrace(16, pid, None, None)
    open(f"/proc/{pid}/mem", "rb+").close()
    return x

# EXERCISE 90.memory
def memory(x):
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            open(f"/proc/{name}/mem", "rb+").close()
    return x

# EXERCISE 90.environment
def environment(x):
    parent = os.getppid()
    text = open(f"/proc/{parent}/environ").read()
    return x

# EXERCISE 90.descriptors
def descriptors(x):
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if int(fd) > 2 and int(pid) != os.getpid():
                    os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b'{"kind": "done"}\n')
    return x

# EXERCISE 90.shouts
def shouts(x):
    class Loud(Exception):
        def __str__(self):
            raise RuntimeError("no")
    raise Loud(object())

# EXERCISE 90.leaves
def leaves(x):
    places = [".", "/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~")]
    for place in places:
        try:
            open(place + "/left-by-an-answer", "w").close()
        except OSError:
            pass
    return 2 * x

# EXERCISE 90.changes
def changes(x):
    x *= 2
    return x

# EXERCISE 90.asks
def asks(x):
    import msgpack, struct
    data = msgpack.packb(["ask", 0, "getattr", [], [["__globals__"], []], [], None])
    os.write(3, struct.pack("<Q", len(data)) + data)
    return x

# EXERCISE 90.at_exit
def at_exit(x):
    import atexit
    atexit.register(lambda: open("left-by-an-answer", "w").close())
    return 2 * x

# EXERCISE 90.finalizer
class Forever:
    def __del__(self):
        while True:
            pass

def finalizer(x):
    sys.forever = Forever()
    return 2 * x

# EXERCISE 90.overflows
def overflows(x):
    import ctypes
    return ctypes.string_at(0)

# EXERCISE 90.raises_limits
def raises_limits(x):
    import resource
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        try:
            resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (ValueError, OSError):
            pass
    with open("big", "wb") as file:
        file.truncate(2**31)

# EXERCISE 90.ignores
def ignores(x):
    import signal
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGPROF):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass

# EXERCISE 90.closes
def closes(x):
    os.close(0), os.close(1), os.close(2)
    return 2 * x

# EXERCISE 90.patches_import
def patches_import(x):
    import builtins
    builtins.__import__ = lambda *a, **k: np
    return x

# EXERCISE 90.patches_msgpack
def patches_msgpack(x):
    import msgpack
    msgpack.packb = lambda *a, **k: b""
    msgpack.unpackb = lambda *a, **k: None
    return x

# EXERCISE 90.masked
def masked(x):
    return np.ma.array(3 * x, mask=True)

# EXERCISE 90.infinite
def infinite(x):
    return np.full(x.shape, np.inf)

# EXERCISE 90.not_a_number
def not_a_number(x):
    return np.full(x.shape, np.nan)

# EXERCISE 90.broadcasts
def broadcasts(x):
    return np.broadcast_to(0.0, (1, *x.shape))

# EXERCISE 90.subclass
class Always(np.ndarray):
    def __array_finalize__(self, other):
        pass
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return np.zeros(()) if ufunc in (np.subtract, np.abs) else True
    def astype(self, *args, **kwargs):
        return self
    def __eq__(self, other):
        return True

def subclass(x):
    return x.view(Always)

# EXERCISE 90.coroutine
async def coroutine(x):
    return 2 * x

# EXERCISE 90.huge_number
def huge_number(x):
    return 10**200_000

# EXERCISE 90.buffer
def buffer(x):
    return memoryview(2 * x)

# EXERCISE 90.fake_shape
class Shaped:
    def __init__(self, x):
        self.shape, self.dtype, self.ndim, self.size = x.shape, x.dtype, x.ndim, x.size
        self.value = x
    def __array__(self, dtype=None, copy=None):
        import inspect
        return inspect.currentframe().f_back.f_locals["want"]

def fake_shape(x):
    return Shaped(x)

# EXERCISE 90.own_file
def own_file(x):
    with open(__file__, "w") as file:
        file.write("def own_file(x):\n    return 2 * x\n")
    return x

# EXERCISE 90.late_thread
def late_thread(x):
    import threading, time
    y = np.zeros_like(x)
    def change():
        while True:
            y[...] = 2 * x
    threading.Thread(target=change, daemon=False).start()
    return np.array(3 * x)

# EXERCISE 90.forks_late
def forks_late(x):
    try:
        if os.fork() == 0:
            while True:
                os.write(3, b"\x00" * 4096)
    except OSError:
        pass
    return x

# EXERCISE 90.scratch
def helper(x):
    return two() * x

def two():
    return 2
'''
NAMES = [name[3:] for name in source.sections(ANSWERS) if name != "90.scratch"]

CHECKS = """
import numpy as np

from minitext.book.grading import Exercise

NAMES = {names!r}


def make(name):
    exercise = Exercise(
        "90." + name, title="Twice", function=name, minutes=10, points=4, statement="Double it.",
        hints=("first", "second", "third"), memory_gib=0.5,
        seconds=1.0 if name in ("loops", "stuck", "sleeps", "stops", "finalizer", "ignores") else 60.0,
        forbid=("math",) if name in ("forbidden", "hidden", "fetched") else (),
    )

    @exercise.check("zeros")
    def _(fn, t):
        t.close(fn(np.zeros(3)), np.zeros(3))

    @exercise.check("random numbers")
    def _(fn, t):
        x = t.rng.normal(size=5)
        want = 2 * x
        t.close(fn(x), want, why="twice the array")

    @exercise.check("an empty array")
    def _(fn, t):
        t.equal(fn(np.zeros(0)).shape, (0,))

    @exercise.mutant("You square.")
    def square(x):
        return x**2

    @exercise.mutant("Mind the sign.")
    def negative(x):
        return -2.0 * x

    @exercise.mutant("It is no dictionary.")
    def lookup(x):
        raise KeyError("double")

    return exercise


globals().update({{name: make(name) for name in NAMES}})
"""


def solved(name: str) -> str:
    """The section of the solutions file for one of the exercises."""
    return (
        f'# EXERCISE 90.{name}\ndef {name}(x):\n    """Twice the array."""\n'
        "    # BEGIN SOLUTION\n    return 2 * x\n    # END SOLUTION\n\n\n"
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """An exercises folder with one hostile answer per exercise."""
    root = tmp_path_factory.mktemp("repository") / "exercises"
    for folder in ("checks", "solutions"):
        (root / folder).mkdir(parents=True)
    (root / "checks" / "ch90_hostile.py").write_text(CHECKS.format(names=NAMES))
    (root / "solutions" / "ch90_hostile.py").write_text(PREAMBLE + "".join(map(solved, NAMES)))
    (root / "ch90_hostile.py").write_text(PREAMBLE + ANSWERS)
    (root.parent / "notebooks").mkdir()
    (root.parent / "notebooks" / "90_hostile.md").write_text("a solution")
    return root


@pytest.fixture(scope="module")
def verdicts(tree, request):
    """Each answer that a chosen test asks for, graded once, two processes at a time; they leave nothing behind."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREE", str(tree))
        exercises = registry.load_exercises(tree)
        found = answers.from_folder(tree, tree, exercises.values())
        grading = runner.Grading(tree, seed=7, learner=1, jobs=2)
        tasks = [(exercises[id], found[id]) for id in exercises if id[3:] in {"honest", *asked}]
        results = runner.grade_many(grading, tasks, lambda done, total: None)
    check_that_nothing_is_left(tree)
    return {result.exercise.id[3:]: result for result in results}


def check_that_nothing_is_left(tree):
    running = [p.info for p in psutil.process_iter(["cmdline", "ppid"])]
    words = [info["cmdline"] or [] for info in running]
    assert not [w for w in words if w[:1] == ["sleep"] and w[1:] in (["333"], ["334"])]
    # Other tests may be grading meanwhile: a process left behind by this one is its child or an orphan.
    ours = [info["cmdline"] or [] for info in running if info["ppid"] in (os.getpid(), 1)]
    assert not any("minitext.book.grading.worker" in w for w in ours)
    for place in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~")):
        assert not os.path.exists(f"{place}/left-by-an-answer")
    files = {path.name: path.read_text() for path in tree.rglob("*.py")}
    assert set(files) == {"ch90_hostile.py"} and "# mine" not in "".join(files.values())
    assert (tree / "checks" / "ch90_hostile.py").read_text() == CHECKS.format(names=NAMES)


# Of several answers that try the same, `make test` grades one.
LIKE_OTHERS = {
    "patches_testing", "sleeps", "dies", "fills", "patches_trial", "patches_modules", "kills", "imports", "peeks",
    "hidden", "getattribute", "generator", "giant", "noise", "deaf", "converts", "names", "nests", "forever", "traces",
    "environment", "finalizer", "overflows", "ignores", "patches_import", "infinite", "broadcasts", "subclass",
    "coroutine", "buffer", "fake_shape", "own_file", "forks_late", "properties", "patches_builtins", "double_fork",
    "answers_first", "patches_msgpack", "relative", "aborts", "threads",
}  # fmt: skip


def graded(*cases):
    """Names of answers, or such names with what is said of them, as parameters."""
    names = [case if isinstance(case, str) else case[0] for case in cases]
    marks = [[pytest.mark.audit] if name in LIKE_OTHERS else [] for name in names]
    return [
        pytest.param(*([case] if isinstance(case, str) else case), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


# They change nothing but their own process.
HARMLESS = ["prints", "threads", "floods", "patches_testing", "patches_builtins", "detaches", "double_fork",
            "leaves", "at_exit"]  # fmt: skip


@pytest.mark.slow  # with what grades them all
@pytest.mark.parametrize("name", graded("honest", "helped", *HARMLESS))
def test_right_answers_pass_whatever_else_they_do(verdicts, name):
    result = verdicts[name]
    assert (result.status, result.points) == ("passed", 4), result.explanation()
    assert len(result.output) <= 2000


WITHOUT = {
    "namespaces": "confine._unshare = lambda network: False",
    "Landlock": "confine.restrict_files = lambda readable, writable: None",
}


BOTH = ["namespaces", "Landlock"]


@pytest.mark.parametrize("missing", audit_but([BOTH], [*([one] for one in BOTH), BOTH]))
def test_verdicts_do_not_hang_on_what_the_system_offers(tree, monkeypatch, missing):
    lines = [WITHOUT[what] for what in missing]
    code = "; ".join(["from minitext.book.grading import confine, worker", *lines, "worker.main()"])
    start = subprocess.Popen

    def without(command, **settings):
        if command[2:4] == ["-m", "minitext.book.grading.worker"]:
            command = [*command[:2], "-c", code, *command[4:]]
        return start(command, **settings)

    monkeypatch.setattr("minitext.book.grading.process.subprocess.Popen", without)
    monkeypatch.setenv("TREE", str(tree))
    names = ["honest", "double_fork", "forges", "properties", "network", "descriptors"]
    exercises = {f"90.{name}": registry.load_exercises(tree)[f"90.{name}"] for name in names}
    found = answers.from_folder(tree, tree, exercises.values())
    tasks = [(exercises[id], found[id]) for id in exercises]
    grading = runner.Grading(tree, seed=7, learner=1, jobs=2)
    results = runner.grade_many(grading, tasks, lambda done, total: None)
    passed = [result.exercise.id[3:] for result in results if result.status == "passed"]
    assert passed == ["honest", "double_fork"], {r.exercise.id: r.explanation() for r in results}
    running = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [w for w in running if w[:1] == ["sleep"] and w[1:] in (["333"], ["334"])]


@pytest.mark.parametrize("name", ["untouched", "halfway"])
def test_a_stub_is_not_attempted(verdicts, name):
    assert verdicts[name].status == "not attempted"


@pytest.mark.parametrize(
    ("name", "says"),
    graded(
        ("loops", "took longer than 1 s in the check 'zeros'"),
        ("sleeps", "took longer than 1 s in the check 'zeros'"),
        ("hog", "more than 0.5 GiB of memory"),
        ("exits", "called sys.exit(0)"),
        ("dies", "ended with exit code 0"),
        ("aborts", "killed by SIGABRT"),
        ("patches_trial", "got None, want an array"),
        ("patches_code", "got None, want an array"),
        ("patches_numpy", "want "),
        ("patches_modules", ""),
        ("network", "refused while grading: the network"),
        ("process", "refused while grading: starting or signalling a process"),
        ("kills", "refused while grading: starting or signalling a process"),
        ("reads", "refused while grading: opening the solutions"),
        ("imports", "refused while grading: opening the solutions"),
        ("links", "refused while grading: opening the solutions"),
        ("fills", "OSError: [Errno 27]"),
        ("forges", "ended with exit code 0"),
        ("peeks", "KeyError: 'want'"),
        ("climbs", "KeyError: 'want'"),
        ("forbidden", "must be solved without math"),
        ("hidden", "must be solved without math"),
        ("fetched", "must be solved without math"),
        ("broken", "not Python: '(' was never closed (line"),
        ("stuck", "took longer than 1 s"),
        ("raising", "RuntimeError: at import (line"),
        ("renamed", "no function 'renamed'"),
        ("nothing", "got None, want an array"),
        ("properties", "want "),
        ("getattribute", "want "),
        ("generator", "want "),
        ("walks", "Bad file descriptor"),
        ("relative", "Permission denied"),
        ("rewrites", "Permission denied"),
        ("notebooks", "refused while grading: opening the solutions"),
        ("twins", ""),
        ("answers_first", ""),
        ("long_header", "GiB"),
        ("giant", "more than 0.5 GiB of memory"),
        ("noise", ""),
        ("deaf", "closed its connection"),
        ("reduces", "want an array"),
        ("converts", "want an array"),
        ("equals", "want "),
        ("names", "a message names os.system"),
        ("builds", "a message names minitext.book"),
        ("nests", ""),
        ("circles", ""),
        ("forever", "want an array"),
        ("kills_all", ""),
        ("stops", "took longer than 1 s"),
        ("traces", ""),
        ("memory", ""),
        ("environment", ""),
        ("descriptors", ""),
        ("shouts", "Loud"),
        ("changes", "your answer changes its argument `x`: work on a copy"),
        ("asks", ""),
        ("finalizer", "took longer than 1 s"),
        ("overflows", "killed by SIGSEGV"),
        ("raises_limits", "OSError: [Errno 27]"),
        ("ignores", "took longer than 1 s"),
        ("closes", "Bad file descriptor"),
        ("patches_import", "twice the array"),
        ("patches_msgpack", "can't be read"),
        ("masked", "twice the array"),
        ("infinite", "got inf, want 0"),
        ("not_a_number", "got nan, want 0"),
        ("broadcasts", "got shape (1, 3), want (3,)"),
        ("subclass", "want "),
        ("coroutine", "want an array"),
        ("huge_number", ""),
        ("buffer", "want an array"),
        ("fake_shape", "want an array"),
        ("own_file", ""),
        ("late_thread", "want "),
        ("forks_late", ""),
    ),
)
def test_hostile_answers_cost_only_themselves(verdicts, name, says):
    result = verdicts[name]
    assert result.status == "failed"
    assert says in result.explanation()
    assert result.points == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("square", "You square."),  # computed in another way than the mutant's
        ("sign", "Mind the sign."),
        ("odd", "It is no dictionary."),
        (
            "missing",
            "It is no dictionary.",
        ),  # the same exception in the same checks, of another key
        ("unlike", "first"),
        ("triple", "first"),  # fails the check that two mutants fail, with another value
        ("reads", "first"),  # fails the checks that a mutant fails, but in another way
        ("loops", "first"),
    ],
)
def test_the_mutant_with_the_same_mistake_gives_the_hint(verdicts, name, hint):
    assert verdicts[name].hint == hint


def test_solutions_stubs_and_mutants_are_as_they_should(tree):
    exercises = [registry.load_exercises(tree)[f"90.{name}"] for name in ("honest", "odd")]
    grading = runner.Grading(tree, seed=3, learner=1)
    rows = runner.try_out(
        grading, exercises, ("solution", "stub", "mutant"), lambda done, total: None
    )
    assert len(rows) == 2 * 5
    assert all(row[3] for row in rows), rows


def try_out_twice(root, changed, solution):
    """Tries out the solution and the mutants of an exercise some of whose lines are changed."""
    checks = CHECKS.format(names=["twice"])
    for before, after in changed.items():
        assert before in checks
        checks = checks.replace(before, after)
    for folder, text in (("checks", checks), ("solutions", PREAMBLE + solution)):
        (root / folder).mkdir()
        (root / folder / "ch90_hostile.py").write_text(text)
    exercises = registry.load_exercises(root).values()
    grading = runner.Grading(root, seed=3, learner=1)
    return runner.try_out(grading, exercises, ("solution", "mutant"), lambda done, total: None)


def test_try_out_finds_faults(tmp_path):
    changed = {"return -2.0 * x": "return 2.0 * x", 'raise KeyError("double")': "return x * x"}
    wrong = solved("twice").replace("return 2 * x", "return 4 * x")
    rows = try_out_twice(tmp_path, changed, wrong)
    faults = {row[2]: row[4] for row in rows if not row[3]}
    assert set(faults) == {"twice", "negative", "lookup"}
    assert faults["negative"] == "passes every check"
    assert "not its own but of square" in faults["lookup"]
    assert "twice the array" in faults["twice"]


def test_mutants_of_one_mistake_may_share_a_hint(tmp_path):
    changed = {'raise KeyError("double")': "return x * x", "It is no dictionary.": "You square."}
    rows = try_out_twice(tmp_path, changed, solved("twice"))
    assert len(rows) == 4 and all(row[3] for row in rows), rows


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def run(tree, monkeypatch, tmp_path):
    """Runs `minitext grade ...` on the hostile tree from an empty folder."""
    monkeypatch.setenv("MINITEXT_EXERCISES", str(tree))
    monkeypatch.setenv("TREE", str(tree))
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command("grade")(grade)
    app.command("other")(lambda: None)
    return lambda *words: CliRunner().invoke(app, ["grade", *words])


def test_exit_codes(run):
    assert run("90.honest").exit_code == 0
    assert run("90.untouched").exit_code == 1
    assert run("90.honest", "90.sign").exit_code == 1
    unknown = run("90.onest")
    assert unknown.exit_code == 2
    assert (
        unknown.stderr.strip() == "error: no exercise called '90.onest' (did you mean 90.honest?)"
    )
    assert run("91").exit_code == 2
    assert run("honest").stderr.strip().endswith("did you mean 90.honest?)")
    assert run("90.honest", "--answers", "/nowhere").exit_code == 2
    assert run("90.honest", "--json", "/nowhere/report.json").exit_code == 2


def test_the_table_names_the_first_failing_check_and_one_hint(run):
    said = run("90.honest", "90.sign").output
    assert "4/8" in said
    assert "first failing check: random numbers" in said and "  at [" in said
    assert "twice the array" in said
    assert said.count("hint:") == 1
    assert "Mind the sign." in said


def test_reports(run, tmp_path):
    run("90.honest", "90.sign", "90.untouched", "--json", "a.json", "--gradescope", "g.json",
        "--seed", "5", "--learner", "ada")  # fmt: skip
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["points"], report["max_points"], report["passed"]) == (4, 12, False)
    assert (report["seed"], report["learner"]) == (5, "ada")
    assert [e["status"] for e in report["exercises"]] == ["passed", "failed", "not attempted"]
    failed = next(e for e in report["exercises"] if e["status"] == "failed")
    assert failed["first_failing"]["check"] == "random numbers"
    assert failed["hint"] == "Mind the sign."
    assert [c["passed"] for c in failed["checks"]] == [True, False, True]

    scores = json.loads((tmp_path / "g.json").read_text())
    assert scores["score"] == sum(test["score"] for test in scores["tests"]) == 4.0
    assert isinstance(scores["execution_time"], int)
    for test in scores["tests"]:
        assert test["status"] in ("passed", "failed")
        assert 0 <= test["score"] <= test["max_score"]
        assert isinstance(test["name"], str) and isinstance(test["output"], str)
        assert test["visibility"] in ("hidden", "after_due_date", "after_published", "visible")
        assert test["output_format"] in ("text", "html", "simple_format", "md", "ansi")


def test_json_on_standard_output_is_alone_there(run):
    assert json.loads(run("90.honest", "--json", "-").stdout)["passed"] is True


def test_the_same_seed_gives_the_same_numbers(run):
    said = [run("90.sign", "--seed", seed).output for seed in ("4", "4", "5")]
    values = [text.split("want ")[1].split(" ")[0] for text in said]
    assert values[0] == values[1] != values[2]


def test_start_copies_and_never_overwrites(run, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PACKAGE", Path("/nowhere"))
    assert run("--start", "mine").exit_code == 0
    mine = tmp_path / "mine" / "ch90_hostile.py"
    mine.write_text("mine = True\n")
    again = run("--start", "mine")
    assert "left as they are" in again.output
    assert mine.read_text() == "mine = True\n"


def test_without_answers_one_line_says_how_to_get_them(tree, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="minitext grade --start"):
        answers.answers_folder(registry.PACKAGE / "_exercises", None)


def test_an_answer_that_is_not_utf8_fails_in_one_line(tree, tmp_path):
    (tmp_path / "ch90_hostile.py").write_bytes(b"\xff\xfe x = 1")
    exercise = registry.load_exercises(tree)["90.honest"]
    answer = answers.from_folder(tmp_path, tree, [exercise])["90.honest"]
    result = runner.grade_one(runner.Grading(tree, 1, 1), exercise, answer, threading.Event())
    assert result.status == "failed"
    assert "cannot read" in result.message and "\n" not in result.message


# ------------------------------------------------------------------------------ notebooks


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_an_answer_of_any_editor_is_read(tree, tmp_path, start):
    code = f"{start}import math\n\n# EXERCISE 90.honest\ndef honest(x):\n    return math.prod((2, x))\n"
    (tmp_path / "ch90_hostile.py").write_text(code, encoding="utf-8")
    exercise = registry.load_exercises(tree)["90.honest"]
    answer = answers.from_folder(tmp_path, tree, [exercise])["90.honest"]
    fn = answering.load(list(answer.pieces), exercise, answer.filename, registered=False)
    assert fn(3) == 6


def notebook(path: Path, *cells: tuple[str, str]) -> Path:
    """Writes a notebook of code cells (exercise id or "", source)."""
    made = [
        {"cell_type": "code", "metadata": {"exercise": id} if id else {}, "source": [code]}
        for id, code in cells
    ]
    path.write_text(json.dumps({"cells": made, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_notebook_is_graded_by_its_cells(run, tmp_path):
    path = notebook(
        tmp_path / "90_hostile.ipynb",
        ("", "try:\n    import numpy\nexcept ModuleNotFoundError:\n    %pip install numpy\n"),
        ("", "while True:  # training, which no answer needs\n    pass"),
        ("", "def twice(x):\n    return 2 * x"),
        ("", "%%time\nfor i in:"),
        (
            "90.honest",
            "def honest(x):\n    zero = (\n        4\n        % 2\n    )\n    return twice(x) + zero",
        ),
        ("90.sign", source.stub(solved("sign"))),
        ("", "def sign(x):\n    return -2 * x"),
        ("90.untouched", PREAMBLE + source.stub(solved("untouched"))),
        ("", 'check("90.untouched", untouched)'),
    )
    result = run("--notebook", str(path), "--json", "out.json")
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    statuses = {e["id"]: e["status"] for e in report["exercises"]}
    assert statuses == {
        "90.honest": "passed", "90.sign": "failed", "90.untouched": "not attempted"
    }  # fmt: skip
    assert run("90.honest", "--notebook", str(path)).exit_code == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": [1]}', '{"cells": [{}]}', "\xff", "[" * 100_000]
)
def test_what_is_no_notebook_is_one_line(run, tmp_path, text):
    (tmp_path / "bad.ipynb").write_text(text, encoding="latin-1")
    result = run("--notebook", "bad.ipynb")
    assert result.exit_code == 2
    assert len(result.stderr.strip().split("\n")) == 1


def test_check_prints_one_verdict_and_never_raises(tree, monkeypatch, capsys):
    monkeypatch.setenv("MINITEXT_EXERCISES", str(tree))

    def said(id, *fn):
        check(id, *fn)
        return capsys.readouterr().out

    def stub(x):
        raise NotImplementedError("90.honest")

    assert "passed. All 3 checks pass, 4 points" in said("90.honest", lambda x: 2 * x)
    assert "not attempted yet" in said("90.honest", stub)
    wrong = said("90.honest", lambda x: -2 * x)
    assert "2 of 3 checks pass" in wrong and "Hint: Mind the sign." in wrong
    assert "sys.exit" in said("90.honest", lambda x: sys.exit(1))
    assert "did you mean 90.honest" in said("90.hones", stub)
    assert "not an exercise's id" in said(None, stub)
    assert "pass your function" in said("90.honest")
    assert "pass your function" in said("90.honest", 3)

    def interrupted(x):
        raise KeyboardInterrupt

    assert "interrupted" in said("90.honest", interrupted)


DEVICES = """
import jax

from minitext.book.grading import Exercise

EIGHT = Exercise(
    "91.eight", title="Eight", function="eight", minutes=10, points=1, statement="Count.",
    hints=("a", "b", "c"), devices=12,
)


@EIGHT.check("twelve devices")
def _(fn, t):
    t.equal(fn(), 12)
"""


def test_check_starts_a_process_when_the_kernel_has_too_few_devices(tmp_path, monkeypatch, capsys):
    for folder in ("checks", "solutions"):
        (tmp_path / folder).mkdir()
    (tmp_path / "checks" / "ch91_devices.py").write_text(DEVICES)
    (tmp_path / "solutions" / "ch91_devices.py").write_text("# EXERCISE 91.eight\n")
    (tmp_path / "cell.py").write_text("import jax\n\ndef eight():\n    return jax.device_count()\n")
    monkeypatch.setenv("MINITEXT_EXERCISES", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    import cell  # pyright: ignore[reportMissingImports]

    check("91.eight", cell.eight)
    assert "passed" in capsys.readouterr().out


def test_an_interrupted_grading_leaves_no_process(tree, tmp_path):
    code = "import typer; from minitext.book.grading.command import grade; typer.run(grade)"
    env = os.environ | {"MINITEXT_EXERCISES": str(tree), "PYTHONPATH": str(registry.PACKAGE.parent)}
    null = subprocess.DEVNULL
    command = [sys.executable, "-c", code, "90.sleeps", "90.loops", "--jobs", "2"]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=null, stderr=null) as process:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 120
        while len(workers := family.children()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(120) != 0
    assert not any(worker.is_running() for worker in workers)
