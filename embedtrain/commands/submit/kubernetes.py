"""Kubernetes: an indexed Job with its headless Service, or a TrainJob of the Kubeflow Trainer, as YAML."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

import yaml

from embedtrain.config.command_options import NodeOptions
from embedtrain.config.commands import Command
from embedtrain.config.options import option
from embedtrain.config.validation import OptionChecks

Manifest = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?([EPTGMk]|[EPTGMK]i|m)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_LABEL_VALUE = re.compile(r"[\w./-]+=[\w.-]*", re.ASCII)
_TOLERATION = re.compile(r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII)
_SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?(:[A-Za-z_][A-Za-z0-9_]*)?")
_VOLUME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:/[^:]*(:ro)?")
_MAX_NAME = 52  # of 63 characters, which are those of a pod's host name, NAME-INDEX

# The exit code of a command that was asked to stop, and saved a checkpoint.
_STOPPED = 75
_WORKING_DIRECTORY = PurePosixPath("/workspace")  # of the images in docker/


@dataclass(kw_only=True)
class KubernetesConfig(NodeOptions):
    """One job. Flat, because its fields mirror those of a pod's specification."""

    image: str | None = None  # with embedtrain installed, such as one of docker/
    gpu_resource: str = "nvidia.com/gpu"  # of the device plugin
    shm: str = "16Gi"  # of /dev/shm, which NCCL uses, and which counts as memory
    volumes: list[str] = field(default_factory=list)  # CLAIM:PATH[:ro] of persistent volume claims
    name: str | None = None  # of the Job and the Service; default: the recipe's
    namespace: str | None = None  # default: that of kubectl
    env: list[str] = field(default_factory=list)  # NAME=VALUE
    secrets: list[str] = field(default_factory=list)  # NAME: all keys become environment variables; NAME:KEY: one
    node_selector: list[str] = field(default_factory=list)  # LABEL=VALUE
    tolerations: list[str] = field(default_factory=list)  # KEY, KEY=VALUE or KEY=VALUE:EFFECT
    image_pull_secret: str | None = None  # of a private registry
    service_account: str | None = None  # default: the namespace's
    priority_class: str | None = None  # of the pods
    queue: str | None = None  # a local queue of Kueue
    runtime: str = "torch-distributed"  # the ClusterTrainingRuntime, for to=kubeflow
    # that the ranks have for a checkpoint after a preemption or an eviction
    grace_seconds: int = option(300, at_least=1)
    time: int | None = option(None, at_least=1)  # limit in seconds, after which the job fails; default: none
    max_restarts: int = option(3, at_least=0)  # after an error or the loss of a node; preemptions do not count
    port: int = option(29500, within=(1, 65535))  # of the rendezvous, inside the pods


def check_kubernetes(config: KubernetesConfig, *, is_used: bool) -> None:
    """Check the options; ConfigError names the first that is invalid. The image is required if the job is used."""
    check = OptionChecks(config, "kubernetes.")
    for each in fields(config):
        value = getattr(config, each.name)
        lines = value if isinstance(value, list) else [value]
        is_safe = not any(isinstance(line, str) and re.search(r"[\x00-\x08\x0a-\x1f\x7f]", line) for line in lines)
        check.require(is_safe, each.name, "one line each, without control characters")
    for name in ("mem", "shm"):
        value = getattr(config, name)
        check.require(value is None or bool(_QUANTITY.fullmatch(value)), name, "must be a quantity, such as 500Gi")
    for name in ("name", "namespace", "queue", "priority_class", "service_account", "image_pull_secret", "runtime"):
        value = getattr(config, name)
        limit = _MAX_NAME if name == "name" else 63
        is_name = value is None or (len(value) <= limit and _LABEL.fullmatch(value) is not None)
        check.require(is_name, name, f"must be at most {limit} lowercase letters, digits and hyphens")
    for name, pattern, example in (
        ("volumes", _VOLUME, "CLAIM:/PATH or CLAIM:/PATH:ro"),
        ("env", _VARIABLE, "NAME=VALUE"),
        ("secrets", _SECRET, "NAME or NAME:KEY"),
        ("node_selector", _LABEL_VALUE, "LABEL=VALUE"),
        ("tolerations", _TOLERATION, "KEY, KEY=VALUE, or KEY=VALUE:NoSchedule"),
    ):
        are_valid = all(pattern.fullmatch(line) for line in getattr(config, name))
        check.require(are_valid, name, f"must be {example}")
    if is_used:
        message = "is missing; write the container image, such as registry.example/embedtrain:cuda"
        check.require(bool(config.image), "image", message)


