from random import Random

from load.prompts import TEMPLATE_TOKENS, messages


def test_a_prompt_has_a_word_for_each_token_that_the_template_leaves() -> None:
    text = messages(Random(1), 200)[1]["content"].removeprefix("Write a long story: ")

    assert len(text.split()) == 200 - TEMPLATE_TOKENS


def test_prompts_differ_from_their_first_characters_on() -> None:
    rng = Random(1)
    starts = [messages(rng, 64)[0]["content"][:6] for _ in range(100)]

    assert len(set(starts)) > 95


def test_the_same_seed_gives_the_same_prompt() -> None:
    assert messages(Random(3), 64) == messages(Random(3), 64)
