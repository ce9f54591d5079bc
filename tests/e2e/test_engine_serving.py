"""From submit to tokens through the engine and its sockets, with ranks in threads."""

from pathlib import Path

import pytest
from e2e.engine_rig import RigFrontend, engine_thread, rig_workers

from pagecast_wire.intake import ServingState


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_tokens_are_the_oracles(tmp_path: Path, ranks: int) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=ranks), rig_workers(tmp_path, ranks):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit(list(range(i, 3 * i + 5)), 10 + i, seed=i) for i in range(20)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        assert frontend.states[-1] == ServingState.SERVING
        frontend.close()
