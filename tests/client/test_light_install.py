"""The client works where only grpcio, protobuf and googleapis-common-protos are installed, and loads nothing before it is used."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from client.fake_server import FakeServer

BASE = {"grpc", "google", "typing_extensions", "pagecast", "pagecast_wire", "pagecast_scheduler", "pagecast_worker", "pagecast_kernels"}

BLOCKER = f"""
import sys
BASE = {BASE!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in BASE and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_the_client_runs_on_the_base_install(server: FakeServer) -> None:
    code = BLOCKER + (
        "from pagecast import Client, AsyncClient, SamplingParams\n"
        "with Client(sys.argv[1]) as client:\n"
        "    last = [type(event).__name__ for event in client.stream('x')][-1]\n"
        "    print(client.generate('x', SamplingParams(seed=1)).text, client.health(), last)\n"
        "    try: client.generate('bad')\n"
        "    except Exception as error: print(type(error).__name__, len(error.violations))\n"
    )
    done = python(code, server.target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ab", "SERVING", "Completed", "InvalidRequest", "2"]


def test_client_commands_run_on_the_base_install(server: FakeServer) -> None:
    code = BLOCKER + "from pagecast.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = python(code, "generate", "x", "--target", server.target)
    assert (done.returncode, done.stdout) == (0, "ab\n"), done.stderr
    assert "2 tokens" in done.stderr
    done = python(code, "status", "--check", "--target", server.target)
    assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr


def test_what_is_missing_for_a_server_is_named_in_one_line() -> None:
    done = python(BLOCKER + "from pagecast.cli.main import main\nsys.exit(main(sys.argv[1:]))", "scheduler", "--run-dir", "/nowhere")
    assert done.returncode == 2
    assert "pip install 'pagecast[serve]'" in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_is_missing_for_the_embedded_engine_is_named() -> None:
    done = python(BLOCKER + "from pagecast import LLM\nLLM()")
    assert done.returncode == 1
    assert "need the package msgspec" in done.stderr and done.stderr.rstrip().endswith("pip install 'pagecast[serve]'")
    assert "During handling" not in done.stderr


def test_what_is_missing_for_the_conformance_suite_is_named_before_it_begins(server: FakeServer) -> None:
    done = python(BLOCKER + "from pagecast.cli.main import main\nsys.exit(main(sys.argv[1:]))", "conformance", "--target", server.target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'pagecast[conformance]'" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_gateways_extra_is_enough_for_a_gateway() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[\[>=; ]", word)[0] for word in project["gateway"]}
    others = {"msgspec", "numpy", "zmq", "prometheus_client", "torch", "transformers", "tokenizers", "jinja2", "cryptography", "gguf"}
    blocked = others - brought
    code = BLOCKER.replace("top not in BASE and top not in sys.stdlib_module_names", f"top in {blocked!r}")
    done = python(code + "import pagecast_wire.lifeline, pagecast_scheduler.gateway.main")
    assert done.returncode == 0, done.stderr


def test_a_measurement_names_the_installation_that_brings_its_packages() -> None:
    done = python(BLOCKER + "from pagecast.cli.main import main\nsys.exit(main(sys.argv[1:]))", "bench", "report", "--write")
    assert done.returncode == 2 and "needs the package" in done.stderr
    assert "make setup" in done.stderr and len(done.stderr.splitlines()) == 1


def test_importing_the_package_loads_nothing_else() -> None:
    done = python("import sys; before = set(sys.modules); import pagecast; print(*sorted(set(sys.modules) - before))")
    loaded = [name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names]
    assert loaded == ["pagecast"]


def test_every_public_name_is_there_and_a_wrong_one_is_refused() -> None:
    done = python(
        "import pagecast\n"
        "for name in pagecast._HOME: assert getattr(pagecast, name).__name__ == name and name in dir(pagecast)\n"
        "try: pagecast.Nothing\n"
        "except AttributeError as error: print('refused')\n"
    )
    assert done.stdout == "refused\n", done.stderr
