"""Weights that are read in pieces by several threads are those of the file, in every part that a rank may hold."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagecast_worker.executor import LoadError
from pagecast_worker.loading import streaming
from pagecast_worker.models.weights import Source
from pagecast_worker.parallel import Part

GPU = pytest.param(torch.device("cuda", 0), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(params=[torch.device("cpu"), GPU], ids=["cpu", "cuda"])
def device(request):
    return request.param


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few rows, so that a small file has many and every slot is used again and again."""
    monkeypatch.setattr(streaming, "PIECE_BYTES", 4096)
    monkeypatch.setattr(streaming, "READING", 3)
    monkeypatch.setattr(streaming, "COPYING", 2)


def files(folder):
    """Two files of tensors whose values tell where they stand."""
    tensors = {
        "a": torch.arange(300 * 40, dtype=torch.float32).view(300, 40).bfloat16(), "b": torch.arange(999, dtype=torch.bfloat16),
        "c": torch.randn(130, 7, 11), "d": torch.randn(60, 8).half(),
    }  # fmt: skip
    paths = [folder / "one.safetensors", folder / "two.safetensors"]
    save_file({name: tensors[name] for name in "ac"}, paths[0], metadata={"format": "pt"})
    save_file({name: tensors[name] for name in "bd"}, paths[1])
    return paths, tensors


def fill(paths, sources):
    """On the device of the places. The worker loads in inference mode."""
    where = streaming.extents(paths)
    assert all(streaming.streamable(source, where.get(source.name)) for source in sources)
    told = []
    with torch.inference_mode():
        streaming.Stream(sources[0].parameter.device).fill(streaming.pieces(sources, where), told.append)
    return told


def test_every_part_of_a_tensor_comes_where_it_belongs(tmp_path, small, device):
    paths, tensors = files(tmp_path)
    fused = torch.zeros(310, 40, dtype=torch.bfloat16, device=device)
    columns = torch.zeros(300, 15, dtype=torch.float32, device=device)
    some, thirds = torch.zeros(500, dtype=torch.bfloat16, device=device), torch.zeros(20, 8, device=device)
    whole, later = torch.zeros(130, 7, 11, device=device), torch.zeros(50, 40, dtype=torch.bfloat16, device=device)
    sources = [
        Source("a", (300, 40), fused, row=10, part=Part(0, 100, 250)),
        Source("a", (300, 40), columns, part=Part(1, 20, 35)),
        Source("a", (300, 40), later, part=Part(0, 50, 100), take=(150, 300)),
        Source("b", (999,), some, part=Part(0, 400, 900)),
        Source("c", (130, 7, 11), whole),
        Source("d", (60, 8), thirds, take=(20, 40)),
    ]
    told = fill(paths, sources)
    assert len(told) > 4 * 5  # else slots were not used again
    assert sum(piece.place().numel() for piece in told) == sum(source.held() for source in sources)
    fused, columns, some, thirds, whole, later = (place.cpu() for place in (fused, columns, some, thirds, whole, later))
    assert torch.equal(fused[10:160], tensors["a"][100:250]) and not fused[:10].any() and not fused[160:].any()
    assert torch.equal(columns, tensors["a"][:, 20:35].float()) and torch.equal(later, tensors["a"][200:250])
    assert torch.equal(some, tensors["b"][400:900]) and torch.equal(whole, tensors["c"])
    assert torch.equal(thirds, tensors["d"][20:40].float())


def test_pieces_of_the_real_size(tmp_path, device):
    """Enough of them that every slot is read into again while copies are under way."""
    value = torch.randint(-(2**15), 2**15, (streaming.PIECE_BYTES // 4096 * 40 + 7, 2048), dtype=torch.int16).view(torch.bfloat16)
    save_file({"x": value}, tmp_path / "x.safetensors")
    place = torch.zeros_like(value, device=device)
    assert len(fill([tmp_path / "x.safetensors"], [Source("x", tuple(value.shape), place)])) == 41
    assert torch.equal(place.cpu().view(torch.int16), value.view(torch.int16))


def test_what_cannot_be_taken_row_by_row_is_left(tmp_path, small):
    paths, _ = files(tmp_path)
    where, place = streaming.extents(paths), torch.zeros(300, 40)
    assert not streaming.streamable(Source("a", (300, 40), place, change=lambda value: value), where["a"])
    assert not streaming.streamable(Source("a", (40, 300), place), where["a"])
    assert not streaming.streamable(Source("e", (300, 40), place), where.get("e"))
    assert not streaming.streamable(Source("f", (3, 4096), place), streaming.Extent(paths[0], 0, (3, 4096), torch.bfloat16))


def test_a_file_that_got_shorter_is_named(tmp_path, small):
    paths, _ = files(tmp_path)
    where = streaming.extents(paths)
    wanted = streaming.pieces([Source("c", (130, 7, 11), torch.zeros(130, 7, 11))], where)
    os.truncate(paths[0], where["c"].start + 5000)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LoadError, match=r"one\.safetensors: ends within tensor c"):
        streaming.Stream(torch.device("cpu")).fill(wanted, lambda piece: None)
    assert set(os.listdir("/proc/self/fd")) == before
    paths[0].unlink()
    with pytest.raises(LoadError, match=r"one\.safetensors: cannot be read \(No such file or directory\)"):
        streaming.Stream(torch.device("cpu")).fill(wanted, lambda piece: None)


def test_a_model_streamed_equals_the_model_mapped(tmp_path, small, device):
    from worker.tiny_model import write_model

    from pagecast_worker.loading import load

    checkpoint = load.SafetensorsCheckpoint(write_model(tmp_path, shards=3))
    names = load.architecture(checkpoint.config.architecture).names
    model = load.Decoder(checkpoint.config, names, load.Ranks(), device, torch.bfloat16, 64)
    sources = list(model.sources())
    fill(checkpoint.paths, [source for source in sources if source.change is None])
    stored = {name: value for path in checkpoint.paths for name, value in load_file(path).items()}
    for source in sources:
        assert torch.equal(source.place().cpu(), stored[source.name].bfloat16()), source.name
