"""The engines' part in `python -m load formats`: see `orders.py`.

Standard input has a `Start`, answered by `Ready`, then any number of orders, each answered by a line. The end
of the input ends the program.
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack

import msgspec

from workers.trials.orders import Order, Start
from workers.trials.trial import Trial


async def main() -> None:
    # Whatever prints meanwhile must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
    trial = Trial(msgspec.json.decode(sys.stdin.buffer.readline(), type=Start))
    async with AsyncExitStack() as life:
        answers.write(msgspec.json.encode(await trial.begin(life)) + b"\n")
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            answers.write(msgspec.json.encode(await trial.obey(orders.decode(line))) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
