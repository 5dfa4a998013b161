"""What each `phasegate` command does. Heavy parts are imported by the commands that need them."""

import contextlib
import json
import sys
import time
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from deploy import config as configuration
from deploy import (
    config_file,
    control,
    detach,
    integrity_view,
    ledger_view,
    model_store,
    preflight,
    profiles,
    status_view,
)
from deploy.processes import end_marked, has_ended
from deploy.signals import StopSwitch
from deploy.state import StateDir, StateError, clear_runtime, held, open_state, read_private, read_runtime
from deploy.yaml_file import ConfigError, told

DOWN_TIMEOUT_S: Final = 90.0
GONE_TIMEOUT_S: Final = 10.0
"""From the release of the state folder to the end of the supervisor's process."""
TRACE_WAIT_S: Final = 2.0
"""Spans are written in batches: see deploy/tracing.py."""


def say(line: str) -> None:
    """To the person at the terminal, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def state_of(options: Namespace) -> StateDir:
    return open_state(options.state or configuration.default_state_dir())


def _chosen(options: Namespace) -> dict[str, Any]:
    """What the command line says of the configuration; None: nothing."""
    return {name: getattr(options, name) for name in ("profile", "port", "internal_port")}


def up(options: Namespace) -> int:
    if options.detach:
        return _up_detached(options)
    from deploy.local import Ready, StartError, Supervisor
    from deploy.progress import progress_bar

    config = config_file.load(options.config, **_chosen(options))
    state = state_of(options)

    def on_ready(ready: Ready) -> None:
        say(welcome(ready.base_url, ready.models[0], state))

    with progress_bar(say) as progress:
        supervisor = Supervisor(
            state,
            config,
            configuration.cache_dir(),
            say=lambda text: say(f"phasegate: {text}"),
            progress=progress,
        )
        try:
            supervisor.run(on_ready)
        except StartError as bad:
            sys.stderr.write(f"phasegate: error: {bad}\n")
            return 1
    say("phasegate: stopped")
    return 0


def welcome(base_url: str, model: str, state: StateDir) -> str:
    """What is told when the system is ready."""
    return "\n".join(
        (
            f"phasegate: ready at {base_url}",
            f"phasegate: the API key is in {state.local} (api_key)",
            "",
            "  KEY=$(python3 -c \"import json; print(json.load(open('"
            + str(state.local)
            + "'))['api_key'])\")",
            f'  curl {base_url}/v1/chat/completions -H "authorization: Bearer $KEY" \\',
            "    -H 'content-type: application/json' \\",
            f'    -d \'{{"model": "{model}", "temperature": 0, "max_tokens": 64, '
            f'"messages": [{{"role": "user", "content": "Hello"}}]}}\'',
            "",
        )
    )


def _up_detached(options: Namespace) -> int:
    config_file.load(options.config, **_chosen(options))  # fail here, not there
    state = state_of(options)
    if held(state):
        raise StateError(_running(state))
    arguments = ["--state", str(state.root)]
    for name, value in {"config": options.config, **_chosen(options)}.items():
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    switch = StopSwitch()
    switch.install()
    # The supervisor is in a session of its own: told to stop, we stop it, however we are told.
    with switch.interrupting():
        detach.start(arguments, state, say=say)
    return 0


def _running(state: StateDir) -> str:
    pid = state.lock.read_text().strip()
    return f"already running with state folder {state.root} (pid {pid}): stop it with `phasegate down`"


def config_check(options: Namespace) -> int:
    found = config_file.gather(options.config, **_chosen(options))
    state = StateDir((options.state or configuration.default_state_dir()).expanduser().absolute())
    running = held(state)
    mistakes = [
        *found.mistakes,
        *preflight.problems(
            found.config, state, configuration.cache_dir(), doubtful=found.doubtful, running=running
        ),
    ]
    if mistakes:
        raise ConfigError(told(found.source, mistakes))
    if instead := _instead(found.config):
        say(f"phasegate: {instead}")
    say(f"phasegate: {found.source}: nothing is wrong")
    if running:
        say(f"phasegate: the system runs in {state.root}: whether its ports are free was not looked at")
    return 0


def _instead(config: configuration.SystemConfig) -> str | None:
    """That a start here would use another profile than is asked for, and why."""
    return preflight.choose_profile(config.profile, configuration.cache_dir()).instead


def preflight_check(options: Namespace) -> int:
    if not options.dry_run:
        return config_check(options)
    from deploy import dry_run

    config = config_file.load(options.config, **_chosen(options))
    profile = preflight.load_profile(config.profile, configuration.cache_dir())
    for line in dry_run.report(profile):
        say(f"phasegate: {line}" if not line.startswith(" ") else line)
    if instead := _instead(config):
        say(f"phasegate: note: in a start here {instead}")
    return 0


def config_show(options: Namespace) -> int:
    found = config_file.gather(options.config, **_chosen(options))
    if found.mistakes:
        raise ConfigError(told(found.source, found.mistakes))
    say(config_file.show(found))
    # What is in force is shown, whether or not a start would take it.
    with contextlib.suppress(ConfigError):
        if instead := _instead(found.config):
            say(f"# {instead}")
    return 0


def down(options: Namespace) -> int:
    state = state_of(options)
    if not held(state):
        ended = end_marked(state.marker)
        clear_runtime(state)
        say(f"phasegate: nothing runs with state folder {state.root}" + (" (cleaned up)" if ended else ""))
        return 0
    runtime = read_runtime(state)
    if runtime is None:
        raise StateError(f"a supervisor is just starting or ending with {state.root}: try again")
    grace_s = float(control.ask(runtime.control_socket, "POST", "/stop")["grace_s"])
    deadline = time.monotonic() + DOWN_TIMEOUT_S + grace_s
    while held(state):
        if time.monotonic() > deadline:
            log = state.logs / "supervisor.log"
            raise StateError(f"pid {runtime.pid} does not end: see {log}; kill it, then run this again")
        time.sleep(0.1)
    if not has_ended(runtime.pid, within_s=GONE_TIMEOUT_S):
        raise StateError(f"everything is stopped, and pid {runtime.pid} does not end: kill it")
    say("phasegate: stopped")
    return 0


def running_socket(state: StateDir) -> str:
    """The control socket of the system that runs there.

    Raises:
        StateError: none does.
    """
    runtime = read_runtime(state) if held(state) else None
    if runtime is None:
        raise StateError(f"nothing runs with state folder {state.root}: start it with `phasegate up`")
    return runtime.control_socket


def status(options: Namespace) -> int:
    state = state_of(options)
    answer = control.ask(running_socket(state), "GET", "/status")
    if options.json:
        say(json.dumps(answer, indent=2))
        return 0
    if options.integrity:
        say(integrity_view.text(answer["replicas"]))
        return 0
    say(status_view.text(answer))
    if not state.local.exists():
        say("not ready yet")
    return 0


def debug_ledger(options: Namespace) -> int:
    from urllib.parse import quote

    path = "/ledgers" if options.replica is None else f"/ledgers?replica={quote(options.replica, safe='')}"
    found = control.ask(running_socket(state_of(options)), "GET", path)
    say(json.dumps(found, indent=2) if options.json else ledger_view.text(found))
    return 0


def trace(options: Namespace) -> int:
    from deploy import trace_view

    state = state_of(options)
    root = _await_trace(state, options.request)
    if root is None:
        raise trace_view.TraceError(_untold(state, options.request))
    say(json.dumps(trace_view.to_json(root), indent=2) if options.json else trace_view.text(root))
    return 0


def _await_trace(state: StateDir, name: str) -> Any:
    """The request's spans; those of one that has just ended may be on their way to the files."""
    from deploy import trace_view

    deadline = time.monotonic() + (TRACE_WAIT_S if held(state) else 0)
    root = trace_view.find(state.logs, name)
    while not trace_view.complete(root) and time.monotonic() < deadline:
        time.sleep(0.1)
        root = trace_view.find(state.logs, name)
    return root


