"""The start-up decision table, row by row, and that no environment gives anything but a job, nothing, or one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.distributed import cluster
from minitext.distributed.cluster import EXPLICIT, Cluster, find_cluster
from minitext.errors import UserError

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {
    "JOBSET_NAME": "big", "REPLICATED_JOB_NAME": "train", "JOB_INDEX": "1", "JOBS": "2",
    "PROCESSES_IN_JOB": "4", "JOB_COMPLETION_INDEX": "3",
}  # fmt: skip
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3"}
TOLD = dict(zip(EXPLICIT, ("node01:99", "4", "3"), strict=True))
FILE = {"MINITEXT_CLUSTER_FILE": "job.json"}
SLURM_PORT = 61_440 + 4711 % 4096
OMPI_PORT = 61_440 + (1531576320 >> 12) % 4096


def find(env, text=None, host="h1"):
    return find_cluster(env, hostname=lambda: host, read=lambda path: text, sleep=lambda s: None)


ROWS = {
    "alone": ({}, None),
    "explicit": (TOLD, Cluster("explicit", "node01:99", 4, 3)),
    "explicit port": (TOLD | {EXPLICIT[0]: "node01"}, Cluster("explicit", "node01:8476", 4, 3)),
    "explicit IPv6": (TOLD | {EXPLICIT[0]: "[::1]:5"}, Cluster("explicit", "[::1]:5", 4, 3)),
    "explicit of one": (TOLD | {EXPLICIT[1]: "1", EXPLICIT[2]: "0"}, None),
    "devices": (
        TOLD | {"MINITEXT_LOCAL_DEVICE_IDS": "2,3"},
        Cluster("explicit", "node01:99", 4, 3, (2, 3)),
    ),
    "explicit before all": (TOLD | SLURM | OMPI | POD | TPU, Cluster("explicit", "node01:99", 4, 3)),
    "explicit address of SLURM's": (
        SLURM | {EXPLICIT[0]: "other:1"},
        Cluster("explicit", "other:1", 4, 3, (1,)),
    ),
    "none": (TOLD | SLURM | {"MINITEXT_CLUSTER": "none"}, None),
    "slurm": (SLURM, Cluster("slurm", f"node07:{SLURM_PORT}", 4, 3, (1,))),
    "slurm, a process for each node": (
        SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
        Cluster("slurm", f"node07:{SLURM_PORT}", 2, 1),
    ),
    "slurm, one GPU shown": (
        SLURM | {"CUDA_VISIBLE_DEVICES": "3"},
        Cluster("slurm", f"node07:{SLURM_PORT}", 4, 3),
    ),
    "slurm, all GPUs shown": (
        SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"},
        Cluster("slurm", f"node07:{SLURM_PORT}", 4, 3, (1,)),
    ),
    "slurm with PMI": (
        SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3"},
        Cluster("slurm", f"node07:{SLURM_PORT}", 4, 3, (1,)),
    ),
    "slurm, one task": (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    "slurm, srun --pty": (SLURM | {"SLURM_PTY_PORT": "4000"}, None),
    "slurm, a script of sbatch": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        None,
    ),
    "mpi": (OMPI, Cluster("mpi", f"10.96.0.1:{OMPI_PORT}", 4, 2, (0,))),
    "mpi in slurm": (OMPI | SLURM, Cluster("mpi", f"10.96.0.1:{OMPI_PORT}", 4, 2, (0,))),
    "mpi, a process for each node": (
        OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        Cluster("mpi", f"10.96.0.1:{OMPI_PORT}", 4, 2),
    ),
    "mpi on one host": (PMI, Cluster("mpi", "127.0.0.1:8476", 2, 1, (1,))),
    "mpi, address told": (
        {"PMI_SIZE": "2", "PMI_RANK": "1", EXPLICIT[0]: "a:1"},
        Cluster("explicit", "a:1", 2, 1),
    ),
    "mpi of one": ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    "jobset": (POD, Cluster("jobset", "big-train-0-0.big:8476", 8, 7)),
    "jobset of one": (
        {**POD, "JOBS": "1", "JOB_INDEX": "0", "PROCESSES_IN_JOB": "1", "JOB_COMPLETION_INDEX": "0"},
        None,
    ),
    "tpu": (TPU, Cluster("tpu")),
    "tpu in a jobset": (TPU | POD, Cluster("tpu")),
    "tpu slices": ({"MEGASCALE_NUM_SLICES": "2"}, Cluster("tpu")),
    "tpu of one host": ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"}, None),
    "tpu, told": ({"MINITEXT_CLUSTER": "tpu"}, Cluster("tpu")),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_every_row(row):
    env, expected = ROWS[row]
    assert find(env) == expected


FAULTS = {
    "process 5 of 4": (TOLD | {EXPLICIT[2]: "5"}, "MINITEXT_PROCESS_ID=5 and MINITEXT_PROCESSES=4"),
    "no address": ({EXPLICIT[1]: "4", EXPLICIT[2]: "0"}, "there is no MINITEXT_COORDINATOR"),
    "only an address": ({EXPLICIT[0]: "a:1"}, "no MINITEXT_PROCESSES and no MINITEXT_PROCESS_ID"),
    "half": ({EXPLICIT[0]: "a:1", EXPLICIT[1]: "4"} | SLURM, "there is no MINITEXT_PROCESS_ID"),
    "no number": (TOLD | {EXPLICIT[1]: "four"}, "MINITEXT_PROCESSES='four'"),
    "no process": (TOLD | {EXPLICIT[1]: "0"}, "MINITEXT_PROCESSES='0'"),
    "port": (TOLD | {EXPLICIT[0]: "a:99999"}, "MINITEXT_COORDINATOR='a:99999'"),
    "two words": (TOLD | FILE, "both set"),
    "kind": ({"MINITEXT_CLUSTER": "gpu"}, "choose none or tpu"),
    "device ids": (TOLD | {"MINITEXT_LOCAL_DEVICE_IDS": "0;1"}, "MINITEXT_LOCAL_DEVICE_IDS='0;1'"),
    "slurm index": (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 and SLURM_NTASKS=4"),
    "slurm nodes": (SLURM | {"SLURM_STEP_NODELIST": "node[7-"}, "not a list of nodes"),
    "slurm and another": (SLURM | {"PMI_SIZE": "8"}, "PMI_SIZE=8 and SLURM_NTASKS=4"),
    "more processes than GPUs": (
        SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_LOCALID": "2"},
        "SLURM_LOCALID=2 and the number of visible GPUs=2",
    ),
    "mpi somewhere": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "set MINITEXT_COORDINATOR=HOST:8476"),
    "mpi rank": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
    "pod": (POD | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 and PROCESSES_IN_JOB=4"),
    "job": (POD | {"JOB_INDEX": "2"}, "JOB_INDEX=2 and JOBS=2"),
    "jobset half": ({"JOBSET_NAME": "big"}, "REPLICATED_JOB_NAME is not"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_contradiction_is_one_line(fault):
    env, expected = FAULTS[fault]
    with pytest.raises(UserError) as caught:
        find(env)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a", ["a"]),
        ("a,b2", ["a", "b2"]),
        ("node[01-04,7],x", ["node01", "node02", "node03", "node04", "node7", "x"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a[3]-ib", ["a3-ib"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_lists_of_nodes(text, expected):
    assert cluster.nodes(text) == expected


@pytest.mark.parametrize(
    "text", [*",[]", "", "a[", "a]", "a[]", "a[2-1]", "a[x]", "a[1,]", "a[1-99999999]"]
)
def test_what_is_not_a_list_of_nodes(text):
    with pytest.raises(UserError, match="not a list of nodes"):
        cluster.nodes(text)


GOOD = {"coordinator": "h0:7", "processes": 2, "process_id": 1}


@pytest.mark.parametrize(
    "told, more, expected",
    [
        (GOOD, {}, Cluster("file", "h0:7", 2, 1)),
        ({"coordinator": "h0", "hosts": ["h0", "h1"]}, {}, Cluster("file", "h0:8476", 2, 1)),
        ({"coordinator": "h", "processes": 2}, {EXPLICIT[2]: "1"}, Cluster("file", "h:8476", 2, 1)),
        ({"coordinator": "h0", "processes": 1, "process_id": 0}, {}, None),
        (GOOD, {"MINITEXT_LOCAL_DEVICE_IDS": "4"}, Cluster("file", "h0:7", 2, 1, (4,))),
    ],
)
def test_a_file(told, more, expected):
    assert find(FILE | more | SLURM, json.dumps(told)) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"coordinator": "h0"', "is not JSON"),
        ("[1]", "names no coordinator"),
        ('{"coordinator": 5}', "names no coordinator"),
        ('{"coordinator": "h0"}', "processes=None"),
        ('{"coordinator": "h0", "processes": true}', "processes=True"),
        ('{"coordinator": "h0", "processes": 2}', "no process_id and no hosts"),
        ('{"coordinator": "h0", "processes": 2, "process_id": 2}', "process_id=2"),
        ('{"coordinator": "h0", "processes": 2, "process_id": "0"}', "process_id='0'"),
        ('{"coordinator": "h 0", "processes": 2, "process_id": 0}', "is not an address"),
        ('{"coordinator": "h0", "hosts": ["h0", "h2"]}', "this host, h1, 0 times"),
        ('{"coordinator": "h0", "hosts": ["h1", "h1"]}', "this host, h1, 2 times"),
        ('{"coordinator": "h0", "hosts": "h1"}', "hosts='h1'"),
        ('{"coordinator": "h0", "hosts": ["h1"], "processes": 2}', "1 hosts and processes=2"),
    ],
)
def test_a_file_that_is_wrong(text, expected):
    with pytest.raises(UserError) as caught:
        find(FILE, text)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("before", [None, "", "\n"])  # who writes it may have made it first
@pytest.mark.parametrize("comes_after", [3, None])
def test_a_file_is_waited_for_but_not_for_ever(comes_after, before):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def read(path):
        assert path == "job.json"
        return json.dumps(GOOD) if comes_after is not None and now[0] >= comes_after else before

    env = FILE | {"MINITEXT_CLUSTER_SECONDS": "5"}
    if comes_after:
        assert find_cluster(env, read=read, sleep=sleep, clock=lambda: now[0]).index == 1
        return
    with pytest.raises(UserError, match="did not appear in 5 s"):
        find_cluster(env, read=read, sleep=sleep, clock=lambda: now[0])
    assert 5 <= now[0] <= 6


def test_a_file_on_the_disk(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(GOOD))
    env = {"MINITEXT_CLUSTER_FILE": str(tmp_path / "job.json")}
    assert find_cluster(env) == Cluster("file", "h0:7", 2, 1)
    with pytest.raises(UserError, match="cannot be read"):
        find_cluster({"MINITEXT_CLUSTER_FILE": str(tmp_path)})


NAMES = sorted(
    {*SLURM, *OMPI, *PMI, *POD, *TPU, *TOLD, *FILE}
    | {"MINITEXT_CLUSTER", "MINITEXT_LOCAL_DEVICE_IDS", "SLURM_PTY_PORT"}
    | {"CUDA_VISIBLE_DEVICES", "MEGASCALE_NUM_SLICES", "MINITEXT_CLUSTER_SECONDS"}
)
VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "4", "node[01-04,7]", "host:1", "tpu", "none", "a,b", ""]),
    st.integers(-2, 9).map(str),
    st.text(max_size=12),
)


FIELDS = st.one_of(st.integers(-1, 3), st.text(max_size=3), st.lists(st.sampled_from(["h1", 2])))
FILES = st.dictionaries(
    st.sampled_from(["coordinator", "processes", "process_id", "hosts"]), FIELDS
).map(json.dumps)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES), st.one_of(st.none(), st.text(), FILES))
def test_any_environment_gives_a_job_or_nothing_or_a_line(env, text):
    now = iter(range(10**9))
    try:
        found = find_cluster(
            env, hostname=lambda: "h1", read=lambda path: text, sleep=lambda s: None,
            clock=lambda: float(next(now)),
        )  # fmt: skip
    except UserError as error:
        assert len(str(error)) > 20
        return
    if found is not None and found.kind != "tpu":
        assert 0 <= found.index < found.processes and found.processes > 1
        assert found.coordinator.rpartition(":")[2].isdigit()
