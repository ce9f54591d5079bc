"""Who may import whom, generated code, and what the wheel ships."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from architecture.source_tree import PACKAGES, ROOT

BIN = Path(sys.executable).parent


def run(*command: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_imports_run_one_way() -> None:
    done = run(BIN / "lint-imports", "--no-logo")
    assert done.returncode == 0, done.stdout


def test_import_contracts_name_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(settings["root_packages"]) == set(PACKAGES)


def test_generated_code_is_up_to_date() -> None:
    done = run(sys.executable, "protos/generate.py", "--check")
    assert done.returncode == 0, done.stderr


def test_the_wheel_ships_our_names_and_the_protos_alone(tmp_path: Path) -> None:
    # Built from a copy of the tracked files, so that nothing untracked can hide what a clean clone would lack.
    copy = tmp_path / "clone"
    assert run("git", "clone", "--quiet", "--no-hardlinks", ROOT, copy).returncode == 0
    done = run(BIN / "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, copy)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("pagecast-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert {"pagecast/py.typed", "pagecast/v1/generation.proto", "pagecast/v1/generation_pb2.py"} <= set(names)


def test_nothing_in_the_root_is_importable() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == []
    assert [path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()] == []
