"""Resolves a folder or a model id on the Hugging Face hub to a local folder.

Downloading is done by huggingface_hub, with its cache, progress bars, offline mode and settings (HF_HOME, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE). This file selects the files to fetch and turns errors into one line. The client is imported
on use, because that takes 0.2 s.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, ModelNotFoundError, ParameterError
from ..output_files import undone_by_signals
from ..progress import bars_shown
from .gguf.file import all_shards, choose_file
from .load_model import is_model_file
from .weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_weights, is_index, list_weights, read_index

_log = logging.getLogger("minillm")

_NAMES = """
config.json generation_config.json hf_quant_config.json quantize_config.json quant_config.json tokenizer.json
tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt tokenizer.model
sentencepiece.bpe.model spiece.model spm.model source.spm vocab.txt chat_template.jinja
additional_chat_templates/tool_use.jinja modules.json sentence_bert_config.json
config_sentence_transformers.json
"""
SMALL_FILES = {
    *_NAMES.split(),
    *(f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "xlm-roberta")),
    *(f"{i}_Pooling/config.json" for i in (1, 2, 3)),
    *(f"{i}_Normalize/config.json" for i in (2, 3, 4, 5)),
    "1_LogitScore/config.json",
    *(f"{i}_Dense/{name}" for i in (2, 3, 4) for name in ("config.json", "model.safetensors", "pytorch_model.bin")),
}
"""Files of a model besides its weights; sentence-transformers' are in folders named by their place."""
_PART = "*.????????.incomplete"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@contextmanager
def _client(repo_id: str, revision: str | None) -> Iterator[None]:
    """Calls of the client: with its progress bars where ours are shown, and with its errors as ModelNotFoundError.

    HF_HUB_DISABLE_PROGRESS_BARS has the last word on the bars. If a signal ends the command line, what is fetched only
    in part is removed: since release 2.4 the client writes to a file with a name of its own for each download,
    ETAG.RANDOM.incomplete, and begins anew the next time. Older ones go on with ETAG.incomplete, which stays.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    utils: Any = huggingface_hub.utils  # which documents these functions, without declaring them exported
    hide = not bars_shown() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    hide = hide and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"), "blobs")
        before = set(blobs.glob(_PART))

        def remove_parts() -> None:
            for path in set(blobs.glob(_PART)) - before:
                path.unlink(missing_ok=True)

        with undone_by_signals(remove_parts):
            yield
    except _client_errors() as error:
        raise ModelNotFoundError(_explain(error, repo_id, revision)) from error
    finally:
        if hide:
            utils.enable_progress_bars()


def find_model(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The local folder of a model: the one named, or the snapshot of a hub id in huggingface_hub's cache.

    A GGUF file may be named itself: a local one, or owner/name/file.gguf of the hub.

    Of a hub repository, the configuration, the tokenizer and one copy of the weights are fetched: safetensors if there
    are any, else pytorch_model.bin, else its one GGUF file. Cached files are not fetched again: a full commit hash then
    needs no network, a branch or tag one request for its newest commit. If the hub cannot be reached, a complete cached
    snapshot is used, with a logged warning unless HF_HUB_OFFLINE is set.

    Args:
        path_or_id: an existing folder, or an id of the form "owner/name". A folder takes precedence.
        revision: branch, tag or commit hash on the hub; the main branch if None.

    Raises:
        ModelNotFoundError: there is no such folder, id or revision, the repository lacks the files of a model, access
            is denied, or the hub cannot be reached and the cache does not hold the model.
        CheckpointError: the repository's index of shards is unusable.
        ParameterError: a revision was given for a local folder.
    """
    name = os.fspath(path_or_id)
    return _local_folder(name, revision) or (_fetch_file if is_hub_file(name) else _find_on_hub)(name, revision)


class Cached(NamedTuple):
    """A snapshot of a model in huggingface_hub's cache."""

    name: str
    """Hub id, and the revision after an @ where there are several"""
    folder: Path
    problem: str = ""
    """One line, if the cache is damaged here"""


def cached_models() -> list[Cached]:
    """The snapshots of models in huggingface_hub's cache, by name; none if there is no cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    models = []
    for repo in cache.repos:
        for revision in repo.revisions if repo.repo_type == "model" else ():
            version = min(revision.refs, default=revision.commit_hash[:8])
            name = repo.repo_id if len(repo.revisions) == 1 else f"{repo.repo_id}@{version}"
            models.append(Cached(name, revision.snapshot_path))
    for warning in cache.warnings:
        parts = re.search(r"models--([^\s/\\]+)", str(warning))
        if parts:
            folder = Path(constants.HF_HUB_CACHE, parts[0])
            models.append(Cached(parts[1].replace("--", "/"), folder, _one_line(warning)))
    return sorted(models)


def list_hub_files(repo_id: str, *, revision: str | None = None) -> set[str]:
    """The names of a hub repository's files.

    Raises:
        ModelNotFoundError: there is no such repository or revision, access is denied, or the hub cannot be reached.
    """
    with _client(repo_id, revision):
        return _repository(repo_id, revision)[1]


def _repository(repo_id: str, revision: str | None) -> tuple[str | None, set[str]]:
    """The commit of a revision, and the names of its files."""
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    return info.sha, {sibling.rfilename for sibling in info.siblings or ()}


def find_file(repo_id: str, name: str, *, revision: str | None = None) -> Path:
    """One file of a hub repository in the local cache, fetched if need be.

    Raises:
        ModelNotFoundError: the repository has no such file; or as `find_model`.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _client(repo_id, revision):
        try:
            return Path(hf_hub_download(repo_id, name, revision=revision))
        except LocalEntryNotFoundError:  # which is an EntryNotFoundError, and says that the hub cannot be reached
            raise
        except EntryNotFoundError as error:
            raise ModelNotFoundError(f"{_title(repo_id, revision)} has no file {name!r:.100}") from error


