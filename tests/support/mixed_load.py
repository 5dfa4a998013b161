"""One real engine under a load that does all that can happen to a page, and the account of it.

    python -m tests.support.mixed_load < [plans] > [accounts]

Prompts share prefixes, are computed in pieces, preempted for want of pages, aborted at any moment; some ship
their pages to themselves under another salt, some wait for pages that never come; now and then the prefix
cache is emptied. A process of its own: an engine leaves its mark on the process that it ran in.
"""

import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kv_transfer.api import HandoffOutcome, HandoffReport, Role, Ticket
from kv_transfer.integrity.tags import tag_domain
from tests.support.small_engine import ROOT, small_engine
from tests.support.step_watch import StepWatch
from tests.support.tiny_model import random_llama

STEPS_A_REQUEST: Final = 400
"""More than this many steps for each request, and the engine hangs."""
SALTS: Final = ("", "a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    requests: int
    pages: int
    """Of the cache; few of them make preemptions."""
    seed: int
    model: str = ""
    """Folder; empty: two layers with random weights."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    sequences: int = 20
    batched_tokens: int = 96
    context: int = 512
    prefixes: tuple[int, ...] = (64, 64, 96, 224)
    """Tokens that prompts have in common."""
    answer: tuple[int, int] = (16, 72)
    """Tokens: at least, and less than."""
    tags_changed: int = 0
    """How often a live page's tag is changed behind the ledger's back, when all else is done."""


@dataclass(slots=True)
class Account:
    """What one plan came to. Requests are the engine's: each of `n` answers is one."""

    plan: Plan
    requests: int = 0
    preempted: int = 0
    hits: int = 0
    chunked: int = 0
    aborted: int = 0
    shipped: int = 0
    """Got their pages over a link."""
    in_vain: int = 0
    """Waited for pages that never came."""
    siblings: int = 0
    """Of prompts with two answers."""
    unheard: int = 0
    """Finished answers that went with the other one, which was aborted."""
    resets: int = 0
    """Of the prefix cache."""
    steps: int = 0
    steps_unchecked: int = 0
    pages_checked: int = 0
    answers: int = 0
    repeated: int = 0
    """Answers to a text that had been answered before."""
    unlike: int = 0
    """Those that differ from the earlier answer."""
    shortest: int = 10**9
    """Tokens of the shortest answer."""
    errors: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)
    pages_missing: int = 0
    ledger_rows: int = 0
    seconds: float = 0.0
    changed: list[dict[str, Any]] = field(default_factory=list)
    """For each tag that was changed: who had the page, who ended as an error, and what was counted."""


