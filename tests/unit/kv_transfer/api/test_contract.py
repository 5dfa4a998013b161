"""What two contracts say of each other."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api import Contract

USUAL = Contract(
    rope={"type": "default", "theta": "10000"},
    chat_template={"characters": "368", "sha256": "8" * 64},
    source={"revision": "a model of some maker, second edition, quantised to eight bits"},
)

facts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2", "x" * 70, "x" * 71]))
contracts = st.builds(Contract, **{field.name: facts for field in fields(Contract)})


def test_what_differs_is_named_with_both_values_ours_first() -> None:
    other = replace(USUAL, rope={"type": "default", "theta": "100000"})

    assert USUAL.difference(other) == "rope: theta 10000 against 100000"
    assert other.difference(USUAL) == "rope: theta 100000 against 10000"
    assert (
        USUAL.disagreement(other, ours="prefill", theirs="decode")
        == "prefill and decode differ in rope: theta 10000 against 100000"
    )
    assert USUAL.disagreement(USUAL, ours="prefill", theirs="decode") == ""


def test_what_has_changed_in_a_folder_is_named_with_what_was_done_meanwhile() -> None:
    now = replace(USUAL, rope={"type": "default", "theta": "100000"})

    assert (
        USUAL.change(now, meanwhile="loading it")
        == "the model folder before and after loading it differ in rope: theta 10000 against 100000"
    )
    assert USUAL.change(USUAL, meanwhile="loading it") == ""


def test_everything_that_differs_is_named() -> None:
    other = replace(
        USUAL,
        rope={"type": "yarn", "theta": "10000", "factor": "4"},
        chat_template={},
        scale_file={"sha256": "e" * 64},
    )

    assert USUAL.difference(other) == (
        "rope: type default against yarn, factor none against 4; "
        "chat template: characters 368 against none, sha256 8888888888888888... against none; "
        "scale file: sha256 none against eeeeeeeeeeeeeeee..."
    )


def test_of_long_values_the_place_is_shown_where_they_part() -> None:
    other = replace(USUAL, source={"revision": USUAL.source["revision"].replace("second", "third")})

    assert USUAL.difference(other) == (
        "source: revision ... maker, second e... against ... maker, third ed..."
    )


def test_the_short_form_is_for_people_and_depends_on_every_fact() -> None:
    reordered = replace(USUAL, rope={"theta": "10000", "type": "default"})
    others = [replace(USUAL, **{field.name: {"a": "b"}}) for field in fields(Contract)]

    assert USUAL.short == f"fp_{USUAL.digest[:10]}" == reordered.short
    assert len({USUAL.short, *(other.short for other in others)}) == 1 + len(others)


def test_one_that_says_nothing_agrees_with_its_like_only() -> None:
    assert Contract().difference(Contract()) == ""
    assert Contract().difference(USUAL)
    assert USUAL.difference(Contract())


@given(contracts, contracts)
def test_a_difference_is_told_exactly_where_the_digests_differ(one: Contract, other: Contract) -> None:
    assert bool(one.difference(other)) == bool(other.difference(one)) == (one.digest != other.digest)
