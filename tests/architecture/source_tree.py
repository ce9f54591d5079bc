"""Where the sources are, for the tests that read them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "pagecast": ROOT / "client/pagecast", "pagecast_wire": ROOT / "protos/pagecast_wire",
    "pagecast_scheduler": ROOT / "scheduler_service/pagecast_scheduler", "pagecast_worker": ROOT / "gpu_worker/pagecast_worker",
    "pagecast_kernels": ROOT / "kernels/pagecast_kernels",
}


def sources() -> list[Path]:
    """Every Python file that we wrote and ship; generated code left out."""
    return sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py") if "_pb2" not in path.name)


def tracked() -> list[Path]:
    """Every file of the repository that is committed."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
