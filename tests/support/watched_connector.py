"""Our connector, and beside it what each forward was given: read from the tensors that the kernels get."""

import zlib
from typing import TYPE_CHECKING, Any

from kv_transfer.connector.facade import PhasegateConnector
from tests.support.cell_words import Given, Step

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext


class WatchedConnector(PhasegateConnector):
    steps: list[Step]
    """Since the last `clear`."""

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for _, tables in self._w.check.tables(forward_context):
            self.steps.append(self._given(tables))
            return

    def bind_runner(self, runner: Any) -> None:
        super().bind_runner(runner)
        self.steps = []
        self._runner = runner

    def _given(self, tables: Any) -> Step:
        batch = self._runner.input_batch
        size = batch.block_table.block_tables[0].block_size
        step = {}
        for row, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
            first, end = tables.query_start_loc[row : row + 2].tolist()
            length = int(tables.seq_lens[row])
            pages = tables.block_table[row, : -(-length // size)].tolist()
            full = pages[: (length - (end - first)) // size]
            step[request_id] = Given(
                tuple(pages),
                tuple(tables.slot_mapping[first:end].tolist()),
                tuple(self._digest(page) for page in full),
            )
        return step

    def _digest(self, page: int) -> int:
        digest = 0
        for cache in self._w._caches:
            digest = zlib.crc32(cache[page].contiguous().numpy().tobytes(), digest)
        return digest
