"""Fetches models from a Hugging Face hub into its library's own cache: weights, configuration and tokenizer, and nothing that could run.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which does the work: what was fetched in part
goes on where it stopped. Files that the hub knows the SHA-256 of are checked against it.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pagecast.errors import HubError

PATTERNS = (
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)
"""What is fetched. Never *.py, *.bin or *.pt, which hold code."""
LEFT = ("consolidated*.safetensors", "*/*")
"""What is not although its name would do: Mistral's folders hold all weights a second time, others have folders for other programs."""
_CHOICE: dict[str, Any] = {"allow_patterns": list(PATTERNS), "ignore_patterns": list(LEFT)}

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 10.0


def is_hub_name(name: str) -> bool:
    """Whether a name has the form ORG/MODEL and is no path of this machine."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def find(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model that was fetched whole; None if it was not. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, **_CHOICE))
    except (LocalEntryNotFoundError, ValueError):
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return False
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    wanted: set[str] = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / file).exists() for file in wanted)


def pull(name: str, revision: str | None = None) -> Path:
    """Fetch a model, or what is missing of it. Returns its folder. Raises HubError in one line."""
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"model {name} is not here, and HF_HUB_OFFLINE forbids to fetch it")
    try:
        folder = Path(snapshot_download(name, revision=revision, etag_timeout=_TIMEOUT_S, **_CHOICE))
    except GatedRepoError:
        raise HubError(f"model {name} at {where} wants its terms accepted and a token in HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise HubError(f"no model {name} at {where} (a private one needs a token in HF_TOKEN)") from None
    except RevisionNotFoundError:
        raise HubError(f"model {name} at {where} has no revision {revision!r}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError):
        raise HubError(f"cannot fetch model {name}: {where} cannot be reached") from None
    except HfHubHTTPError as error:
        raise HubError(f"cannot fetch model {name}: {where} answered {error.response.status_code}") from None
    except OSError as error:
        raise HubError(f"cannot fetch model {name}: {error.strerror or 'the files cannot be written'}") from None
    _check(name, folder)
    return folder


def _check(name: str, folder: Path) -> None:
    """Large files are kept under their SHA-256. One that does not match is removed, to be fetched anew. Raises HubError."""
    if not _is_whole(folder):
        raise HubError(f"model {name} has no whole set of config.json and .safetensors files, which is all that is fetched")
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.resolve()
        if _SHA256.fullmatch(blob.name):
            with blob.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != blob.name:
                blob.unlink()
                raise HubError(f"file {path.name} of model {name} does not have the SHA-256 that the hub states; pull it again")