class Load:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.rnd = random.Random(plan.seed)
        self.account = Account(plan)
        self._requests: set[str] = set()
        self._tickets: set[str] = set()
        """Requests whose pages come from elsewhere: their hits are counted apart."""
        self._texts: dict[str, tuple[int, ...]] = {}
        """By live request of ours; empty where two answers are asked for, which are not alike."""
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._numbers = iter(range(10**9))
        self._engine_id = secrets.token_hex(16)
        self._engine = small_engine(
            Path(plan.model) if plan.model else random_llama(folder),
            folder,
            self._engine_id,
            max_model_len=plan.context,
            max_num_batched_tokens=plan.batched_tokens,
            max_num_seqs=plan.sequences,
            num_gpu_blocks_override=plan.pages,
            scheduling_policy=plan.policy,
        )
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self.guard = self.scheduler.connector.guard
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._address = self.scheduler.connector._s._gauges._workers[0].control
        self._watch = StepWatch(
            self.scheduler, fetches=lambda request_id: request_id.split("-")[0] in self._tickets
        )
        vocabulary = self._engine.model_config.get_vocab_size()
        self._word = lambda: self.rnd.randrange(3, vocabulary)
        self._prefixes = [[self._word() for _ in range(n)] for n in plan.prefixes]
        self._known = [self._prompt() for _ in range(40)]

    # -- requests

    def _prompt(self) -> tuple[int, ...]:
        prefix = self.rnd.choice(self._prefixes)
        if self.rnd.random() < 0.25:  # whole pages, or one token more or less
            return (*prefix, *[7] * self.rnd.choice([0, 1, 31, 32, 33]))
        prefix = prefix[: self.rnd.randrange(20, len(prefix) + 1)]
        return (*prefix, *self._words(self.rnd.randrange(1, 60)))

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self._word() for _ in range(count))

    def _add(self) -> None:
        text = self.rnd.choice(self._known)
        if self.rnd.random() < 0.2:
            text = self._prompt()
        salt = self.rnd.choice(SALTS)
        dice = self.rnd.random()
        if dice < 0.08:
            self._ship(text, salt)
        elif dice < 0.12:
            self._send(text, salt, ticket=self._ticket(Role.RECEIVE, secrets.token_hex(16), deadline_s=0.2))
        elif dice < 0.2:
            self.account.siblings += 2
            self._send(text, salt, n=2)
        else:
            self._send(text, salt)

    def _ship(self, text: tuple[int, ...], salt: str) -> None:
        """The same text twice: the second finds nothing under its salt, and gets the first one's pages."""
        transfer_id = secrets.token_hex(16)
        self._send(text, salt, ticket=self._ticket(Role.SEND, transfer_id))
        self._send(text, salt + "'", ticket=self._ticket(Role.RECEIVE, transfer_id))

    def _ticket(self, role: Role, transfer_id: str, deadline_s: float = 60.0) -> Ticket:
        return Ticket(
            transfer_id=transfer_id,
            role=role,
            peer_engine=self._engine_id,
            peer_addresses=(self._address,) if role is Role.RECEIVE else (),
            deadline_s=deadline_s,
        )

    def _send(self, text: tuple[int, ...], salt: str, *, n: int = 1, ticket: Ticket | None = None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=n,
            max_tokens=self.rnd.randrange(*self.plan.answer),
            temperature=0.0 if n == 1 else 0.8,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # all answers of one prompt at once
            extra_args=None if ticket is None else {"kv_transfer_params": ticket.to_params()},
        )
        name = f"r{next(self._numbers)}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(text)}
        if salt:
            prompt["cache_salt"] = salt
        if ticket is not None:
            self._tickets.add(name)
        self._texts[name] = text if n == 1 else ()
        before = set(self.scheduler.requests)
        priority = self.rnd.randrange(4) if self.plan.policy == "priority" else 0
        self._engine.add_request(name, prompt, params, priority=priority)
        self._requests |= self.scheduler.requests.keys() - before

    # -- the run

    def run(self) -> None:
        while len(self._requests) < self.plan.requests or self._busy():
            while self._room() and self.rnd.random() < 0.6:
                self._add()
            self.step()
            if self._texts and self.rnd.random() < 0.035:
                self._abort(self.rnd.choice(sorted(self._texts)))
            if self.rnd.random() < 0.004:
                self.account.resets += self._watch.reset_cache()
            assert self.account.steps < STEPS_A_REQUEST * self.plan.requests, "hangs"

    def _room(self) -> bool:
        return len(self._requests) < self.plan.requests and len(self._texts) < self.plan.sequences + 4

    def _busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests() or self.scheduler.requests)

    def step(self) -> list[str]:
        """One step; requests of ours that ended with an error in it."""
        failed = []
        for output in self._engine.step():
            if not output.finished:
                continue
            text = self._texts.pop(output.request_id)
            self._note_transfer(output.kv_transfer_params)
            for answer in output.outputs:
                if answer.finish_reason == "error":
                    failed.append(output.request_id)
                else:
                    self._take(text, list(answer.token_ids))
        self.account.steps += 1
        self.account.errors += len(failed)
        return failed

    def _note_transfer(self, params: dict[str, Any] | None) -> None:
        report = HandoffReport.from_params(params)
        if report is not None:
            self.account.shipped += report.outcome is HandoffOutcome.SHIPPED
            self.account.in_vain += report.outcome is HandoffOutcome.RECOMPUTED

    def _take(self, text: tuple[int, ...], tokens: list[int]) -> None:
        self.account.answers += 1
        self.account.shortest = min(self.account.shortest, len(tokens))
        if not text:
            return
        before = self._answers.get(text)
        if before is not None:
            self.account.repeated += 1
            common = min(len(before), len(tokens))
            self.account.unlike += before[:common] != tokens[:common]
        if before is None or len(tokens) > len(before):
            self._answers[text] = tokens

    def _abort(self, name: str) -> None:
        ended = self._watch.abort(lambda: self._engine.abort_request([name]))
        asked = 1 if self._texts.pop(name) else 2
        self.account.unheard += asked - ended

    def settle(self) -> Account:
        """The account, when all is done."""
        account, counts = self.account, self.guard.counts
        account.requests = len(self._requests)
        account.preempted = len(self._watch.preempted)
        account.hits = len(self._watch.hits)
        account.chunked = len(self._watch.chunked)
        account.aborted = self._watch.aborted
        account.steps_unchecked = counts.unchecked
        account.pages_checked = counts.pages
        account.mismatches = {cause.value: count for cause, count in self.guard.mismatches().items()}
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        account.pages_missing = self.pool.num_gpu_blocks - 1 - len(free)
        account.ledger_rows = self.guard.ledger.rows
        return account

    def change_a_tag(self) -> dict[str, Any]:
        """The tag of some request's page changes, and nobody is told why."""
        ledger, before = self.guard.ledger, self.guard.mismatches()
        for _ in range(3):
            self._send(self._words(self.rnd.randrange(40, 120)), "")
        for _ in range(self.rnd.randrange(6, 14)):
            self.step()
        victim = self.rnd.choice(sorted(request.request_id for request in self.scheduler.running))
        page, tag = self.rnd.choice(ledger.row(victim, 0))
        ledger._retag(page, tag_domain(tag))
        failed: list[str] = []
        while self._busy():
            failed += self.step()
        counted = self.guard.mismatches() - before
        return {"victim": victim.split("-")[0], "failed": failed, "counted": dict(counted)}

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def account_of(plan: Plan) -> Account:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        load = Load(plan, Path(folder))
        started = time.monotonic()
        load.run()
        account = replace(load.settle(), seconds=round(time.monotonic() - started, 1))
        account.changed = [load.change_a_tag() for _ in range(plan.tags_changed)]
        load.close()
    return account


def accounts_of(plans: Sequence[Plan], *, within_s: float) -> list[Account]:
    """One engine after the other, in a child process that ends here."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.mixed_load"],
        input=msgspec.json.encode(plans).decode(),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=within_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the engine failed:\n{done.stderr[-3000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Account])


def main() -> None:
    plans = msgspec.json.decode(sys.stdin.read(), type=list[Plan])
    accounts = [account_of(plan) for plan in plans]
    sys.stdout.write("\n" + msgspec.json.encode(accounts).decode() + "\n")


if __name__ == "__main__":
    main()
