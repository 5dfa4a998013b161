"""Ties the life of an engine process to that of its replica.

vLLM runs the engine core as a child and does not notice when the parent is killed: the child goes on holding
its memory, its ports and its core. vLLM imports this module in the child, since it is named there as worker
extension. Importing it anywhere else does nothing.

The wait is on the pipe that `multiprocessing` gives every spawned child. `PR_SET_PDEATHSIG` would fire when
the parent's *thread* ends that started the engine.

An engine mostly ends by a signal, and then everything that it has a name for stays behind. The one such thing
is the lock of its progress bars, a named semaphore in `/dev/shm`: they get one that lives in the process.

What else an engine process of ours does beside vLLM begins here, too: see `trim.py`.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

from tqdm.std import TqdmDefaultWriteLock, tqdm

from workers.engine.trim import give_back_regularly


class Tether:
    """Adds nothing to the worker."""


def _hold(parent: multiprocessing.process.BaseProcess) -> None:
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def hold_to_parent() -> threading.Thread | None:
    """Die with the parent from now on; None when there is no parent to die with."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return None
    thread = threading.Thread(target=_hold, args=(parent,), name="tether", daemon=True)
    thread.start()
    return thread


def keep_bars_private() -> None:
    """Progress bars share their lock with no other process from now on."""
    tqdm.set_lock(threading.RLock())
    if hasattr(TqdmDefaultWriteLock, "mp_lock"):
        del TqdmDefaultWriteLock.mp_lock  # a bar has made one already: with this it is unlinked


if hold_to_parent() is not None:
    keep_bars_private()
    give_back_regularly()