def check_train_job(config: KubernetesConfig) -> None:
    """Reject options that a TrainJob does not have."""
    check, defaults = OptionChecks(config, "kubernetes."), KubernetesConfig()
    for name in ("priority_class", "port", "max_restarts"):
        is_default = getattr(config, name) == getattr(defaults, name)
        check.require(is_default, name, "is for to=kubernetes; a TrainJob's runtime decides it: leave it out")
    are_keys = all(":" in secret for secret in config.secrets)
    check.require(are_keys, "secrets", "a TrainJob needs the keys: write NAME:KEY, such as tokens:HF_TOKEN")


def check_results_are_kept(config: KubernetesConfig, output_dir: str) -> None:
    """Reject an output directory in a container's own file system: its checkpoints would be lost with the pod."""
    results = _WORKING_DIRECTORY / output_dir
    mounts = [PurePosixPath(volume.split(":")[1]) for volume in config.volumes if not volume.endswith(":ro")]
    OptionChecks(config, "kubernetes.").require(
        any(results.is_relative_to(mount) for mount in mounts),
        "volumes",
        f"none of them holds output_dir={results}, which would be lost with the pod: write CLAIM:{results.parent}",
    )


def render_job(command: Command, arguments: list[str], name: str, config: KubernetesConfig) -> str:
    """A headless Service, by which the pods find the first of them, and an indexed Job, as YAML documents.

    Pods that are preempted, or end after a checkpoint, are replaced and do not count as failures.
    """
    name = config.name or _label(name)
    labels = {"app.kubernetes.io/name": "embedtrain", "app.kubernetes.io/instance": name}
    metadata = {"name": name, **({"namespace": config.namespace} if config.namespace else {}), "labels": labels}
    # Pods must find each other before they are ready.
    service_spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service_spec}
    whole_secrets = [secret for secret in config.secrets if ":" not in secret]
    container: Manifest = {
        "name": "embedtrain",
        "image": config.image,
        "command": _launch(command, name, config),
        "args": [_escape(argument) for argument in arguments],
        "workingDir": str(_WORKING_DIRECTORY),
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}, *_environment(config)],
        **({"envFrom": [{"secretRef": {"name": secret}} for secret in whole_secrets]} if whole_secrets else {}),
        "resources": _resources(config),
        "volumeMounts": _mounts(config),
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": config.grace_seconds,
        "automountServiceAccountToken": False,
        **_scheduling(config),
        **({"priorityClassName": config.priority_class} if config.priority_class else {}),
        "containers": [container],
        "volumes": _volumes(config),
    }
    failures = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [_STOPPED]}},
    ]
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": config.nodes,
        "parallelism": config.nodes,
        # The pods of all nodes fail together.
        "backoffLimit": config.max_restarts * config.nodes,
        "podReplacementPolicy": "Failed",  # a pod and its replacement must not write at the same time
        "podFailurePolicy": {"rules": failures},
        **({"activeDeadlineSeconds": config.time} if config.time else {}),
        **({"suspend": True} if config.queue else {}),  # until Kueue admits it
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if config.queue:
        metadata = {**metadata, "labels": {**labels, "kueue.x-k8s.io/queue-name": config.queue}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return _dump(service, job)


def render_train_job(command: Command, arguments: list[str], name: str, config: KubernetesConfig) -> str:
    """A TrainJob (trainer.kubeflow.org/v1alpha1) as YAML. Its runtime sets torchrun's rendezvous in the environment."""
    name = config.name or _label(name)
    launcher = ["python"] if not command.ranks else ["torchrun"]
    node = {
        "name": "node",  # the runtime's names of the replicated job and its container
        "volumeMounts": _mounts(config),
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod = {
        "terminationGracePeriodSeconds": config.grace_seconds,
        **_scheduling(config),
        "containers": [node],
        "volumes": _volumes(config),
    }
    replicated_job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "embedtrain.io/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated_job]}}},
    }
    trainer: Manifest = {
        "image": config.image,
        "command": [*launcher, "-m", "embedtrain"],
        "args": [command.name, *(_escape(argument) for argument in arguments)],
        "numNodes": config.nodes,
        "numProcPerNode": _ranks_per_node(config),
        "resourcesPerNode": _resources(config),
        "env": [
            # torchrun waits this long for the ranks' checkpoint after SIGTERM.
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(max(config.grace_seconds - 10, 1))},
            *_environment(config),
        ],
    }
    return _dump(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {
                "name": name,
                **({"namespace": config.namespace} if config.namespace else {}),
                **({"labels": {"kueue.x-k8s.io/queue-name": config.queue}} if config.queue else {}),
            },
            "spec": {
                "runtimeRef": {"name": config.runtime},
                **({"activeDeadlineSeconds": config.time} if config.time else {}),
                **({"suspend": True} if config.queue else {}),
                "trainer": trainer,
                "runtimePatches": [patch],
            },
        }
    )


