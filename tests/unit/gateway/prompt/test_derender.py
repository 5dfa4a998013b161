"""Text that may be sent: nothing of a stop string, everything before it, whole characters."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.prompt.derender import Detokeniser, StopFinder, TokenTexts
from tests.support.renderer import END, byte_tokenizer, tokens_of

# Two letters make partial and overlapping matches common.
words = st.text("ab", min_size=1, max_size=4)
TEXTS = TokenTexts(byte_tokenizer())
"""Shared: later examples meet tokens that earlier ones have taught."""


def naive(text: str, stops: list[str]) -> str:
    """Grow the text one character at a time until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(st.text("ab", max_size=14), st.lists(words, min_size=1, max_size=3))
def test_text_fed_by_character_ends_exactly_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    finder, sent, stopped = StopFinder(stops), "", False
    for character in text:
        found = finder.push(character)
        sent, stopped = sent + found.text, found.stopped
        if stopped:
            break
    sent += "" if stopped else finder.flush()

    assert sent == naive(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(st.lists(st.text("abc", max_size=5), max_size=8), st.lists(words, min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_sent_whatever_the_chunks(chunks: list[str], stops: list[str]) -> None:
    finder, sent, stopped, taken = StopFinder(stops), "", False, ""
    for chunk in chunks:
        taken += chunk
        found = finder.push(chunk)
        sent += found.text
        assert taken.startswith(sent)
        assert not any(stop in sent for stop in stops)
        stopped = found.stopped
        if stopped:
            break

    if stopped:
        assert any(taken[len(sent) :].startswith(stop) for stop in stops)
    else:
        assert sent + finder.flush() == taken
        assert not any(stop in taken for stop in stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    finder = StopFinder(["STOP"])

    assert finder.push("one S").text == "one "
    assert finder.push("pade").text == "Spade"


@given(st.text(max_size=30))
def test_detokenised_bytes_are_the_text_and_never_half_a_character(text: str) -> None:
    detokeniser, pieces = Detokeniser(TEXTS), []
    for token_id in (*tokens_of(text), END):
        pieces.append(detokeniser.push(token_id))

    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_bytes_that_never_become_a_character_do_not_end_the_stream() -> None:
    detokeniser = Detokeniser(TokenTexts(byte_tokenizer()))

    text = "".join(detokeniser.push(token_id) for token_id in (0xFF, 0xFE, 0x80, 0x80, *tokens_of("later")))

    assert text.endswith("later")


@given(st.lists(st.integers(0, END), max_size=24))
def test_what_was_learnt_changes_no_text(token_ids: list[int]) -> None:
    fresh, taught = Detokeniser(TokenTexts(byte_tokenizer())), Detokeniser(TEXTS)

    assert [taught.push(i) for i in token_ids] == [fresh.push(i) for i in token_ids]


def test_a_token_with_a_text_of_its_own_is_decoded_once() -> None:
    texts = TokenTexts(byte_tokenizer())
    letter, half_a_character = ord("a"), 0xC3

    Detokeniser(texts).push(letter)
    Detokeniser(texts).push(half_a_character)
    Detokeniser(texts).push(END)

    assert [texts.get(i) for i in (letter, half_a_character, END)] == ["a", None, None]


def test_nothing_is_learnt_of_tokens_whose_text_depends_on_their_place() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    texts = TokenTexts(tokenizer)

    for _ in range(2):
        detokeniser = Detokeniser(texts)
        assert [detokeniser.push(i) for i in (0, 1, 0)] == ["a", " b", " a"]
