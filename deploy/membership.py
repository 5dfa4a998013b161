"""Hands the system's membership key to its processes, through Ray's control service.

Who reads there has shown Ray's own token. The key never stands in a file of the state folder, in Redis, or in
a deployment's configuration; it is made anew with every cluster.
"""

from typing import Final

from kv_transfer.api import Membership

_NAMESPACE: Final = b"phasegate.membership"
_KEY: Final = b"key"


def of_this_system() -> Membership:
    """The key of the cluster that this process belongs to. Whoever asks first makes it."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    _internal_kv_put(_KEY, Membership.mint().encode(), overwrite=False, namespace=_NAMESPACE)
    return Membership.decode(_internal_kv_get(_KEY, namespace=_NAMESPACE))