def find_config(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The local folder of a model's config.json, the only file fetched for a hub id; or its GGUF file.

    Raises:
        ModelNotFoundError, ParameterError: as `find_model`.
    """
    name = os.fspath(path_or_id)
    folder = _local_folder(name, revision)
    if folder is not None:
        return folder
    if is_hub_file(name):
        return _fetch_file(name, revision)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        list_hub_files(name, revision=revision)  # fails at once where there is no network; a download tries five times
    except ModelNotFoundError as error:
        if isinstance(error.__cause__, HFValidationError):
            raise
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise
        return Path(cached).parent
    with _client(name, revision):
        try:
            return Path(hf_hub_download(name, "config.json", revision=revision)).parent
        except EntryNotFoundError:
            return _find_on_hub(name, revision)  # a GGUF file has it inside


def find_adapter(path_or_id: str | os.PathLike[str]) -> Path:
    """The local folder of a LoRA adapter; for a hub id, its configuration and weights are fetched.

    Raises:
        ModelNotFoundError: as `find_model`.
    """
    name = os.fspath(path_or_id)
    return _local_folder(name, None) or _fetch_files(name, [ADAPTER_CONFIG, *ADAPTER_WEIGHTS])


def find_tokenizer(path_or_id: str | os.PathLike[str]) -> Path:
    """The local folder or file of a tokenizer; for a hub id, the repository's small files or its GGUF file is fetched.

    Raises:
        ModelNotFoundError: as `find_model`.
    """
    name = os.fspath(path_or_id)
    path = _local_folder(name, None, or_file=True)
    if path is not None:
        return path
    return _fetch_file(name, None) if is_hub_file(name) else _fetch_files(name, sorted(SMALL_FILES))


def _fetch_files(repo_id: str, names: list[str]) -> Path:
    """The local folder of these files of a repository, of those that it has."""
    from huggingface_hub import snapshot_download

    with _client(repo_id, None):
        return Path(snapshot_download(repo_id, allow_patterns=names))


def _local_folder(name: str, revision: str | None, *, or_file: bool = False) -> Path | None:
    """The folder or GGUF file of this name, or any file if `or_file`; None if the name is a hub id.

    A folder that has a GGUF file and no other weights stands for that file.
    """
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir() or (or_file and path.is_file()), os.path.lexists(path)
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a NUL character, no such user after the ~
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"{name!r:.100} cannot be looked up as a folder: {reason!s:.100}") from error
    is_file = exists and bool(name) and is_model_file(path)
    if (is_folder or is_file) and name:
        if revision is not None:
            raise ParameterError(
                f"revision {revision!r:.60} has no effect on the local {'file' if is_file else 'folder'} "
                f"{name!r:.200}: leave it out"
            )
        return path if path.is_file() else gguf_in(path) or path
    if exists and name:
        usual = "a folder: give the folder that holds config.json and the weights, or a GGUF file"
        what = "a folder or a file" if or_file else usual
        raise ModelNotFoundError(f"{name!r:.150} is not {what}")
    is_file = name.lower().endswith(".gguf")
    old = not is_file and re.fullmatch(r"[\w-][\w.-]*", name)  # a model of the hub's first years has no owner: "gpt2"
    if not old and (name.startswith((".", "/", "~")) or name.count("/") != 1 + is_hub_file(name)):
        what, form = ("file", "owner/name/file.gguf") if is_file else ("folder", "owner/name")
        raise ModelNotFoundError(f"there is no {what} {name!r:.200}; a model of the hub is named {form}")
    return None


def is_hub_file(name: str) -> bool:
    """True for the name of a GGUF file in a hub repository: owner/name/file.gguf."""
    return name.count("/") == 2 and name.lower().endswith(".gguf")


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that holds no other weights; None if there is none.

    Raises:
        CheckpointError: there are several, or the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    name = choose_file(names, str(folder)) if find_weights(names) is None else None
    return None if name is None else folder / name


def _fetch_file(name: str, revision: str | None) -> Path:
    """The local copy of owner/name/file.gguf, and of the other files of its model if it is one of several."""
    repo_id, _, file = name.rpartition("/")
    first, *_ = [find_file(repo_id, shard, revision=revision) for shard in all_shards(file)]
    return first


def _find_on_hub(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub.errors import OfflineModeIsEnabled

    cached = _find_in_cache(repo_id, revision)
    if cached is not None and _COMMIT.fullmatch(revision or ""):
        return cached
    try:
        with _client(repo_id, revision):
            return _download(repo_id, revision, cached)
    except ModelNotFoundError as error:
        if cached is None or error.__cause__ is None:  # the hub has answered: the repository is no model
            raise
        if not isinstance(error.__cause__, OfflineModeIsEnabled):
            _log.warning("using the cached copy of %s: %s", repo_id, error)
        return cached


def _client_errors() -> tuple[type[Exception], ...]:
    """Exceptions that the client may raise.

    Its own errors and those of its cache (OSError; HFValidationError is a ValueError), invalid responses (ValueError),
    hf_xet's RuntimeError, and the errors of its HTTP library: requests before 1.0 (OSError), httpx since (whose base
    class is a base of HfHubHTTPError).
    """
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__


def _find_in_cache(repo_id: str, revision: str | None) -> Path | None:
    """The cached snapshot of this revision if it has the configuration and all weights, or its one GGUF model.

    The client takes no snapshot for complete of which not all files were fetched, so the configuration is asked for.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    except HFValidationError as error:
        raise ModelNotFoundError(_explain(error, repo_id, revision)) from error
    if isinstance(config, str) and _has_weights(folder := Path(config).parent):
        return folder
    errors: tuple[type[Exception], ...] = CheckpointError, *_client_errors()
    try:
        path = gguf_in(Path(snapshot_download(repo_id, revision=revision, local_files_only=True)))
    except errors:
        return None
    complete = path is not None and all(path.with_name(name).is_file() for name in all_shards(path.name))
    return path if complete else None


