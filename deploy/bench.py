"""Deployments for `python -m load gateway-cost`, in place of the usual ones: see `testing.handle_arm`."""

from collections.abc import Mapping
from typing import Any

from deploy.app import DecodeDeployment, GatewayDeployment, Watch
from gateway.bench import add_handle_model
from gateway.config import GatewayConfig
from workers.bench import HandleDecode


class BothWaysDecode(HandleDecode, DecodeDeployment):
    """Tokens on the bus, or through the call's stream."""


class BothWaysGateway(GatewayDeployment):
    async def __init__(  # type: ignore[misc]
        self,
        config: GatewayConfig,
        secrets_file: str,
        watch: Watch,
        prefill: Any,
        *decode: Any,
        profile: Mapping[str, Any],
    ) -> None:
        await super().__init__(config, secrets_file, watch, prefill, *decode, profile=profile)
        add_handle_model(self._gateway.app, prefill, *decode)
