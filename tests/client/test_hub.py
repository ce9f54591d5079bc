"""Models from a hub, which is a server on loopback here: what is fetched, going on after a cut, wrong bytes, and no network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.fake_hub import FakeHub

from pagecast import hub

NAME = "some-org/some.model-1B"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}', "tokenizer.json": b"{}", "README.md": b"# words",
    "modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"code", "consolidated.safetensors": b"the same once more",
    "onnx/model.safetensors": b"and for something else",
    "model-00001-of-00002.safetensors": os.urandom(300_000), "model-00002-of-00002.safetensors": os.urandom(1000),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
}  # fmt: skip
LEFT = ("README.md", "modeling_own.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors")
FETCHED = {name for name in FILES if name not in LEFT}


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    server = FakeHub(NAME, dict(FILES))
    yield server
    server.close()


def pagecast(home: Path, endpoint: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    kept |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | env
    command = [sys.executable, "-m", "pagecast.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=kept, timeout=120)


def test_only_weights_configuration_and_tokenizer_are_fetched(fake: FakeHub, tmp_path: Path) -> None:
    done = pagecast(tmp_path, fake.endpoint, "pull", NAME)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == FETCHED
    assert all((folder / name).read_bytes() == FILES[name] for name in FETCHED)
    assert not any(path.endswith((".py", ".bin", ".md")) for _, path, _ in fake.asked)
    # What is here is found without a hub, and served under its name's folder.
    fake.close()
    code = "from pagecast import models; models.fetch(NAME); print(models.resolve(NAME)); print(models.display_name(NAME))"
    found = subprocess.run(
        [sys.executable, "-c", code.replace("NAME", repr(NAME))], capture_output=True, text=True, timeout=60,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": fake.endpoint},
    )  # fmt: skip
    assert found.stdout.split() == [str(folder.resolve()), NAME] or found.stdout.split() == [str(folder), NAME], found.stderr


def test_a_cut_download_goes_on_where_it_stopped(fake: FakeHub, tmp_path: Path) -> None:
    large = "model-00001-of-00002.safetensors"
    fake.files[large] = os.urandom(24 << 20)
    fake.cut[large] = 22 << 20  # more than the library writes at once
    done = pagecast(tmp_path, fake.endpoint, "pull", NAME)
    if done.returncode:  # the library may also leave it to the next call
        assert len(done.stderr.strip().splitlines()) == 1
        done = pagecast(tmp_path, fake.endpoint, "pull", NAME)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / large).read_bytes() == fake.files[large]
    starts = [asked for _, path, asked in fake.asked if path.endswith(large) and asked.startswith("bytes=") and asked != "bytes=0-"]
    assert starts and int(starts[-1].removeprefix("bytes=").split("-")[0]) > 0


def test_bytes_that_are_not_what_the_hub_states_are_refused(fake: FakeHub, tmp_path: Path) -> None:
    small = "model-00002-of-00002.safetensors"
    right = fake.files[small]
    stated = fake.etag(small)
    fake.etag = lambda name, plain=fake.etag: stated if name == small else plain(name)  # type: ignore[method-assign]
    fake.files[small] = bytes(len(right))
    done = pagecast(tmp_path, fake.endpoint, "pull", NAME)
    assert done.returncode == 2 and f"file {small} of model {NAME} does not have the SHA-256" in done.stderr
    fake.files[small] = right
    assert pagecast(tmp_path, fake.endpoint, "pull", NAME).returncode == 0


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["pull", "no-such/model"], {}, "no model no-such/model at http://127.0.0.1"),
        (["pull", "just-a-name"], {}, "is named ORG/MODEL, not 'just-a-name'"),
        (["pull", NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        (["serve", NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        (["pull", NAME], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to fetch it"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_line(
    fake: FakeHub, tmp_path: Path, words: list[str], env: dict[str, str], said: str
) -> None:
    done = pagecast(tmp_path, fake.endpoint, *words, **env)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(("name", "is_one"), [
    ("org/model", True), ("Qwen/Qwen2.5-7B-Instruct", True), ("model", False), ("./org/model", False), ("/org/model", False),
    ("org/model/more", False), ("../model", False), ("org/", False),
])  # fmt: skip
def test_names_at_a_hub(name: str, is_one: bool) -> None:
    assert hub.is_hub_name(name) is is_one
