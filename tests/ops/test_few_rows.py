"""How products of few rows are shared out; on a Hopper GPU that they are the product, whatever the launch."""

import pytest
import torch

from pagecast_kernels import configs, few_rows, reference
from pagecast_kernels.few_rows import FewRows

PROCESSORS = 132


def test_tiles_that_keep_most_processors_busy_are_tried() -> None:
    assert few_rows.candidates(64, 28672, PROCESSORS) == [FewRows(), FewRows(few_rows.TURN)]
    tried = [columns for columns in (4096, 6144, 23552, 24576, 28672, 37888, 128256) if few_rows.candidates(2, columns, PROCESSORS)]
    assert tried == [23552 + 1024, 28672, 37888, 128256], "from 93 tiles on"


def test_no_launch_for_rows_that_others_do_better() -> None:
    assert [rows for rows in (1, 2, 64, 65, 128, 129) if few_rows.candidates(rows, 28672, PROCESSORS)] == [2, 64, 65, 128]


@pytest.mark.parametrize("rows", [2, 64, 65, 128])
def test_stages_fit_into_shared_memory(rows: int) -> None:
    parts, (inputs, weights) = -(-rows // 64), few_rows.stages(rows)
    assert inputs >= 3 and weights >= 2, "less than that waits for each copy"
    assert inputs * parts * 64 * 128 + weights * 2 * 256 * 128 + parts * 4096 + 16 * (inputs + weights) <= configs.shared_memory_of(90)


@pytest.mark.parametrize("turn", [-1, 1024])
def test_what_is_no_launch_is_refused(turn: int) -> None:
    with pytest.raises(ValueError, match=f"turn must be 0 to 1023, got {turn}"):
        FewRows(turn)


def test_only_16_bits_on_hopper_in_whole_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros((64, 128), dtype=torch.bfloat16)
    assert not few_rows.suits(weight)
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    assert few_rows.suits(weight) and few_rows.suits(weight.half())
    assert not few_rows.suits(weight.float()) and not few_rows.suits(weight[:, :120]) and not few_rows.suits(weight[:40])


@pytest.mark.skipif(not torch.cuda.is_available() or not configs.is_hopper("cuda"), reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "depth"), [(28672, 4096), (40960, 576), (960, 576), (336, 192), (16, 64)])
def test_the_product_by_any_launch(columns: int, depth: int) -> None:
    from pagecast_kernels import few_rows_hopper

    for rows in (2, 17, 64, 65, 128):
        x, weight, residual = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, depth), (columns, depth), (rows, columns)))
        weight *= depth**-0.5
        want = reference.linear(x.double(), weight.double())
        for turn in (0, 1, few_rows.TURN):
            for add in (False, True):
                results = []
                for _ in range(2):
                    out = residual.clone() if add else torch.full_like(residual, torch.nan)
                    results.append(few_rows_hopper.launch(x, weight, out, FewRows(turn), add))
                    off = (out.double() - want - (residual.double() if add else 0.0)).norm()
                    assert off <= 4e-3 * want.norm(), (rows, turn, add)
                assert torch.equal(*results), (rows, turn, add)
