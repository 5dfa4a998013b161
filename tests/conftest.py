"""Fixtures that are dear and therefore shared: the model on disk, and the plain engine's answers."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.prompts import SHORT, exact_texts
from tests.support.reference import plain_answers

ANSWER_TOKENS = 16

# How long an example takes says how busy the machine is.
settings.register_profile("phasegate", deadline=None)
settings.load_profile("phasegate")

Texts = dict[int, tuple[str, list[int]]]
Answers = dict[int, list[int]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first. Tests with engines get more time, and are not blamed for what vLLM leaves open."""
    for item in items:
        if _dear(item):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    items.sort(key=_dear)


def _dear(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("vllm", "ray"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded model, converted once per machine into the model cache."""
    from deploy.config import cache_dir
    from deploy.model_store import prepare

    return prepare("smollm2-135m", cache_dir())


@pytest.fixture(scope="session")
def texts(model_dir: Path) -> Texts:
    return exact_texts(model_dir, SHORT)


@pytest.fixture(scope="session")
def answers(model_dir: Path, texts: Texts) -> Answers:
    """What one plain engine answers to each text."""
    prompts = [ids for _, ids in texts.values()]

    return dict(zip(texts, plain_answers(model_dir, prompts, max_tokens=ANSWER_TOKENS), strict=True))