def _untold(state: StateDir, name: str) -> str:
    """Why there is no trace, as far as that is known."""
    from urllib.parse import quote

    runtime = read_runtime(state) if held(state) else None
    if runtime is not None:
        with contextlib.suppress(control.ControlError):
            summary = control.ask(runtime.control_socket, "GET", f"/requests/{quote(name, safe='')}")
            if not summary["sampled"]:
                return (
                    f"request {summary['request_id']} was not sampled: see tracing.sample_ratio and the "
                    "client's traceparent"
                )
    return (
        f"no trace of {name!r} in {state.logs}: the request is unknown, still runs, was not sampled, or is "
        "too long ago"
    )


def chat(options: Namespace) -> int:
    from deploy.chat import converse

    state = state_of(options)
    running_socket(state)
    if not state.local.exists():
        raise StateError("the system is not ready yet")
    return converse(read_private(state.local), options.message, options.max_tokens, options.temperature)


def key_create(options: Namespace) -> int:
    from deploy import tenants

    expires = None if options.expires is None else tenants.expiry(options.expires, datetime.now(UTC))

    async def act(store: Any) -> tuple[str, str, str]:
        account = await tenants.account(store, options.account or tenants.FIRST_ACCOUNT)
        key, record = await store.create_key(account, tuple(options.models), expires)
        return account, record.id, key

    account, key_id, key = tenants.with_running_store(state_of(options), act)
    say(json.dumps({"account_id": account, "key_id": key_id, "api_key": key}, indent=2))
    return 0


