"""More answers that try to win without solving, or to leave something behind: `make audit` grades them."""

import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from minitext.book.grading import answers, registry, runner, source
from tests.book.test_grading import CHECKS, PREAMBLE, solved

ANSWERS = r"""
# EXERCISE 90.honest
def honest(x):
    return 2 * x

# EXERCISE 90.settrace
def settrace(x):
    def trace(frame, event, arg):
        frame.f_locals["want"] = frame.f_locals.get("x")
        return trace
    sys.settrace(trace)
    sys.setprofile(trace)
    frame = sys._getframe()
    while frame:
        frame.f_trace = trace
        frame = frame.f_back
    return x

# EXERCISE 90.monitoring
def monitoring(x):
    sys.monitoring.use_tool_id(3, "mine")
    def leave(code, offset, value):
        raise SystemExit(0)
    sys.monitoring.register_callback(3, sys.monitoring.events.PY_RETURN, leave)
    sys.monitoring.set_events(3, sys.monitoring.events.PY_RETURN)
    return x

# EXERCISE 90.collects
def collects(x):
    import gc
    gc.callbacks.append(lambda phase, info: os.write(3, b"garbage"))
    for found in gc.get_objects():
        if isinstance(found, dict) and "want" in found:
            return found["want"]
    gc.collect()
    return x

# EXERCISE 90.jax_array
def jax_array(x):
    class Array:
        shape, dtype, ndim, size = x.shape, x.dtype, x.ndim, x.size
        def __jax_array__(self):
            return 2 * x
    return Array()

# EXERCISE 90.lists
def lists(x):
    class Anything(list):
        def __eq__(self, other):
            return True
        def __len__(self):
            return len(x)
        def __iter__(self):
            return iter(2 * x)
    return Anything(x)

# EXERCISE 90.numbers
def numbers(x):
    class Any(float):
        shape, dtype, ndim = x.shape, x.dtype, 1
        def __sub__(self, other):
            return 0.0
        __rsub__ = __sub__
        def __eq__(self, other):
            return True
        __hash__ = float.__hash__
    return Any(3)

# EXERCISE 90.texts
def texts(x):
    class Text(str):
        shape, dtype, ndim = x.shape, x.dtype, 1
        def __eq__(self, other):
            return True
        __hash__ = str.__hash__
    return Text("passed")

# EXERCISE 90.escapes
def escapes(x):
    raise ValueError("\x1b[2J\r90.escapes passed 4 of 4\x07\u202e\n[bold]passed[/bold]")

# EXERCISE 90.audits
def audits(x):
    def hook(event, args):
        if event != "exec":
            raise SystemExit(0)
    sys.addaudithook(hook)
    return x

# EXERCISE 90.hooks
def hooks(x):
    import threading
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
    sys.displayhook = lambda *a: os._exit(0)
    raise ValueError("mine")

# EXERCISE 90.alarm
def alarm(x):
    import signal, time
    signal.signal(signal.SIGALRM, lambda *a: os.write(3, b"\x00" * 8))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    time.sleep(0.05)
    return x

# EXERCISE 90.objects
def objects(x):
    class Equal:
        def __eq__(self, other):
            return True
        def __sub__(self, other):
            return 0.0
        __rsub__ = __sub__
        def __float__(self):
            return 2.0
    return np.array([Equal() for _ in x], dtype=object)

# EXERCISE 90.strided
def strided(x):
    return np.lib.stride_tricks.as_strided(2 * x, shape=(10**12,), strides=(0,))

# EXERCISE 90.reshapes
def reshapes(x):
    y = 2 * x
    x.shape = (x.size, 1)
    return y

# EXERCISE 90.decodes
def decodes(x):
    np.frombuffer = lambda *a, **k: np.zeros(5)
    np.array_equal = np.allclose = lambda *a, **k: True
    return x

# EXERCISE 90.rights
def rights(x):
    import array, socket
    end = socket.socket(fileno=3)
    end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    return x

# EXERCISE 90.pidfd
def pidfd(x):
    import signal
    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL)
    return x

# EXERCISE 90.group
def group(x):
    import ctypes
    ctypes.CDLL(None).killpg(0, 9)
    return x

# EXERCISE 90.terminal
def terminal(x):
    import fcntl, termios
    for fd in (0, 1, 2, os.open("/dev/tty", os.O_RDWR)):
        fcntl.ioctl(fd, termios.TIOCSTI, b"\n")
    return x

# EXERCISE 90.own_memory
def own_memory(x):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        wanted = (2 * x).tobytes()
        for line in maps:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and last - first < 2**22:
                memory.seek(first)
                if wanted in memory.read(last - first):
                    return x
    return x

# EXERCISE 90.raw_threads
def raw_threads(x):
    import _thread
    for _ in range(20):
        _thread.start_new_thread(lambda: [None for _ in iter(int, 1)], ())
    return 2 * x

# EXERCISE 90.shared_memory
def shared_memory(x):
    import ctypes
    libc = ctypes.CDLL(None)
    libc.shmget(0x6d74, 4096, 0o1666)
    libc.semget(0x6d74, 1, 0o1666)
    try:
        os.close(os.open("/dev/shm/left-by-an-answer", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
    return 2 * x

# EXERCISE 90.home
def home(x):
    places = [os.path.expanduser("~"), os.environ.get("HOME", "/"), os.path.dirname(np.__file__),
              os.path.dirname(sys.modules["minitext"].__file__), sys.prefix, os.environ["TREE"]]
    for place in places:
        for name in ("left-by-an-answer", "left-by-an-answer.pth"):
            try:
                open(f"{place}/{name}", "w").close()
            except OSError:
                pass
    return 2 * x

# EXERCISE 90.outlives
def outlives(x):
    import ctypes, signal
    libc = ctypes.CDLL(None)
    if libc.fork() == 0:
        libc.prctl(1, 0, 0, 0, 0)
        libc.setsid()
        for number in (1, 2, 3, 13, 15):
            libc.signal(number, 1)
        for fd in range(100):
            libc.close(fd)
        libc.execlp(b"sleep", b"sleep", b"335", None)
    return 2 * x
"""
NAMES = [name[3:] for name in source.sections(ANSWERS)]
# They are right, and try to leave a process, a thread, a file or shared memory behind.
RIGHT = ["honest", "raw_threads", "shared_memory", "home", "outlives"]


