"""A checkpoint from the Hugging Face Hub: fetched into its cache, where a package can link to the blobs."""

from __future__ import annotations

import re
from pathlib import Path

from builder import paths
from builder.errors import MachineError, Refused, one_line
from builder.tokens import TEXT_FILES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FETCHED = ("config.json", "hf_quant_config.json", "*.safetensors", "*.safetensors.index.json", *TEXT_FILES)
"""File names by pattern: weights, what describes them, tokenizer and template; never code or pickles."""
SUBFOLDERS = "*/*"


def checkpoint_folder(src: str | Path, revision: str | None = None, *, quiet: bool = True) -> Path:
    """`src` itself where it is there, else the cached snapshot of the Hub repository of that id, fetched if need be.

    revision: a branch, tag or commit of the Hub. quiet: without huggingface_hub's own bars. Raises Refused for what is
    neither folder nor a repository that can be had, MachineError without a network.
    """
    if paths.exists(Path(src)):
        if revision is not None:
            raise Refused(
                "--revision", expected="a Hub id", found=f"the folder {src}", remedy="leave --revision out for a folder"
            )
        return Path(src)
    mistyped = paths.exists(Path(src).parent)  # owner/name where a folder owner is here
    if mistyped or not HUB_ID.fullmatch(str(src)):
        raise Refused(
            src,
            expected="a checkpoint folder or a Hub id (owner/name)",
            found="no such folder",
            remedy="check the path",
        )
    return _snapshot(str(src), revision, quiet=quiet)


def _snapshot(repository: str, revision: str | None, *, quiet: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (disable_progress_bars if quiet else enable_progress_bars)()
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(FETCHED), ignore_patterns=[SUBFOLDERS]
        )
    except errors.GatedRepoError:
        remedy = "accept its terms and run hf auth login"
        raise _refused(repository, "one you may read", "a gated repository", remedy) from None
    except errors.RepositoryNotFoundError:
        found = "no such folder and no such repository"
        remedy = "check the name, or run hf auth login"
        raise _refused(repository, "a checkpoint folder or a Hub id", found, remedy) from None
    except errors.RevisionNotFoundError:
        raise _refused(f"{repository} --revision", "a branch, tag or commit", revision, "check the name") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise MachineError(
            f"{repository}: no such folder, and the Hub cannot be reached: {one_line(_first_line(error))}"
        ) from error
    except errors.HFValidationError as error:
        raise _refused(repository, "a Hub id", _first_line(error), "check the name") from None
    except Exception as error:  # httpx's and the operating system's own
        raise MachineError(f"{repository}: it cannot be fetched: {one_line(_first_line(error))}") from error
    return Path(folder)


def _refused(subject: str, expected: str, found: object, remedy: str) -> Refused:
    return Refused(subject, expected=expected, found=found, remedy=remedy)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