def _has_weights(folder: Path) -> bool:
    try:
        list_weights(folder)
    except CheckpointError:
        return False
    return True


def _download(repo_id: str, revision: str | None, cached: Path | None) -> Path:
    """Fetch the files needed and not yet cached. Small files come first, so a snapshot with weights is complete."""
    from huggingface_hub import snapshot_download

    commit, present = _repository(repo_id, revision)
    small = SMALL_FILES & present
    if cached is not None and cached.name == commit and all((cached / name).is_file() for name in small):
        return cached
    weights = find_weights(present)
    if weights is None and (file := choose_file(list(present), _title(repo_id, revision))) is not None:
        return _fetch_file(f"{repo_id}/{file}", revision)
    if weights is None or "config.json" not in present:
        lacking = "config.json" if weights else "weights (safetensors or pytorch_model.bin)"
        raise ModelNotFoundError(f"{_title(repo_id, revision)} has no {lacking}: minillm cannot load it")
    files, sharded = {weights}, is_index(weights)
    first = small | files if sharded else small
    folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=sorted(first)))
    if sharded:
        files = set(read_index(folder / weights).values())
        if files - present:
            missing = min(files - present)
            raise ModelNotFoundError(f"{_title(repo_id, revision)} lacks {missing!r}, which {weights} lists")
    folder = Path(snapshot_download(repo_id, revision=folder.name, allow_patterns=sorted(files)))
    if not _has_weights(folder):  # the client returns a partial snapshot if the hub stops responding between two calls
        raise ModelNotFoundError(f"{_title(repo_id, revision)} was fetched only in part: try again")
    return folder


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    """One-line message for an error of the client."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r:.100} is neither a folder nor a valid hub id: {_one_line(error)}"
    model, log_in = _title(repo_id, revision), "set HF_TOKEN or run `hf auth login`"
    offline = errors.LocalEntryNotFoundError if constants.HF_HUB_OFFLINE else errors.OfflineModeIsEnabled
    if isinstance(error, errors.GatedRepoError):  # which is a RepositoryNotFoundError
        message = f"{model} is gated: accept its terms on its page, then {log_in}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = f"the hub has no public model {repo_id!r}: check the spelling, or for a private one {log_in}"
    elif isinstance(error, errors.RevisionNotFoundError):
        message = f"model {repo_id!r:.100} has no revision {revision!r:.60}: give a branch, a tag or a full commit hash"
    elif isinstance(error, errors.OfflineModeIsEnabled | offline):
        message = f"{model} is not complete in the local cache, and HF_HUB_OFFLINE is set: unset it to download it"
    elif getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        message = f"the hub denies access to {model}: {log_in} with an account that may read it"
    else:
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # what failed, without the client's words about its cache
        reason = f"({_one_line(error)}); try again, complete files are kept"
        message = f"{model} could not be fetched from {constants.ENDPOINT} {reason}"
    return message if "/" in repo_id else f"there is no folder {repo_id!r:.100}, and {message}"


def _title(repo_id: str, revision: str | None) -> str:
    return f"model {repo_id!r:.100} (revision {revision or 'main'!r:.60})"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 145 else text[:145] + " ..."
