"""What operators do from the pages, in a browser, with a server with TLS and devices; viewers see none of it."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dashboard.dashboard_fleet import SETTINGS, make_device
from support.dashboards import dashboard, picture
from support.processes import wait_until
from support.secured import make_pki
from support.served import RUN, served

from fleetdistill import Device
from fleetdistill.errors import FleetDistillError, RefusedError
from fleetdistill.link.enrolment import read_token
from fleetdistill.wire.codes import Code
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow
IN_FRONT = "element => element.contains(document.activeElement) || document.activeElement === document.body"
"""Whether the focus is in a dialog, or on its way from its last element to its first, where browsers focus nothing."""


@dataclass(frozen=True)
class Service:
    """A served run with TLS.

    Attributes:
        work: Its folder.
        address: host:port.
        operator, viewer: Directories with identities.
    """

    work: Path
    address: str
    operator: Path
    viewer: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with TLS that serves one run."""
    work = tmp_path_factory.mktemp("actions")
    authority = make_pki(work / "pki")
    people = {}
    for role in (Role.OPERATOR, Role.VIEWER):
        people[str(role)] = work / str(role)
        authority.issue_person(role, "kim", 1.0, work / str(role))
    server = {"pki": str(work / "pki"), "enrol_listen": "127.0.0.1:0"}
    run = {**SETTINGS["run"], "rounds": 0}  # so that it goes on until the end of the tests
    with served(work, {**SETTINGS, "run": run, "server": server}) as address:
        yield Service(work, address, **people)


@contextlib.contextmanager
def opened(service: Service, identity: Path) -> Iterator[str]:
    """A dashboard with an identity."""
    folder = service.work / f"dashboard-{identity.name}"
    folder.mkdir(exist_ok=True)
    with dashboard(folder, "--server", service.address, "--identity", str(identity)) as address:
        yield address


class Worker:
    """A device that works in a thread until it is stopped or refused."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.error: FleetDistillError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.device.run()
        except FleetDistillError as error:
            self.error = error

    def join(self) -> None:
        """Waits until the device has stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Stops the device."""
        self.device.stop()
        self.join()
        self.device.close()


def tokens_from_the_page(page: Any, address: str, count: int) -> list[str]:
    """Creates tokens on the page of the run, with the keyboard alone once its button has the focus."""
    page.goto(f"{address}/runs/{RUN}")
    page.get_by_role("tab", name="Add a device").click()
    page.get_by_role("button", name="Create tokens").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Create enrolment tokens for run {RUN}?")
    dialog.get_by_label("Number of tokens").fill(str(count))
    picture(page, "enrol")
    dialog.get_by_role("button", name="Create the tokens").press("Enter")
    shown = page.get_by_role("dialog", name="shown only once")
    shown.get_by_label("Enrolment tokens").wait_for()
    picture(page, "tokens")
    result = shown.get_by_label("Enrolment tokens").input_value().split()
    page.keyboard.press("Escape")
    shown.wait_for(state="hidden")
    return result


@pytest.mark.long
def test_operator_enrols_devices_sees_them_work_and_revokes_one(service: Service, page: Any) -> None:
    with opened(service, service.operator) as address:
        tokens = tokens_from_the_page(page, address, 2)
        assert len({read_token(token).secret for token in tokens}) == 2
        workers = [
            Worker(make_device(service.address, service.work, RUN, number, enrolment=token))
            for number, token in enumerate(tokens)
        ]
        try:
            lead(page)
            calls = [row["call"] for row in operators(service)]
            assert calls[:4] == ["ChangeRun"] * 4
            assert {(row["role"], row["name"]) for row in operators(service)[:4]} == {("operator", "kim")}
            page.get_by_role("tab", name="Devices").click()
            page.get_by_role("link", name="device-1").click()
            see_a_device_at_work(page)
            revoke_with_the_keyboard(page, service)
            workers[1].join()
            assert isinstance(workers[1].error, RefusedError)
            assert workers[1].error.code == Code.REVOKED
        finally:
            for worker in workers:
                worker.stop()


def operators(service: Service) -> list[dict[str, Any]]:
    """Operators' calls, newest first, as an operator reads them from elsewhere."""
    with open_source(Path(), service.address, service.operator) as source:
        return source.operators().lists["operators"]


def lead(page: Any) -> None:
    """Pauses the run at work, starts, stops and starts it again, on its page."""
    page.get_by_text(re.compile("^[1-9][0-9]* rounds$")).wait_for()
    for verb, then in (("Pause", "Start"), ("Start", "Pause"), ("Stop", "Start"), ("Start", "Pause")):
        page.get_by_role("button", name=verb, exact=True).click()
        page.get_by_role("button", name=f"{verb} the run", exact=True).click()
        page.get_by_role("button", name=then, exact=True).wait_for()
        picture(page, verb.lower())


def see_a_device_at_work(page: Any) -> None:
    """Waits until the page of a device shows its answers, and looks at it."""
    page.get_by_role("heading", name="device-1", level=1).wait_for()
    page.get_by_text(re.compile(r"^[1-9]\d* of \d+ asks")).wait_for()
    page.get_by_text("acknowledged").first.wait_for()
    page.get_by_text("valid for 29 d").wait_for()
    picture(page, "device")


def revoke_with_the_keyboard(page: Any, service: Service) -> None:
    """Revokes a device on its page: first Escape, which does nothing and returns the focus, then for good."""
    button = page.get_by_role("button", name="Revoke permanently")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Revoke device device-1?")
    dialog.wait_for()
    picture(page, "revoke")
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    wait_until(lambda: button.evaluate("element => element === document.activeElement"), "the focus is back")
    assert not revoked(service, "device-1")

    page.keyboard.press("Enter")
    dialog.get_by_label("Reason").wait_for()
    for _ in range(10):
        page.keyboard.press("Tab")
        wait_until(lambda: dialog.evaluate(IN_FRONT), "the focus returns from the page behind the dialog")
    dialog.get_by_label("Reason").focus()
    page.keyboard.type("lost in the field")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Device device-1 is revoked.").wait_for()
    page.get_by_text("lost in the field").first.wait_for()
    button.wait_for(state="hidden")
    assert revoked(service, "device-1")


def revoked(service: Service, device: str) -> bool:
    """Whether the store has a revocation of a device."""
    store = Store.open(service.work / "store")
    try:
        return store.credentials.is_revoked(f"device:{device}", "")
    finally:
        store.close()


@pytest.mark.long
def test_viewer_sees_no_actions_and_server_would_refuse_them(service: Service, page: Any) -> None:
    with opened(service, service.viewer) as address:
        page.goto(f"{address}/runs/{RUN}")
        page.get_by_role("tab", name="Add a device").click()
        page.get_by_role("button", name="Copy the lines").wait_for()
        page.get_by_text("enrolment=token").wait_for()  # the page knows the role by now
        names = page.get_by_role("button").all_inner_texts()
        assert not {"Start", "Pause", "Stop", "Delete permanently", "Create tokens"} & set(names)
    with open_source(Path(), service.address, service.viewer) as source:
        for call in (
            lambda: source.revoke("device-0", ""),
            lambda: source.change(RUN, RunStatus.PAUSED),
            lambda: source.change(RUN, RunStatus.RUNNING),
            lambda: source.change(RUN, RunStatus.STOPPED),
            lambda: source.tokens(1, 60.0, RUN),
        ):
            with pytest.raises(RefusedError, match="viewer"):
                call()