_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def _launch(command: Command, name: str, config: KubernetesConfig) -> list[str]:
    """The command line of a node, without the arguments of the command."""
    if not command.ranks:
        return ["embedtrain", command.name]
    ranks = "--gpus" if config.ranks_per_node is None and config.gpus_per_node else "--nproc-per-node"
    return [
        *("embedtrain", command.name, ranks, str(_ranks_per_node(config))),
        *("--nodes", str(config.nodes), "--node-rank", "$(NODE_RANK)", "--master", f"{name}-0.{name}:{config.port}"),
    ]


def _ranks_per_node(config: KubernetesConfig) -> int:
    return config.ranks_per_node or config.gpus_per_node or 1


def _environment(config: KubernetesConfig) -> list[Manifest]:
    pairs = (line.partition("=") for line in config.env)
    keys = (secret.split(":") for secret in config.secrets if ":" in secret)
    return [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "PYTHONSAFEPATH", "value": "1"},  # no modules of the working directory, which torchrun's ranks look in
        *({"name": name, "value": value} for name, _, value in pairs),
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for name, key in keys),
    ]


def _resources(config: KubernetesConfig) -> Manifest:
    """GPUs and memory as requests and limits; of CPUs only a request, because limits slow down data workers."""
    limits = {config.gpu_resource: config.gpus_per_node} if config.gpus_per_node else {}
    if config.mem is not None:
        limits["memory"] = config.mem  # type: ignore[assignment]
    requests: Manifest = dict(limits)
    if config.cpus_per_node is not None:
        requests["cpu"] = config.cpus_per_node
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(config: KubernetesConfig) -> list[Manifest]:
    claims = dict.fromkeys(volume.split(":")[0] for volume in config.volumes)
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shm}},
        *({"name": _volume_name(claim), "persistentVolumeClaim": {"claimName": claim}} for claim in claims),
    ]


def _mounts(config: KubernetesConfig) -> list[Manifest]:
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    for volume in config.volumes:
        claim, path, *mode = volume.split(":")
        mounts.append({"name": _volume_name(claim), "mountPath": path, **({"readOnly": True} if mode else {})})
    return mounts


def _volume_name(claim: str) -> str:
    return f"claim-{claim.replace('.', '-')}"[:63].rstrip("-")


def _scheduling(config: KubernetesConfig) -> Manifest:
    scheduling: Manifest = {
        # The images run as user 1000, who must be able to write to the volumes.
        "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
    }
    if config.node_selector:
        scheduling["nodeSelector"] = dict(line.split("=", 1) for line in config.node_selector)
    if config.tolerations:
        scheduling["tolerations"] = [_toleration(line) for line in config.tolerations]
    if config.image_pull_secret:
        scheduling["imagePullSecrets"] = [{"name": config.image_pull_secret}]
    if config.service_account:
        scheduling["serviceAccountName"] = config.service_account
    return scheduling


def _toleration(line: str) -> Manifest:
    taint, _, effect = line.partition(":")
    key, sign, value = taint.partition("=")
    match: Manifest = {"operator": "Equal", "value": value} if sign else {"operator": "Exists"}
    return {"key": key, **match, **({"effect": effect} if effect else {})}


def _label(name: str) -> str:
    """A name that Kubernetes allows for a Job and a host."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_NAME].rstrip("-") or "embedtrain"


def _escape(argument: str) -> str:
    """Kubernetes expands $(NAME) in arguments."""
    return argument.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # people read it


def _dump(*manifests: Mapping[str, Any]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
