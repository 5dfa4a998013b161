"""Keeps Serve's internal gRPC server off the network.

Ray Serve 2.60 starts in every replica a server for calls between deployments. It unpickles what it is sent
by whoever knows the cluster's token, and binds all interfaces; there is no setting for the address.
"""

from typing import Any

ANYWHERE = "[::]"


class ListenerChanged(RuntimeError):
    """This Ray starts the server in another way: where it listens must be looked at anew."""


def bind_internal_server(host: str) -> None:
    """From now on the server of this replica binds `host`. Call it before the replica is initialised.

    Raises:
        ListenerChanged: there is no such place in this version of Ray.
    """
    from ray.serve._private import replica

    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        raise ListenerChanged("ray.serve._private.replica has no add_port_to_grpc_server")

    def on_host(server: Any, address: str) -> Any:
        if not address.startswith(ANYWHERE):
            raise ListenerChanged(f"the internal server was to bind {address}, not {ANYWHERE}")
        return add_port(server, address.replace(ANYWHERE, host))

    replica.add_port_to_grpc_server = on_host
