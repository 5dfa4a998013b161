from prometheus_client.parser import text_string_to_metric_families

from deploy.metrics_page import ProcessPage, merge
from gateway.metrics import GatewayMetrics, Outcome, Stage
from tests.support.engines import some_gauges
from workers.metrics import ReplicaMetrics


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_real_pages_of_all_processes_are_one_valid_page_in_which_nothing_is_lost() -> None:
    gateway = GatewayMetrics()
    gateway.ended(Outcome.CLIENT_GONE, code=None, stage=Stage.RENDER)
    gateway.began(0.3)
    texts = {
        ("gateway", "g"): gateway.page(2).decode(),
        ("prefill", "p"): ReplicaMetrics().page(some_gauges(), bus_queue=0, bus_dropped=4).decode(),
        ("decode", "d"): ReplicaMetrics()
        .page(some_gauges(free_pages=5), bus_queue=1, bus_dropped=0)
        .decode(),
    }

    page = merge(ProcessPage(process=p, replica=r, text=text) for (p, r), text in texts.items())

    found = samples(page)
    for (process, replica), text in texts.items():
        own = {("process", process), ("replica", replica)}
        for (name, labels), value in samples(text.encode()).items():
            if not name.endswith("_created"):
                assert found[name, labels | own] == value
        assert found["phasegate_replica_up", frozenset(own)] == 1
    assert b"_created" not in page
    assert page.count(b"# TYPE phasegate_cache_pages gauge") == 1


def test_a_process_that_does_not_answer_is_down_and_hides_no_other() -> None:
    page = merge(
        [
            ProcessPage(process="decode", replica="a", text=None),
            ProcessPage(process="decode", replica="b", text="phasegate_cache_pages 5\n"),
        ]
    )

    assert samples(page) == {
        ("phasegate_replica_up", frozenset({("process", "decode"), ("replica", "a")})): 0,
        ("phasegate_replica_up", frozenset({("process", "decode"), ("replica", "b")})): 1,
        ("phasegate_cache_pages", frozenset({("process", "decode"), ("replica", "b")})): 5,
    }
