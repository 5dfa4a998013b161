import asyncio

from gateway.dispatch.inbox import Inbox


async def test_what_came_before_the_reader_looked_is_there_at_once_and_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    for item in (1, 2, 3):
        inbox.put(item)

    assert await inbox.take() == [1, 2, 3]


async def test_a_waiting_reader_is_woken_once_for_all_that_came_in_a_pass() -> None:
    inbox: Inbox[int] = Inbox()
    reading = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)

    inbox.put(1)
    inbox.put(2)

    assert await reading == [1, 2]


async def test_nothing_is_lost_when_a_reader_is_cancelled() -> None:
    inbox: Inbox[int] = Inbox()
    reading = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(1)
    reading.cancel()
    await asyncio.wait({reading})

    inbox.put(2)

    assert await inbox.take() == [1, 2]
