"""What a training may want to talk to: the Hugging Face Hub, wandb, SLURM. Every question ends after seconds."""

import json
import netrc
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from embedtrain.doctor.finding import Finding, Level

_TOPIC = "services"
_SECONDS = 8.0
_ON = ("1", "true", "yes", "on")


def check_services(environment: Mapping[str, str], *, ask_hub: bool) -> list[Finding]:
    """Of this rank's host.

    Args:
        environment: of the process.
        ask_hub: whether the Hub is asked.
    """
    return [*_of_hub(environment, ask=ask_hub), _of_wandb(environment), _of_slurm(environment)]


def _of_hub(environment: Mapping[str, str], *, ask: bool) -> list[Finding]:
    from huggingface_hub import constants, get_token

    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
               if environment.get(name, "").lower() in _ON]  # fmt: skip
    if offline:
        do = "Models and data sets have to lie in directories, or in HF_HOME already; unset it to fetch them."
        return [Finding(_TOPIC, "hub", f"not asked, because {offline[0]} is set", Level.note, do)]
    if not ask:
        return [Finding(_TOPIC, "hub", "not asked, because hub=false or quick=true")]
    endpoint, token = constants.ENDPOINT, get_token()
    reached = _within(lambda: _get(f"{endpoint}/api/models?limit=1", None))
    if isinstance(reached, str):
        do = "Fetch models where there is a network, bring HF_HOME here and set HF_HUB_OFFLINE=1; or set HTTPS_PROXY."
        return [Finding(_TOPIC, "hub", f"{endpoint} is out of reach ({reached})", Level.warning, do)]
    findings = [Finding(_TOPIC, "hub", f"{endpoint} answers")]
    if token is None:
        do = "For models that ask for consent (Llama, Gemma): hf auth login, or set HF_TOKEN."
        return [*findings, Finding(_TOPIC, "hub token", "none", Level.note, do)]
    who = _within(lambda: _get(f"{endpoint}/api/whoami-v2", token))
    if isinstance(who, str) and who not in ("HTTP 401", "HTTP 403"):
        return [*findings, Finding(_TOPIC, "hub token", f"there is one; not checked ({who})", Level.note,
                                   "Ask again later: the Hub answers only so many such questions.")]  # fmt: skip
    if isinstance(who, str):
        do = "Make a new one (hf auth login), or unset HF_TOKEN: public models are refused as well with a wrong one."
        return [*findings, Finding(_TOPIC, "hub token", f"is not accepted ({who})", Level.problem, do)]
    try:
        name = str(json.loads(who)["name"])
    except (ValueError, KeyError, TypeError):
        do = "Look what stands between: a proxy or a page to log in to a network."
        return [*findings, Finding(_TOPIC, "hub token", f"{endpoint} answers, but not as the Hub", Level.warning, do)]
    return [*findings, Finding(_TOPIC, "hub token", f"is that of {name}")]


def _of_wandb(environment: Mapping[str, str]) -> Finding:
    mode = environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        do = "Unset it to send figures; what is kept offline is sent by wandb sync."
        return Finding(_TOPIC, "wandb", f"WANDB_MODE={mode}: nothing is sent", Level.note, do)
    if environment.get("WANDB_API_KEY"):
        return Finding(_TOPIC, "wandb", "WANDB_API_KEY is set; not tried, because that would begin a session")
    try:
        known = netrc.netrc(os.path.expanduser("~/.netrc")).authenticators("api.wandb.ai")
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is not None:
        return Finding(_TOPIC, "wandb", "a key is in ~/.netrc; not tried, because that would begin a session")
    do = "For tracking.wandb=true: wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline."
    return Finding(_TOPIC, "wandb", "no key", Level.note, do)


def _of_slurm(environment: Mapping[str, str]) -> Finding:
    job = environment.get("SLURM_JOB_ID")
    if job is not None:
        nodes, tasks = environment.get("SLURM_NNODES", "?"), environment.get("SLURM_NTASKS", "?")
        return Finding(_TOPIC, "slurm", f"in job {job}: {nodes} nodes, {tasks} tasks")
    return Finding(_TOPIC, "slurm", "sbatch is there" if shutil.which("sbatch") else "none on this host")


class _Answer(bytes):
    """What a server said."""


def _get(address: str, token: str | None) -> "_Answer | str":
    """The answer, or why there is none."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS / 2) as answer:  # noqa: S310
            return _Answer(answer.read(1 << 16))
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def _within(ask: Callable[[], _Answer | str]) -> _Answer | str:
    """An answer within seconds: looking up a name has no time-out of its own."""
    answers: SimpleQueue[_Answer | str] = SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask()), daemon=True).start()
    try:
        return answers.get(timeout=_SECONDS)
    except Empty:
        return f"no answer within {_SECONDS:.0f} s"
