"""Pushing to the Hub: the check before a model loads that a run may push, and what happens when a push fails.

A push during training that fails is a warning. A failed push of the result is an error, raised after everything else
of the run is saved. The trainer's calls are in checkpoints/trainer.py.
"""

from __future__ import annotations

import functools
import re
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
from accelerate.logging import get_logger
from huggingface_hub import HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import Trainer, TrainingArguments

from onetrunk.utils.redaction import redact

logger = get_logger(__name__)

HUB_ERRORS = (httpx2.HTTPError, httpx2.InvalidURL, HFValidationError, LocalTokenNotFoundError, ConnectionError)
LONGEST_REASON = 200
# For all requests of `require_push` together, in seconds.
DEADLINE_S = 60.0
NO_TOKEN = "there is no token of the Hub; set HF_TOKEN, or log in with `hf auth login`"
ADVICE = {
    400: "the Hub does not understand the request; look at hub_model_id",
    401: "the token is not valid; set HF_TOKEN to one that is, or log in again with `hf auth login`",
    402: "the account has to pay for that; look at its billing page",
    403: "the token may not do that; give one with write permission for this repository (hub_model_id says which)",
    404: "there is no such repository, or the token may not see it; look at hub_model_id",
    409: "another operation on the repository is in its way; try again, or set another hub_model_id",
    413: "a file is larger than the Hub takes",
    429: "too many requests were made with this token or from this address; wait and try again",
}


def require_push(args: TrainingArguments, repo_type: str = "model") -> None:
    """Check that a run with push_to_hub can be pushed, and create its repository; only process 0 asks the Hub.

    A check that passed is not repeated in this process. `repo_type` is "model" or "dataset".

    Raises:
        RuntimeError: no token, one that may not write there, no such revision, or a Hub that does not answer.
    """
    if not args.push_to_hub or args.process_index:
        return
    if is_offline_mode():
        raise RuntimeError("push_to_hub is true and HF_HUB_OFFLINE is set; leave one of them out")
    token = args.hub_token or get_token()
    if not token:
        raise RuntimeError(f"push_to_hub is true and {NO_TOKEN}")
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            name, private = repo_name(args), args.hub_private_repo
            answer.set_result(_require_write(name, token, private, args.hub_revision, repo_type))
        except BaseException as error:
            answer.set_exception(error)

    # huggingface_hub's client waits for ever if a server accepts a request and does not answer.
    threading.Thread(target=ask, daemon=True, name="hub").start()
    try:
        answer.result(DEADLINE_S)
    except TimeoutError as error:
        raise RuntimeError(
            f"push_to_hub is true and {constants.ENDPOINT} does not answer within {DEADLINE_S:g} s; look at the"
            " network, and try again"
        ) from error


