"""Ray and Serve for one system: a cluster of its own, private, started and ended by the supervisor."""

import logging
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from deploy.app import APP_NAME, DECODE, GATEWAY, PREFILL
from deploy.cluster_environment import OBJECT_STORE_BYTES
from deploy.config import DashboardConfig, SystemConfig

LOGICAL_CPUS: Final = 16
"""More than there are: replicas share cores, and their threads are set by the profile."""
LOOPBACK: Final = "127.0.0.1"
SHUTDOWN_TIMEOUT_S: Final = 40.0

log = logging.getLogger(__name__)


class ClusterError(Exception):
    """The cluster or the application did not come up. The message has what it said last."""


def start_ray(scratch: Path, dashboard: DashboardConfig) -> None:
    """A local cluster whose files lie in `scratch`, which must have a short path (it holds sockets).

    The environment of `driver_environment` must stand.
    """
    import ray

    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=dashboard.host is not None,
        dashboard_host=dashboard.host or LOOPBACK,
        dashboard_port=dashboard.port if dashboard.host is not None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(scratch / "ray"),
        _node_ip_address=LOOPBACK,
    )


def start_serve(config: SystemConfig) -> None:
    """Serve's controller and its ingress: HAProxy, or a proxy that answers 404 until something is deployed.

    The environment of `ingress.prepare` must stand.
    """
    from ray import serve
    from ray.serve.config import HTTPOptions

    # What it has to say on the way goes to its own files; the person at the terminal is told by us.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options=HTTPOptions(
            # Behind HAProxy this is where gateways listen: HAProxy alone is open to clients.
            host=config.host if config.ingress == "proxy" else LOOPBACK,
            port=config.port,
            keep_alive_timeout_s=math.ceil(config.limits.keep_alive_s),
        ),
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )


def deploy(application: Any) -> None:
    """Hands the application to Serve and returns at once: see `progress`."""
    from ray import serve

    target = serve.RunTarget(
        application,
        name=APP_NAME,
        route_prefix="/",
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def progress() -> tuple[bool, frozenset[str]]:
    """Whether all of it runs, and which deployments do not yet.

    Raises:
        ClusterError: Serve has given up.
    """
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    if application is None:
        return False, frozenset({PREFILL, DECODE, GATEWAY})
    if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        said = [d.message for d in application.deployments.values() if d.status != "HEALTHY" and d.message]
        raise ClusterError("\n".join([*said, application.message]).strip())
    waiting = frozenset(name for name, d in application.deployments.items() if d.status != "HEALTHY")
    return application.status == "RUNNING", waiting


def stop(say: Callable[[str], None], answers: Callable[[], bool] = lambda: True) -> None:
    """Drains and ends the application and the cluster, within a bound. Idempotent.

    Args:
        answers: whether the cluster still does. One that does not is left to be ended by its marker.
    """
    import ray

    if not ray.is_initialized():
        return

    def shut_down() -> None:
        from ray import serve

        try:
            serve.shutdown()
        except Exception:
            log.exception("serve.shutdown.failed")

    # A dead controller would hold this for ever; what then remains is ended by its marker.
    worker = threading.Thread(target=shut_down, daemon=True)
    if answers():
        worker.start()
        worker.join(SHUTDOWN_TIMEOUT_S)
    if worker.is_alive():
        say("the application does not end in time; ending its processes")
    ray.shutdown()


def keep_logs(scratch: Path, logs: Path) -> None:
    """Moves the cluster's own logs to `logs`/ray, in place of those of the run before."""
    session = scratch / "ray" / "session_latest" / "logs"
    if session.is_dir():
        target = logs / "ray"
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(session.resolve(), target, ignore=_not_a_file, dirs_exist_ok=True)
        except OSError as bad:  # a full disk must not keep the system from stopping in order
            shutil.rmtree(target, ignore_errors=True)
            log.warning("cluster.logs.lost reason=%s", type(bad).__name__)


def _not_a_file(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not ((p := Path(folder, name)).is_file() or p.is_dir())]
