"""How products of few rows are shared out; on a Hopper GPU that they are the product, whatever the launch."""

import pytest
import torch

from pagecast_kernels import configs, few_rows, reference
from pagecast_kernels.few_rows import FewRows

SHAPES = [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096), (960, 576), (336, 192), (16, 64)]
LAUNCHES = [
    FewRows(width, pieces, turn, early)
    for width in few_rows.WIDTHS for pieces in (1, 2, 3, 4) for turn, early in ((0, False), (11, True))
]  # fmt: skip
PROCESSORS = 132


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [2, 17, 64, 65, 128])
def test_every_candidate_fits_and_keeps_most_processors_busy(rows: int, columns: int, depth: int) -> None:
    found = few_rows.candidates(rows, columns, depth, PROCESSORS)
    assert len(set(found)) == len(found) and bool(found) == (columns >= 4096)
    for each in found:
        programs = each.tiles(columns) * each.pieces
        assert few_rows.fits(each, rows, columns, depth, PROCESSORS) and programs >= 0.7 * PROCESSORS
        assert each.pieces == 1 or programs <= PROCESSORS, "pieces that wait for one another run at once"
        assert each.pieces <= each.steps(depth), "a piece without a step would never end"


@pytest.mark.parametrize("columns", few_rows.WIDTHS)
def test_stages_fit_into_shared_memory(columns: int) -> None:
    for rows in (2, 64, 65, 128):
        parts, (inputs, weights) = -(-rows // 64), FewRows(columns).stages(rows)
        assert inputs >= 3 and weights >= 2, "less than that waits for each copy"
        used = inputs * parts * 64 * 128 + weights * columns * 128 * few_rows.WIDTHS[columns]
        assert used + parts * 4096 + 16 * (inputs + weights) <= configs.shared_memory_of(90)


def test_deep_weights_with_few_columns_are_cut() -> None:
    def cuts(columns: int, depth: int) -> set[tuple[int, int]]:
        return {(each.columns, each.pieces) for each in few_rows.candidates(64, columns, depth, PROCESSORS)}

    assert cuts(4096, 14336) == cuts(4096, 4096) == {(128, 4), (64, 2)}
    assert cuts(6144, 4096) == {(128, 2), (64, 1)}
    assert cuts(28672, 4096) == cuts(128256, 4096) == {(256, 1)}
    assert cuts(16384, 256) == {(128, 1)} and cuts(4096, 256) == set(), "one step of 256 columns is not cut"


def test_no_launch_for_rows_that_others_do_better() -> None:
    assert not few_rows.candidates(1, 4096, 4096, PROCESSORS) and not few_rows.candidates(129, 4096, 4096, PROCESSORS)


@pytest.mark.parametrize(
    ("columns", "pieces", "turn", "told"), [(192, 1, 0, "columns"), (256, 0, 0, "pieces"), (64, 5, 0, "pieces"), (64, 1, -1, "turn")]
)  # fmt: skip
def test_what_is_no_launch_is_refused(columns: int, pieces: int, turn: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FewRows(columns, pieces, turn)


def test_only_16_bits_on_hopper_in_rows_that_its_copy_engine_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros((64, 128), dtype=torch.bfloat16)
    assert not few_rows.suits(weight)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    assert few_rows.suits(weight) and few_rows.suits(weight.half())
    assert not few_rows.suits(weight.float()) and not few_rows.suits(weight[:, :120]) and not few_rows.suits(weight[:40])


@pytest.mark.skipif(not torch.cuda.is_available() or not configs.is_hopper("cuda"), reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (960, 576), (336, 192), (16, 64)])
def test_the_product_by_any_launch(columns: int, depth: int) -> None:
    from pagecast_kernels import few_rows_hopper

    work = few_rows.workspace("cuda")
    for rows in (2, 17, 64, 65, 128):
        x, weight, residual = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, depth), (columns, depth), (rows, columns)))
        weight *= depth**-0.5
        want = reference.linear(x.double(), weight.double())
        for config in LAUNCHES:
            if not few_rows.fits(config, rows, columns, depth, configs.processors("cuda")):
                continue
            for add in (False, True):
                results = []
                for _ in range(2):
                    out = residual.clone() if add else torch.full_like(residual, torch.nan)
                    results.append(few_rows_hopper.launch(x, weight, out, work, config, add))
                    off = (out.double() - want - (residual.double() if add else 0.0)).norm()
                    assert off <= 4e-3 * want.norm(), (rows, config, add)
                assert torch.equal(*results) and not work.counters.any(), (rows, config, add)
