from dataclasses import replace

import pytest

from gateway.config import GatewayConfig, ModelFacts

FACTS = ModelFacts(id="@cf/a/b", model_dir="", context_length=64, block_size=16)


def test_barriers_are_refused_in_production() -> None:
    config = GatewayConfig(model=FACTS, mode="dev", holds="/barriers")

    with pytest.raises(ValueError, match="holds"):
        replace(config, mode="production")
