"""SHA256SUMS of a model folder, in the format of sha256sum: the files it names are checked before anything is made of them."""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagecast_worker.executor import LoadError

MANIFEST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_THREADS = 8


def verify(folder: Path, used: list[Path]) -> None:
    """Raises LoadError naming the first file that is not what the manifest says, or that is used and not in it. No manifest: no check."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return
    wanted: dict[str, str] = {}
    for number, line in enumerate(manifest.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        found = _LINE.fullmatch(line.strip())
        if found is None or Path(found[2]).name != found[2]:
            raise LoadError(f"{manifest}: line {number} is not a SHA-256 and the name of a file in this folder")
        wanted[found[2]] = found[1].lower()
    for path in sorted(used):
        if path.name not in wanted:
            raise LoadError(f"{path}: is not named in {MANIFEST}")
    with ThreadPoolExecutor(_THREADS) as pool:
        names = sorted(wanted)
        for name, digest in zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True):
            if digest != wanted[name]:
                raise LoadError(f"{folder / name}: does not have the SHA-256 that {MANIFEST} states")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LoadError(f"{path}: named in {MANIFEST}, cannot be read ({error.strerror})") from None
