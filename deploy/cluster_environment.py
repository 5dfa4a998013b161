"""Variables that must stand before Ray is imported anywhere in the process: it reads them only once."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

OBJECT_STORE_BYTES: Final = 100 * 1024**2
"""Shared memory for Ray's object store: no request passes through it, but Ray wants some."""

NO_PORT: Final = "65536"

SERVE_ENVIRONMENT: Final[Mapping[str, str]] = {
    # Handles are built in the mode of the process that deploys: it stands in replicas *and* in the driver.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # How often the controller looks at everything. Serve's ten times a second cost 6 % of a core at rest.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # What takes clients' connections is missed after a second, not after ten.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Optimised mode opens a direct ingress, which stays open for a load balancer to notice: there is none.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


def driver_environment(token: Path) -> dict[str, str]:
    """Of the process that starts the cluster; all others inherit it.

    Args:
        token: file without which nobody may talk to the cluster; see `make_token`.
    """
    return {
        **SERVE_ENVIRONMENT,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Its name speaks of other systems; what it does is to bind Ray's sockets to loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own logs stay bounded; the defaults are 512 MiB and five backups, for each file.
        "RAY_ROTATION_MAX_BYTES": str(16 * 1024**2),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        # Ray's workers are batch work to it, at niceness 15: anything else on the machine would starve ours.
        "RAY_worker_niceness": "0",
        # Nobody can read Ray's own figures here (ours are at the internal port), and Serve counts each call.
        "RAY_enable_metrics_collection": "0",
        # Two of Ray's processes serve figures to anybody on fixed ports, without a switch for it. A port that
        # does not exist is reported in their logs and does no other harm.
        "AUTOSCALER_METRIC_PORT": NO_PORT,
        "DASHBOARD_METRIC_PORT": NO_PORT,
    }


def make_token(token: Path) -> None:
    """A fresh random token, readable by its owner only. An old one is void."""
    token.unlink(missing_ok=True)
    handle = os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
