"""Pushing to the Hub: the repository is created before a model loads, and a push that fails loses no result.

A push during training that fails is a warning. A failed push of the result is an error, raised after everything else
of the run is saved. The trainer's calls are in checkpoints/resumable_trainer.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from accelerate.logging import get_logger
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from transformers import Trainer, TrainingArguments

from onetrunk.utils.redaction import redact

logger = get_logger(__name__)

HUB_ERRORS = (httpx2.HTTPError, httpx2.InvalidURL, HFValidationError, LocalTokenNotFoundError, OSError)
LONGEST_REASON = 200
ADVICE = {
    401: "the token is not valid; set HF_TOKEN to one that is, or log in again with `hf auth login`",
    403: "the token may not do that; give one with write permission for this repository (hub_model_id says which)",
    404: "there is no such repository or revision, or the token may not see it; look at hub_model_id and hub_revision",
}


class PushFailed(RuntimeError):
    """The push of a result failed; the result is saved."""


def require_push(args: TrainingArguments, repo_type: str = "model") -> None:
    """Create the repository of a run with push_to_hub; only process 0 asks the Hub, once.

    `repo_type` is "model" or "dataset".
    """
    if not args.push_to_hub or args.process_index:
        return
    try:
        repository(args, repo_type)
    except HUB_ERRORS as error:
        raise RuntimeError(
            f"push_to_hub is true and {repo_name(args)} cannot be pushed to: {hub_fault(error)}"
        ) from error


def repo_name(args: TrainingArguments) -> str:
    """Return the name of the repository of a run, as far as the settings say it; it may lack the owner."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


def repository(args: Any, repo_type: str = "model") -> str:
    """Return the whole name, owner/name, of the repository of a run, which is created if it is not there yet."""
    return _create(repo_name(args), args.hub_token or True, args.hub_private_repo, args.hub_revision, repo_type)


@functools.cache
def _create(name: str, token: str | bool, private: bool | None, revision: str | None, repo_type: str) -> str:
    api = HfApi(token=token)
    repo = api.create_repo(name, repo_type=repo_type, private=private, exist_ok=True).repo_id
    # An existing repository passes with a token that only reads.
    api.auth_check(repo, repo_type=repo_type, write=True)
    if revision is not None:
        api.repo_info(repo, repo_type=repo_type, revision=revision)
    return repo


def push_folder(
    folder: Path, args: Any, what: str, *, repo_type: str = "model", patterns: Sequence[str] | None = None
) -> str:
    """Upload what a folder holds, without internal files (`_*`, `.*`), and return the address of the repository.

    Raises:
        PushFailed: the Hub does not take it.
    """
    options = {"repo_type": repo_type, "revision": args.hub_revision, "ignore_patterns": ["_*", ".*"]}
    try:
        name = repository(args, repo_type)
        HfApi().upload_folder(repo_id=name, folder_path=folder, allow_patterns=patterns, **options)
    except HUB_ERRORS as error:
        raise push_failed(f"{what} in {folder}", repo_name(args), error) from error
    return f"https://huggingface.co/{'' if repo_type == 'model' else f'{repo_type}s/'}{name}"


def push_failed(saved: str, repository: str, error: BaseException) -> PushFailed:
    """Return the error of a push; `saved` says what is saved, and where."""
    return PushFailed(f"{saved} and could not be pushed to {repository}: {hub_fault(error)}. `hf upload` pushes it")


def hub_fault(error: BaseException) -> str:
    """Return in a clause why a request to the Hub failed, and what to do."""
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token of the Hub; set HF_TOKEN, or log in with `hf auth login`"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; leave it out to push"
    reason = str(getattr(error, "server_message", None) or error or type(error).__name__)
    reason = re.sub(r"\s+", " ", redact(reason)).strip()[:LONGEST_REASON]
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"HTTP {status}, {ADVICE.get(status, 'the Hub rejected it; try again later')} (it says: {reason})"
    if isinstance(error, HFValidationError):
        return f"that is not a repository name ({reason}); set hub_model_id to owner/name"
    return f"{constants.ENDPOINT} cannot be reached ({reason}); look at the network, or set push_to_hub to false"


def warn_of_push(error: BaseException) -> None:
    """Log that a checkpoint could not be pushed."""
    logger.warning(
        f"a checkpoint was not pushed: {hub_fault(error)}. Training continues; the checkpoint is in output_dir"
    )


def warn_of_failed_pushes(trainer: Trainer) -> None:
    """Log the background pushes that have failed since the last call; Trainer itself never looks at them."""
    jobs = getattr(getattr(trainer, "push_in_progress", None), "jobs", [])
    for job in [job for job in jobs if job.done()]:
        jobs.remove(job)
        if not job.cancelled() and job.exception() is not None:
            warn_of_push(job.exception())