def key_list(options: Namespace) -> int:
    from deploy import tenants

    async def act(store: Any) -> list[tuple[Any, list[Any]]]:
        return [(account, await store.keys_of(account.id)) for account in await store.accounts()]

    for account, records in tenants.with_running_store(state_of(options), act):
        say(f"{account.id}  {account.name}")
        for record in records:
            until = "never" if record.expires_at is None else _date(record.expires_at)
            models = ", ".join(record.models) or "all models"
            say(f"  {record.id}  made {_date(record.created_at)}  expires {until}  {models}")
    return 0


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def key_revoke(options: Namespace) -> int:
    from deploy import tenants

    async def act(store: Any) -> bool:
        revoked: bool = await store.revoke(options.id)
        return revoked

    if not tenants.with_running_store(state_of(options), act):
        raise tenants.TenantError(f"no key has the id {options.id!r}: see `phasegate key list`")
    say(f"{options.id} is void")
    return 0


def model_prepare(options: Namespace) -> int:
    from deploy.progress import progress_bar

    cache = configuration.cache_dir()
    with progress_bar(say) as progress:
        folder = model_store.prepare(options.name, cache, progress=progress)
    if options.verify:
        wrong = model_store.problems(folder, full=True)
        if wrong:
            raise model_store.ModelError(
                f"{folder}: {'; '.join(wrong)}: remove the folder and prepare it again"
            )
    say(str(folder))
    return 0


def model_add(options: Namespace) -> int:
    added = profiles.add(Path(options.path), options.name, configuration.cache_dir())
    say(f"profile {added.name}: {added.path}")
    say(f"serve it with `phasegate up --profile {added.name}`")
    return 0


def model_list(options: Namespace) -> int:
    for profile in profiles.known(configuration.cache_dir()):
        say(f"{profile.name:<24}{'own' if profile.own else 'shipped':<10}{profile.path}")
    return 0


def calibrate(options: Namespace) -> int:
    from deploy import calibration
    from deploy.progress import progress_bar
    from workers.api import Phase

    cache = configuration.cache_dir()
    profile = preflight.load_profile(options.profile, cache)
    text = calibration.text_of(options.text or calibration.SAMPLE)
    calibration.refuse_taken(options.out)
    with progress_bar(say) as progress:
        folder = preflight.model_dir(profile, Phase.PREFILL, cache, progress)
    file = calibration.calibrate(profile, folder, text)
    calibration.write(file, options.out)
    for line in calibration.summary(file):
        say(line)
    say(f"{options.out}: name it as decode.kv_scales, with kv_format {file.format}")
    return 0
