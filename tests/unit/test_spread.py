"""Lengths in words and in a tokenizer's tokens."""

import pytest

from rlhf.data.quality import spread
from rlhf.errors import UserError


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer whose tokens are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate("abc?")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_lengths_are_counted_up_to_powers_of_two():
    found = spread.spread([0, 8, 9, 16, 17, 300])
    assert (found.upto, found.counts) == ((8, 16, 32, 64, 128, 256, 512), (2, 2, 1, 0, 0, 0, 1))
    assert (found.p50, found.longest) == (9, 300) and sum(found.counts) == 6
    assert found.bars() == "██▄   ▄ texts of up to 8, 16, …, 512"
    assert spread.spread([3]).bars() == ""


def test_lengths_are_counted_in_words_or_in_tokens(tokenizer_folder):
    assert spread.words(["a b", "", "a\nb c"]) == [2, 0, 3]
    assert spread.tokens(tokenizer_folder)(["abcabc", "", "a"]) == [6, 0, 1]


def test_no_tokenizer_is_one_clear_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "no tokenizer could be read there"),
        (tmp_path / "empty", "no tokenizer could be read there"),
    ):
        for option, named in (("", f"{folder}"), ("--tokenizer", f"--tokenizer {folder}")):
            with pytest.raises(UserError, match=message) as error:
                spread.tokens(folder, option)
            assert "\n" not in str(error.value) and named == str(error.value)[: len(named)]
