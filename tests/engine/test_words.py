"""Text while it grows: pieces join to what decoding all tokens at once gives, and nothing shown is taken back."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.engine.words import Words
from looseleaf.model.tiny.families import FAMILY
from looseleaf.model.tiny.vocabulary import build_tokenizer

STYLES = {
    "qwen2": "qwen2_5_vl", "gpt2": "smolvlm", "kimi": "kimi_k25", "llama3": "llama", "deepseek": "deepseek_vl",
    "internvl": "internvl", "spaces": "llava_next_vicuna",
}  # fmt: skip
"""One family for each style of tokenizer; `spaces` is SentencePiece's, which falls back to bytes."""

BYTE_LEVEL = [one for one in STYLES if one != "spaces"]


@cache
def tokenizer(style: str) -> Any:
    return build_tokenizer(FAMILY[STYLES[style]].vocabulary)


class Table:
    """A tokenizer whose tokens are whatever strings the test likes."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.pieces[one] for one in ids)


def stream(source: Any, ids: Sequence[int], stop: tuple[str, ...] = ()) -> tuple[Words, list[str]]:
    """Feed tokens until a stop string is found, as the engine does; the words and every piece shown."""
    words = Words(source, stop)
    shown = []
    for one in ids:
        shown.append(words.add(one))
        if words.stopped:
            break
    shown.append(words.finish())
    return words, shown


def spell(*pieces: str, stop: tuple[str, ...] = ()) -> tuple[Words, list[str]]:
    return stream(Table(*pieces), range(len(pieces)), stop)


@pytest.mark.parametrize("style", BYTE_LEVEL)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_tokens_stream_to_what_they_decode_to(style: str, data: st.DataObject) -> None:
    source = tokenizer(style)
    ids = data.draw(st.lists(st.integers(0, len(source) - 1), max_size=40))
    words, shown = stream(source, ids)
    assert "".join(shown) == words.text == source.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("style", BYTE_LEVEL)
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.sampled_from("ab é€漢字😀👩‍👧🇩🇪\n\t\u200b\u0301"), max_size=20))
def test_any_text_streams_whole_and_never_shows_half_a_character(style: str, text: str) -> None:
    source = tokenizer(style)
    ids = source(text, add_special_tokens=False)["input_ids"]
    words, shown = stream(source, ids)
    assert "".join(shown) == words.text == source.decode(ids, skip_special_tokens=True)
    assert unicodedata.normalize("NFC", words.text) == unicodedata.normalize("NFC", text), "some tokenizers compose"
    assert not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("style", STYLES)
def test_many_emoji_in_a_row_come_out_right(style: str) -> None:
    text = "Look: 😀😁😂🤣 and 漢字漢字漢字."
    ids = tokenizer(style)(text, add_special_tokens=False)["input_ids"]
    words, shown = stream(tokenizer(style), ids)
    assert "".join(shown) == words.text == text


@pytest.mark.parametrize("style", BYTE_LEVEL)
def test_a_hundred_random_answers_stream_to_what_they_decode_to(style: str) -> None:
    """Not for SentencePiece: there a broken byte also spoils the whole ones in front of it, which are shown by then."""
    source, chance = tokenizer(style), random.Random(0)
    for _ in range(100):
        ids = [chance.randrange(len(source)) for _ in range(chance.randrange(1, 40))]
        words, shown = stream(source, ids)
        assert "".join(shown) == words.text == source.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("style", STYLES)
def test_plain_words_keep_their_spaces(style: str) -> None:
    text = "The quick brown fox, and  two spaces; then\na line: 1280 of them."
    ids = tokenizer(style)(text, add_special_tokens=False)["input_ids"]
    words, shown = stream(tokenizer(style), ids)
    assert "".join(shown) == words.text == text
    assert sum(bool(piece) for piece in shown) > len(ids) // 2, "text is shown as it comes, not at the end"


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_are_not_shown(style: str) -> None:
    source = tokenizer(style)
    ids = source("a b", add_special_tokens=False)["input_ids"]
    special = [source.eos_token_id, source.pad_token_id]
    words, shown = stream(source, [*special * 5, *ids, *special * 5, *ids])
    assert words.text == "".join(shown) == source.decode([*special, *ids, *special, *ids], skip_special_tokens=True)


def test_no_tokens_are_no_text() -> None:
    words = Words(Table())
    assert words.finish() == words.text == ""
    assert not words.stopped


def test_half_a_character_at_the_end_is_shown_for_what_it_is() -> None:
    source = tokenizer("qwen2")
    ids = source("ok 😀", add_special_tokens=False)["input_ids"][:-1]
    words, shown = stream(source, ids)
    assert words.text == "".join(shown) == source.decode(ids)
    assert words.text.endswith("\ufffd")
    assert shown[-1] == "\ufffd", "held back until the end"


def test_a_stop_string_inside_one_token_cuts_there() -> None:
    words, shown = spell("Hello ", "my END of", stop=("END",))
    assert words.stopped
    assert words.text == "".join(shown) == "Hello my "


def test_a_stop_string_may_straddle_tokens_and_is_never_shown() -> None:
    words, shown = spell("one ", "E", "N", "D", " two", stop=("END",))
    assert words.stopped
    assert shown == ["one ", "", "", "", ""]
    assert words.text == "one "


def test_what_only_began_like_a_stop_string_is_shown_after_all() -> None:
    words, shown = spell("a", "E", "N", "x", "E", stop=("END",))
    assert not words.stopped
    assert shown == ["a", "", "", "ENx", "", "E"]
    assert words.text == "aENxE"


def test_stop_strings_that_overlap_themselves_are_found() -> None:
    words, shown = spell("a", "a", "a", "b", "c", stop=("aab",))
    assert words.stopped
    assert words.text == "".join(shown) == "a"
    assert shown == ["", "", "a", "", ""]


def test_the_earliest_of_several_stop_strings_counts() -> None:
    words, _ = spell("x", "one two", stop=("two", "one"))
    assert words.text == "x"


def test_a_stop_string_at_the_very_start_leaves_nothing() -> None:
    words, shown = spell("END", stop=("END",))
    assert words.stopped
    assert words.text == "".join(shown) == ""


def test_a_stop_string_of_several_bytes_may_straddle_them() -> None:
    source = tokenizer("qwen2")
    ids = source("fine 😀 not", add_special_tokens=False)["input_ids"]
    words, shown = stream(source, ids, ("😀",))
    assert words.stopped
    assert words.text == "".join(shown) == "fine "


def test_spaces_and_line_ends_are_stop_strings_like_any_other() -> None:
    words, shown = spell("a", "\n", "b", "\n", "\n", "c", stop=("\n\n",))
    assert words.text == "".join(shown) == "a\nb"


def test_nothing_comes_after_the_end() -> None:
    words, _ = spell("a", "END", "b", stop=("END",))
    assert words.finish() == ""
    assert words.text == "a"


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_shown_text_is_never_taken_back(pieces: list[str], stop: tuple[str, ...]) -> None:
    words, shown = spell(*pieces, stop=stop)
    whole = "".join(pieces)
    assert "".join(shown) == words.text
    assert whole.startswith(words.text)
    assert not any(one in words.text for one in stop)
    if words.stopped:
        assert any(whole[len(words.text) :].startswith(one) for one in stop)
    else:
        assert words.text == whole


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_one_stop_string_cuts_where_it_first_stands_however_the_text_is_cut_into_tokens(
    pieces: list[str], stop: str
) -> None:
    words, _ = spell(*pieces, stop=(stop,))
    assert words.text == "".join(pieces).split(stop, 1)[0]


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=4), max_size=12), stop=st.text("abc", min_size=1, max_size=4))
def test_no_more_is_held_back_than_might_be_a_stop_string(pieces: list[str], stop: str) -> None:
    words = Words(Table(*pieces), (stop,))
    seen = shown = ""
    for number, piece in enumerate(pieces):
        seen += piece
        shown += words.add(number)
        if words.stopped:
            return
        held = seen[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


@pytest.mark.parametrize("style", BYTE_LEVEL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stop_strings_work_on_random_tokens_of_a_real_tokenizer(style: str, data: st.DataObject) -> None:
    source = tokenizer(style)
    ids = data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=25))
    whole = source.decode(ids, skip_special_tokens=True)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 4))].replace("\ufffd", "")
    if not stop:
        return
    words, shown = stream(source, ids, (stop,))
    assert "".join(shown) == words.text
    assert whole.startswith(words.text)
    assert stop not in words.text
