"""Shows the stages of a long preparation: a bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deploy.model_store import Progress


@contextmanager
def progress_bar(say: Callable[[str], None]) -> Iterator[Progress]:
    """Gives the function to report stages to. Nothing is shown until the first report."""
    if not sys.stderr.isatty():

        def tell(done: int, total: int, doing: str) -> None:
            say(f"phasegate: model: {doing} ({done}/{total})")

        yield tell
        return

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    )
    task = bar.add_task("model", total=None, visible=False)

    def show(done: int, total: int, doing: str) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, description=doing, visible=True)
        if done == total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()