def shared() -> list[str]:
    """The shared memory and semaphores of the system, of which those above have key 0x6d74, 28020."""
    tables = [Path("/proc/sysvipc") / name for name in ("shm", "sem")]
    lines = [line.split() for table in tables if table.exists() for line in table.open()]
    return [line[0] for line in lines if line[0] == str(0x6D74)]


@pytest.mark.audit
@pytest.mark.timeout(1500)
def test_none_wins_and_none_leaves_anything_behind(tmp_path, monkeypatch):
    root = tmp_path / "repository" / "exercises"
    for folder in ("checks", "solutions"):
        (root / folder).mkdir(parents=True)
    (root / "checks" / "ch90_hostile.py").write_text(CHECKS.format(names=NAMES))
    (root / "solutions" / "ch90_hostile.py").write_text(PREAMBLE + "".join(map(solved, NAMES)))
    (root / "ch90_hostile.py").write_text(PREAMBLE + ANSWERS)
    monkeypatch.setenv("TREE", str(root))
    exercises = registry.load_exercises(root)
    found = answers.from_folder(root, root, exercises.values())
    grading = runner.Grading(root, seed=7, learner=1, jobs=2)
    threads = {thread.id for thread in psutil.Process().threads()}
    results = runner.grade_many(
        grading, [(exercises[id], found[id]) for id in exercises], lambda done, total: None
    )
    said = {result.exercise.id[3:]: result.explanation() for result in results}
    passed = [result.exercise.id[3:] for result in results if result.status == "passed"]
    assert sorted(passed) == sorted(RIGHT), said
    assert "\x1b" not in said["escapes"] and "\r" not in said["escapes"]
    running = [p.info for p in psutil.process_iter(["cmdline", "ppid"])]
    assert not [info for info in running if info["cmdline"] == ["sleep", "335"]]
    ours = [info["cmdline"] or [] for info in running if info["ppid"] in (os.getpid(), 1)]
    assert not any("minitext.book.grading.worker" in words for words in ours)
    assert {thread.id for thread in psutil.Process().threads()} <= threads
    places = [Path.home(), Path("/dev/shm"), Path("/tmp"), root, Path(sys.prefix)]
    places += [Path(np.__file__).parent, Path(runner.__file__).parents[2]]
    assert not [name for place in places for name in place.glob("left-by-an-answer*")]
    assert not shared()
    assert {path.name for path in root.rglob("*.py")} == {"ch90_hostile.py"}
