"""Ranks from SLURM's variables of a task, and its compressed lists of nodes and tasks."""

import pytest

from embedtrain.distributed.srun import interface_for, node_address, node_names, set_ranks_from_srun, tasks_per_node
from embedtrain.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "25003", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "localhost,n[1-3]",
    "SLURM_NTASKS": "9", "SLURM_TASKS_PER_NODE": "3(x3)",
}  # fmt: skip
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def rank_variables(**changes: str | None) -> dict[str, str]:
    environment = {name: value for name, value in (TASK | changes).items() if value is not None}
    set_ranks_from_srun(environment)
    return {name: environment[name] for name in VARIABLES if name in environment}


def test_a_task_is_a_rank():
    assert rank_variables() == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "15003", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def test_ranks_of_a_node_are_consecutive():
    """With --distribution=cyclic the process has another SLURM_PROCID."""
    assert rank_variables(SLURM_PROCID="6")["RANK"] == "5"


def test_one_node_needs_no_name_resolution():
    variables = rank_variables(SLURM_STEP_TASKS_PER_NODE="7", SLURM_NODEID="0", SLURM_STEP_NODELIST="unknown-node")
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["LOCAL_WORLD_SIZE"] == "7"
    assert "GLOO_SOCKET_IFNAME" not in variables


def test_steps_of_one_job_do_not_share_a_port():
    assert rank_variables(SLURM_STEP_ID="1")["MASTER_PORT"] == "16000"
    ports = {rank_variables(SLURM_JOB_ID=str(job))["MASTER_PORT"] for job in range(1000)}
    assert len(ports) == 1000
    assert all(10000 <= int(port) < 30000 for port in ports)


def test_variables_of_the_user_are_kept():
    variables = rank_variables(MASTER_ADDR="10.0.0.7", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="ib0", WORLD_SIZE="7")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"], variables["GLOO_SOCKET_IFNAME"]) == (
        "10.0.0.7",
        "29500",
        "ib0",
    )


@pytest.mark.parametrize(
    "changes",
    [
        # torchrun's ranks below a task of srun
        {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "1"},
        # a batch script's shell: SLURM_PROCID is 0 there, and there are no variables of a step
        {name: None for name in TASK if name.startswith("SLURM_STEP")} | {"SLURM_PROCID": "0"},
        # salloc's shell, in a step of its own
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    ],
)
def test_other_processes_are_unchanged(changes):
    environment = {name: value for name, value in (TASK | changes).items() if value is not None}
    before = dict(environment)
    set_ranks_from_srun(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "8"}, r"WORLD_SIZE=8.* 7 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, r"SLURM_STEP_NUM_TASKS=7"),
        ({"SLURM_NODEID": "4"}, r"SLURM_STEP_NUM_TASKS=7"),
        ({"SLURM_LOCALID": "2"}, r"SLURM_STEP_NUM_TASKS=7"),
        ({"SLURM_LOCALID": None}, r"SLURM_LOCALID is not set"),
        ({"SLURM_NODEID": "x"}, r"SLURM_NODEID=x"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, r"nodes 'n\[1-'"),
    ],
)
def test_contradicting_variables_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        rank_variables(**changes)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, ("3", "8")),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, ("1", "4")),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "LOCAL_RANK": "2"}, ("2", "4")),
        # srun's variables of a task, unless they are those of a daemon of mpirun, of which there is one on each node.
        ({"SLURM_LOCALID": "3", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, ("3", "8")),
        ({"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (None, None)),
        ({"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
          "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, ("3", "8")),
        ({"WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (None, None)),
        ({}, (None, None)),
    ],
)  # fmt: skip
def test_the_place_on_its_host_of_a_rank_that_knows_only_its_rank(launcher, expected):
    """`mpirun ... bash -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE ...'`."""
    environment = {"RANK": "11", "WORLD_SIZE": "16", **launcher}
    set_ranks_from_srun(environment)
    assert (environment.get("LOCAL_RANK"), environment.get("LOCAL_WORLD_SIZE")) == expected


@pytest.mark.parametrize(
    ("variables", "visible", "device"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8, 3),
        ({"SLURM_GPUS_ON_NODE": "8"}, 1, 0),  # srun --gpus-per-task=1: each sees only its own
        ({"SLURM_GPUS_ON_NODE": "8", "TORCHELASTIC_RUN_ID": "x"}, 1, None),  # torchrun's ranks see the same GPUs
        ({"SLURM_GPUS_ON_NODE": "1"}, 1, None),
        ({}, 1, None),
    ],
)
def test_a_task_that_sees_one_gpu_uses_it(monkeypatch, variables, visible, device):
    torch = pytest.importorskip("torch")
    world = pytest.importorskip("embedtrain.distributed.world")
    for name in ("SLURM_GPUS_ON_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    if device is None:
        with pytest.raises(ConfigError, match=r"1 GPU\(s\) .* 8 ranks"):
            world.rank_device(3, 8)
    else:
        assert world.rank_device(3, 8) == (torch.device("cuda", device), "cpu:gloo,cuda:nccl")
        assert devices == [device]


@pytest.mark.parametrize(
    ("changes", "interface"),
    [
        ({"SLURM_NODEID": "0", "NODE_ADDRESSES": "unknown.invalid 127.0.0.1"}, "lo"),
        ({"SLURM_NODEID": "1", "NODE_ADDRESSES": "127.0.0.1 unknown.invalid"}, "lo"),
        ({"NODE_ADDRESSES": "127.0.0.1 127.0.0.1", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({"NODE_ADDRESSES": "127.0.0.1"}, None),
        ({"NODE_ADDRESSES": None}, None),
    ],
)
def test_below_torchrun_the_interface_leads_to_another_node(changes, interface):
    assert rank_variables(RANK="5", **changes) == {"RANK": "5"} | (
        {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    )


def test_the_interface_of_an_address():
    assert interface_for("127.0.0.1") == "lo"
    assert interface_for("unknown.invalid") is None


@pytest.mark.parametrize(
    ("compressed", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("gpu-[008-011],login", ["gpu-008", "gpu-009", "gpu-010", "gpu-011", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
        ("a-[1,3]-ib,b.example.org", ["a-1-ib", "a-3-ib", "b.example.org"]),
    ],
)
def test_node_lists(compressed, names):
    assert node_names(compressed) == names


@pytest.mark.parametrize("compressed", ["", "n[1-", "n[4-1]", "n[a-b]", "n1,,n2", "n[1-99999999999]", "n]1"])
def test_an_invalid_node_list_is_rejected(compressed):
    with pytest.raises(ConfigError, match=r"list of nodes"):
        node_names(compressed)


@pytest.mark.parametrize(
    ("compressed", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,8(x2)", [1, 8, 8]), ("2,1", [2, 1])]
)
def test_tasks_of_nodes(compressed, tasks):
    assert tasks_per_node(compressed) == tasks


@pytest.mark.parametrize("compressed", ["", "2(x", "2x3", "a", "-1", "2(x99999999999)"])
def test_an_invalid_task_list_is_rejected(compressed):
    with pytest.raises(ConfigError, match="list of tasks"):
        tasks_per_node(compressed)


def test_a_name_that_resolves_is_an_address():
    assert node_address("localhost") == "localhost"


def test_slurm_knows_the_address_of_a_name_that_does_not_resolve(tmp_path, monkeypatch):
    """If SLURM does not know it either, the name is used."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$4 NodeAddr=10.1.2.3 NodeHostName=$4 Version=22"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert node_address("unknown-node.invalid") == "10.1.2.3"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert node_address("unknown-node.invalid") == "unknown-node.invalid"
