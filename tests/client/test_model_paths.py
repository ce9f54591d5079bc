"""What a model's name on the command line means, and what it needs to be."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

from pagecast import models
from pagecast.errors import ModelNotFound
from pagecast_scheduler.frontend.tokenizer import load_folder


def test_a_folder_is_a_model_by_its_config_and_a_tokenizer_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"it has no config\.json"):
        models.resolve(str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"it has no config\.json"):
        models.tokenizer(str(tmp_path))
    words = {"one": 0, "two": 1, "[UNK]": 2}
    Tokenizer(tokenizer_models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert models.tokenizer(str(tmp_path)) == tmp_path.resolve()
    assert load_folder(tmp_path).encode("two") == [1]
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == models.tokenizer(str(tmp_path)) == tmp_path.resolve()
