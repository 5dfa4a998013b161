"""What a hash stands for: bindings go with the content of a page, and with nothing else."""

from kv_transfer.api.integrity import IntegrityCause
from kv_transfer.integrity.bindings import HashBindings

STALE, FOREIGN = IntegrityCause.STALE_PREFIX, IntegrityCause.FOREIGN_DOMAIN
A, B = 1, 2
"""Domains."""


def test_a_hash_leads_to_its_page_only_under_the_tag_it_was_bound_to() -> None:
    bindings = HashBindings()
    bindings.bind("k", 3, 103, A)

    assert bindings.refusal("k", 3, 103, A) is None
    assert bindings.refusal("k", 3, 104, A) is STALE
    assert bindings.refusal("k", 4, 103, A) is STALE
    assert bindings.refusal("other", 3, 103, A) is STALE
    assert (bindings.expected("k", 3), bindings.expected("k", 4)) == (103, 0)
    assert bindings.covers(3, 103)
    assert not bindings.covers(3, 104)


def test_a_hash_leads_only_its_tenant_and_one_that_is_nobodys_leads_nobody() -> None:
    bindings = HashBindings()
    bindings.bind("k", 3, 103, A)
    bindings.bind("nobody's", 3, 103, None)

    assert bindings.refusal("k", 3, 103, B) is FOREIGN
    assert bindings.refusal("k", 3, 103, None) is FOREIGN
    assert [bindings.refusal("nobody's", 3, 103, domain) for domain in (A, None)] == [FOREIGN, FOREIGN]


def test_what_was_stale_does_not_become_right_when_the_page_is_given_back() -> None:
    bindings = HashBindings()
    bindings.bind("old", 3, 103, A)
    bindings.bind("new", 3, 104, A)
    bindings.follow(3, 104, 105)

    assert bindings.refusal("new", 3, 105, A) is None
    assert bindings.refusal("old", 3, 105, A) is STALE
