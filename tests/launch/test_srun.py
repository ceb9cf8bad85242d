"""SLURM's variables of a task become those that torchrun would set."""

import pytest

from embedtrain.distributed.srun import interface_for, set_ranks_from_srun
from embedtrain.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "25003", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "localhost,n[1-3]",
    "SLURM_NTASKS": "9", "SLURM_TASKS_PER_NODE": "3(x3)",
}  # fmt: skip
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def placed(**changes: str | None) -> dict[str, str]:
    environment = {name: value for name, value in (TASK | changes).items() if value is not None}
    set_ranks_from_srun(environment)
    return {name: environment[name] for name in PLACE if name in environment}


def test_a_task_is_a_rank():
    assert placed() == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "15003", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def test_ranks_of_a_node_lie_beside_each_other_however_srun_counts():
    """With --distribution=cyclic the process of that place has another SLURM_PROCID."""
    assert placed(SLURM_PROCID="6")["RANK"] == "5"


def test_on_one_node_no_name_has_to_resolve():
    place = placed(SLURM_STEP_TASKS_PER_NODE="7", SLURM_NODEID="0", SLURM_STEP_NODELIST="nobody-knows")
    assert place["MASTER_ADDR"] == "127.0.0.1"
    assert place["LOCAL_WORLD_SIZE"] == "7"
    assert "GLOO_SOCKET_IFNAME" not in place


def test_steps_of_one_job_do_not_share_a_port():
    assert placed(SLURM_STEP_ID="1")["MASTER_PORT"] == "16000"
    ports = {placed(SLURM_JOB_ID=str(job))["MASTER_PORT"] for job in range(1000)}
    assert len(ports) == 1000
    assert all(10000 <= int(port) < 30000 for port in ports)


def test_what_the_user_has_set_stays():
    place = placed(MASTER_ADDR="10.0.0.7", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="ib0", WORLD_SIZE="7")
    assert (place["MASTER_ADDR"], place["MASTER_PORT"], place["GLOO_SOCKET_IFNAME"]) == ("10.0.0.7", "29500", "ib0")


@pytest.mark.parametrize(
    "changes",
    [
        # torchrun's ranks below a task of srun
        {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "1"},
        # a batch script's shell: SLURM_PROCID is 0 there, and of the step's variables there is none
        {name: None for name in TASK if name.startswith("SLURM_STEP")} | {"SLURM_PROCID": "0"},
        # salloc's shell, in a step of its own
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    ],
)
def test_others_stay_what_they_are(changes):
    environment = {name: value for name, value in (TASK | changes).items() if value is not None}
    before = dict(environment)
    set_ranks_from_srun(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 in the environment, and srun has started 7 tasks: unset it"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM's variables contradict each other"),
        ({"SLURM_NODEID": "4"}, "SLURM's variables contradict each other"),
        ({"SLURM_LOCALID": "2"}, "SLURM's variables contradict each other"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set: start with torchrun instead"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID=x in the environment is not a number"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM's list of nodes 'n[1-' cannot be read"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        placed(**changes)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("variables", "visible", "chosen"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8, 3),
        ({"SLURM_GPUS_ON_NODE": "8"}, 1, 0),  # srun --gpus-per-task=1: each sees its own alone
        ({"SLURM_GPUS_ON_NODE": "8", "TORCHELASTIC_RUN_ID": "x"}, 1, None),  # torchrun's ranks see what it sees
        ({"SLURM_GPUS_ON_NODE": "1"}, 1, None),
        ({}, 1, None),
    ],
)
def test_a_task_that_sees_one_gpu_alone_has_it(monkeypatch, variables, visible, chosen):
    torch = pytest.importorskip("torch")
    world = pytest.importorskip("embedtrain.distributed.world")
    for name in ("SLURM_GPUS_ON_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if chosen is None:
        with pytest.raises(ConfigError, match=r"this node has 1 GPU\(s\) but 8 ranks"):
            world._device(3, 8)
    else:
        assert world._device(3, 8) == (torch.device("cuda", chosen), "cpu:gloo,cuda:nccl")
        assert taken == [chosen]


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({"SLURM_NODEID": "0", "NODE_ADDRESSES": "nobody.invalid 127.0.0.1"}, "lo"),
        ({"SLURM_NODEID": "1", "NODE_ADDRESSES": "127.0.0.1 nobody.invalid"}, "lo"),
        ({"NODE_ADDRESSES": "127.0.0.1 127.0.0.1", "GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({"NODE_ADDRESSES": "127.0.0.1"}, None),
        ({"NODE_ADDRESSES": None}, None),
    ],
)
def test_below_torchrun_ranks_look_towards_another_node(changes, chosen):
    assert placed(RANK="5", **changes) == {"RANK": "5"} | ({} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen})


def test_the_interface_that_leads_somewhere():
    assert interface_for("127.0.0.1") == "lo"
    assert interface_for("nobody.invalid") is None