def repo_name(args: TrainingArguments) -> str:
    """Return the name of the repository of a run, as far as the settings say it."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


@functools.cache
def _require_write(name: str, token: str, private: bool | None, revision: str | None, repo_type: str) -> None:
    api = HfApi(token=token)
    try:
        me = api.whoami()
        if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise RuntimeError(
                f"push_to_hub is true and the token of {me['name']} is for reading; give one with write permission"
            )
        name = name if "/" in name else f"{me['name']}/{name}"
        repo = api.create_repo(name, repo_type=repo_type, private=private, exist_ok=True).repo_id
        try:
            api.auth_check(repo, repo_type=repo_type, write=True)
        except HfHubHTTPError as error:
            # A server that is not Hugging Face's may not have this endpoint.
            if isinstance(error, RepositoryNotFoundError) or error.response.status_code not in (404, 405):
                raise
        if revision is not None:
            api.repo_info(repo, repo_type=repo_type, revision=revision)
    except RevisionNotFoundError as error:
        raise RuntimeError(
            f"push_to_hub is true and {name} has no revision {revision!r}; make it with `hf repos branch create {name}"
            f" {revision}{type_words(repo_type)}`, or leave hub_revision out"
        ) from error
    except HUB_ERRORS as error:
        raise RuntimeError(f"push_to_hub is true and {name} cannot be pushed to: {hub_fault(error)}") from error


def type_words(repo_type: str) -> str:
    """Return the option with which the command `hf` is told that a repository is no model."""
    return "" if repo_type == "model" else f" --repo-type {repo_type}"


def push_folder(
    folder: Path, args: Any, what: str, *, repo_type: str = "model", patterns: Sequence[str] | None = None
) -> str:
    """Upload what a folder holds, without internal files (`_*`, `.*`), and return the address of the repository.

    Args:
        folder: with the result.
        args: the settings of a push, as in `PushArguments`.
        what: the result, for the error message.
        repo_type: "model" or "dataset".
        patterns: of the files that are uploaded; None: all.

    Raises:
        RuntimeError: the Hub does not take it.
    """
    answer: Future[str] = Future()

    def upload() -> None:
        try:
            api = HfApi(token=get_token())
            private = args.hub_private_repo
            repo = api.create_repo(repo_name(args), repo_type=repo_type, private=private, exist_ok=True).repo_id
            api.upload_folder(
                repo_id=repo,
                repo_type=repo_type,
                folder_path=folder,
                revision=args.hub_revision,
                allow_patterns=None if patterns is None else list(patterns),
                ignore_patterns=["_*", ".*"],
            )
            answer.set_result(repo)
        except BaseException as error:
            answer.set_exception(error)

    # In a thread, so that a signal ends the command although the Hub's client waits for ever.
    threading.Thread(target=upload, daemon=True, name="hub").start()
    try:
        place = "" if repo_type == "model" else f"{repo_type}s/"
        return f"https://huggingface.co/{place}{answer.result()}"
    except HUB_ERRORS as error:
        words = ["hf", "upload", repo_name(args), str(folder), ".", "--exclude", "_*", "--exclude", ".*"]
        words += [word for pattern in patterns or () for word in ("--include", pattern)]
        words += [] if args.hub_revision is None else ["--revision", args.hub_revision]
        raise RuntimeError(
            f"{what} in {folder} and could not be pushed: {hub_fault(error)};"
            f" `{shlex.join(words)}{type_words(repo_type)}` pushes it"
        ) from error


def _one_line(text: str) -> str:
    line = re.sub(r"\s+", " ", redact(text)).strip()
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."


def hub_fault(error: BaseException) -> str:
    """Return in a clause why a request to the Hub failed, and what to do."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        advice = ADVICE.get(status, "the Hub fails; try again later" if status >= 500 else "look at hub_model_id")
        message = _one_line(error.server_message or "")
        return f"HTTP {status}, {advice}" + (f" (it says: {message})" if message else "")
    if isinstance(error, LocalTokenNotFoundError):
        return NO_TOKEN
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; leave it out"
    if isinstance(error, HFValidationError):
        return f"that is no name of a repository ({_one_line(str(error))}); set hub_model_id to owner/name"
    if isinstance(error, httpx2.TimeoutException):
        return f"{constants.ENDPOINT} does not answer in time; look at the network, and try again"
    reason = _one_line(str(error)) or type(error).__name__
    return f"{constants.ENDPOINT} cannot be reached ({reason}); look at the network, or set push_to_hub to false"


class PushFailed(RuntimeError):
    """The push of a trainer's result failed; the result is saved, and the message contains the command to push it."""

    def __init__(self, trainer: Trainer, error: BaseException):
        args, name = trainer.args, trainer.hub_model_id or trainer.args.hub_model_id
        # Trainer leaves the same files out of a push: checkpoints, and the run's internal files.
        words = ["hf", "upload", str(name), args.output_dir, ".", "--exclude", "checkpoint-*", "--exclude", "_*"]
        words += ["--revision", args.hub_revision] if args.hub_revision else []
        super().__init__(
            f"the push to {name} failed: {_reason(error)}. The result is whole in {args.output_dir};"
            f" `{shlex.join(words)}` pushes it"
        )


def warn_of_push(error: BaseException) -> None:
    """Log that a checkpoint could not be pushed."""
    logger.warning(
        f"a checkpoint was not pushed: {_reason(error)}. Training continues; the checkpoint is in output_dir"
    )


def warn_of_failed_pushes(trainer: Trainer) -> None:
    """Log the background pushes that have failed since the last call; Trainer itself never looks at them."""
    jobs = getattr(getattr(trainer, "push_in_progress", None), "jobs", [])
    for job in [job for job in jobs if job.done()]:
        jobs.remove(job)
        if not job.cancelled() and job.exception() is not None:
            warn_of_push(job.exception())


def _reason(error: BaseException) -> str:
    return hub_fault(error) if isinstance(error, HUB_ERRORS) else _one_line(str(error))
