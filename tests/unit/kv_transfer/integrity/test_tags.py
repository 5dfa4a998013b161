import pytest

from kv_transfer.integrity.tags import (
    DOMAIN_BITS,
    GENERATION_BITS,
    NO_DOMAIN,
    TagsExhausted,
    TagSource,
    domain_of,
    tag_domain,
    tag_generation,
)


def test_a_tag_holds_its_generation_and_domain_and_is_never_the_one_that_means_none() -> None:
    source = TagSource()
    tags = [source.next(domain) for domain in (0, 7, (1 << DOMAIN_BITS) - 1)]

    assert [tag_generation(tag) for tag in tags] == [1, 2, 3]
    assert [tag_domain(tag) for tag in tags] == [0, 7, (1 << DOMAIN_BITS) - 1]
    assert 0 not in tags


def test_the_last_tag_fits_a_signed_word_and_the_counter_refuses_to_wrap() -> None:
    last = (1 << GENERATION_BITS) - 1
    source = TagSource(last - 1)

    assert source.next((1 << DOMAIN_BITS) - 1) == (1 << 63) - 1
    for _ in range(2):
        with pytest.raises(TagsExhausted):
            source.next(0)


def test_a_salt_has_a_domain_of_its_own_and_no_salt_has_none() -> None:
    domains = {domain_of(f"salt {n}") for n in range(50)}

    assert domain_of("") == NO_DOMAIN
    assert NO_DOMAIN not in domains
    assert len(domains) == 50
    assert max(domains) < 1 << DOMAIN_BITS


def test_a_salt_has_a_domain_at_either_end_of_the_range() -> None:
    """The digests of these two leave no remainder, and the largest one."""
    assert domain_of("salt 223587") == 1
    assert NO_DOMAIN < domain_of("salt 812559") < 1 << DOMAIN_BITS
