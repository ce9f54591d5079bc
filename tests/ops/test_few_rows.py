"""How products of few rows are shared out; on a Hopper GPU that they are the product, whatever the launch."""

import pytest
import torch

from pagecast_kernels import configs, few_rows, reference
from pagecast_kernels.few_rows import FewRows

SHAPES = [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096), (960, 576), (336, 136), (16, 8)]
PROCESSORS = 132


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [2, 17, 64, 65, 128])
def test_every_candidate_fits_and_leaves_no_processor_a_second_piece(rows: int, columns: int, depth: int) -> None:
    found = few_rows.candidates(rows, columns, depth, PROCESSORS)
    assert found and len(set(found)) == len(found)
    for each in found:
        assert few_rows.fits(each, rows, columns, depth, PROCESSORS)
        assert each.pieces == 1 or each.tiles(columns) * each.pieces <= PROCESSORS, "pieces that wait for one another run at once"
        assert each.pieces <= few_rows.steps(depth), "a piece without a step would never end"
        warpgroups = -(-rows // few_rows.ROWS) * (each.columns // each.box)
        assert warpgroups <= 2 and each.stages(rows) >= 2
        stage = (-(-rows // few_rows.ROWS) * few_rows.ROWS + each.columns) * few_rows.STEP * 2
        assert each.stages(rows) * stage + 4096 * warpgroups + 128 <= configs.shared_memory_of(90)


def test_deep_weights_with_few_columns_are_cut() -> None:
    pieces = {each.columns: each.pieces for each in few_rows.candidates(64, 4096, 14336, PROCESSORS)}
    assert pieces == {128: 4, 256: 8, 512: 8}
    assert {each.pieces for each in few_rows.candidates(64, 6144, 4096, PROCESSORS) if each.columns == 256} == {4, 5}
    assert {each.pieces for each in few_rows.candidates(64, 28672, 4096, PROCESSORS) if each.columns == 256} == {1}


def test_no_launch_for_rows_that_others_do_better() -> None:
    assert not few_rows.candidates(1, 4096, 4096, PROCESSORS) and not few_rows.candidates(129, 4096, 4096, PROCESSORS)
    assert all(each.columns < 512 for each in few_rows.candidates(65, 28672, 4096, PROCESSORS)), "two warpgroups have 64 rows each"


@pytest.mark.parametrize(
    ("columns", "pieces", "even", "told"),
    [(192, 1, False, "columns"), (256, 0, False, "pieces"), (256, 9, True, "pieces"), (128, 1, True, "even")],
)  # fmt: skip
def test_what_is_no_launch_is_refused(columns: int, pieces: int, even: bool, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FewRows(columns, pieces, even)


def test_only_16_bits_on_hopper_in_rows_that_its_copy_engine_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros((64, 72), dtype=torch.bfloat16)
    assert not few_rows.suits(weight)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    assert few_rows.suits(weight) and few_rows.suits(weight.half())
    assert not few_rows.suits(weight.float()) and not few_rows.suits(weight[:, :68]) and not few_rows.suits(weight[:40])


@pytest.mark.skipif(not torch.cuda.is_available() or not configs.is_hopper("cuda"), reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "depth"), SHAPES[2:])
def test_the_product_by_any_launch(columns: int, depth: int) -> None:
    from pagecast_kernels import few_rows_hopper

    work = few_rows.workspace("cuda")
    for rows in (2, 17, 64, 65, 128):
        x, weight, residual = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, depth), (columns, depth), (rows, columns)))
        weight *= depth**-0.5
        want = reference.linear(x.double(), weight.double())
        for config in few_rows.candidates(rows, columns, depth, configs.processors("cuda")):
            for add in (False, True):
                results = []
                for _ in range(2):
                    out = residual.clone() if add else torch.full_like(residual, torch.nan)
                    results.append(few_rows_hopper.launch(x, weight, out, work, config, add))
                    off = (out.double() - want - (residual.double() if add else 0.0)).norm()
                    assert off <= 4e-3 * want.norm(), (rows, config, add)
                assert torch.equal(*results) and not work.counters.any(), (rows, config, add)
