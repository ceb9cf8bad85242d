"""Manifests for Kubernetes and Kubeflow, against the schemas that these projects publish."""

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from embedtrain.commands.submit import run as main
from embedtrain.commands.submit.options import compose_submit
from embedtrain.errors import ConfigError

RECIPE = ["name=My run_1", "model.path=model", "data.train=[train.jsonl]", "train.steps=3", "output_dir=runs/t"]
JOB = [
    "to=kubernetes",
    "kubernetes.image=registry.example/embedtrain:cuda",
    "kubernetes.volumes=[runs:/workspace/runs]",
]
ALL = [
    "kubernetes.nodes=4", "kubernetes.cpus_per_node=96", "kubernetes.mem=500Gi", "kubernetes.namespace=nlp",
    "kubernetes.volumes=[runs:/workspace/runs, data.set:/data:ro]", "kubernetes.secrets=[tokens, wandb:WANDB_API_KEY]",
    "kubernetes.env=NCCL_DEBUG=INFO", "kubernetes.node_selector=nvidia.com/gpu.product=H100", "kubernetes.queue=batch",
    "kubernetes.tolerations=[nvidia.com/gpu, spot=true:NoSchedule]", "kubernetes.image_pull_secret=registry",
    "kubernetes.service_account=trainer", "kubernetes.priority_class=low", "kubernetes.time=86400",
]  # fmt: skip


def render(capsys, *arguments) -> list[dict]:
    main((compose_submit([*RECIPE, *JOB, *arguments]), []))
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize("arguments", [[], ALL, ["kubernetes.gpus_per_node=0", "kubernetes.ranks_per_node=2"]])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_job_and_its_service_are_valid(capsys, arguments, version):
    service, job = render(capsys, *arguments)
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, version, strict=True)
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == "my-run-1"
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} <= volumes


def test_each_pod_starts_the_ranks_of_a_node(capsys):
    _, job = render(capsys, "kubernetes.nodes=4", "model.query_prompt='a $(HOME) b'")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    (container,) = spec["template"]["spec"]["containers"]
    command = " ".join(container["command"])
    assert command == (
        "embedtrain train --gpus 8 --nodes 4 --node-rank $(NODE_RANK) --master my-run-1-0.my-run-1:29500"
    )
    assert container["args"] == [*RECIPE, "model.query_prompt='a $$(HOME) b'"], "Kubernetes would expand $(HOME)"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_preempted_and_stopped_pods_are_replaced_and_do_not_count(capsys):
    """Exit code 75: a rank anywhere was asked to stop, and all saved a checkpoint."""
    spec = render(capsys, "kubernetes.nodes=2", "kubernetes.max_restarts=3")[1]["spec"]
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
    ]
    assert spec["podReplacementPolicy"] == "Failed", "a pod and its replacement must not write at the same time"
    assert spec["backoffLimit"] == 6, "the pods of both nodes fail together"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 300


OF_TRAIN_JOB = [a for a in ALL if not a.startswith(("kubernetes.secrets", "kubernetes.priority_class"))]


@pytest.mark.parametrize("arguments", [[], [*OF_TRAIN_JOB, "kubernetes.secrets=[tokens:HF_TOKEN]"]])
def test_a_train_job_is_valid(capsys, arguments):
    (manifest,) = render(capsys, *arguments, "to=kubeflow")
    parsed = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    assert parsed == manifest, "a key that the schema does not have is dropped"
    trainer = manifest["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "-m", "embedtrain"]
    assert trainer["args"][0] == "train"
    assert trainer["numProcPerNode"] == 8
    if arguments:
        secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}}
        assert secret in trainer["env"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes.image=null"], r"kubernetes\.image=null"),
        (["kubernetes.volumes=[]"], r"kubernetes\.volumes=\[\]: .*/workspace/runs/t"),
        (["kubernetes.volumes=[runs:/workspace/runs:ro]"], r"kubernetes\.volumes=.*CLAIM:/workspace/runs"),
        (["kubernetes.volumes=[Runs/x]"], r"kubernetes\.volumes=\[Runs/x\]"),
        (["kubernetes.mem=lots"], r"kubernetes\.mem=lots"),
        (["kubernetes.name=My_Run"], r"kubernetes\.name=My_Run"),
        (["kubernetes.tolerations=a b"], r"kubernetes\.tolerations=\[a b\]"),
        (["kubernetes.nodes=0"], r"kubernetes\.nodes=0"),
        (["kubernetes.nods=2"], r"kubernetes\.nods"),
        (["to=kubernets"], r"kubernets"),
        (["slurm.seeds=[1,2]"], r"slurm\.seeds=\[1,2\]"),
        (["to=kubeflow", "kubernetes.secrets=[tokens]"], r"kubernetes\.secrets=\[tokens\]: .*tokens:HF_TOKEN"),
        (["to=kubeflow", "kubernetes.max_restarts=1"], r"kubernetes\.max_restarts=1: .*to=kubernetes"),
    ],
)
def test_errors_name_the_option(capsys, arguments, message):
    with pytest.raises(ConfigError, match=message):
        render(capsys, *arguments)
