"""No text of a run, device, class, event or setting runs as a script, and the policy would stop one that did."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from support.dashboards import TOKEN, dashboard
from support.processes import PATIENCE_SECONDS

from fleetdistill.knowledge import ClassCount, Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.records import Ask, Certificate
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

pytestmark = [pytest.mark.slow, pytest.mark.long]
TABS = ("Overview", "Devices", "Rounds", "Events", "Data and bytes", "Settings", "Add a device")
_INSERT = """markup => new Promise(done => {
  document.addEventListener('securitypolicyviolation', event => done(event.violatedDirective), {once: true});
  document.body.append(document.createRange().createContextualFragment(markup));
  document.querySelector('a[href^=javascript]')?.click();
  setTimeout(done, 10000, 'no rule');
})"""
"""Adds markup to the page, and returns the rule that it breaks."""
_RECORD = "window.ran = []; window.hit = name => { window.ran.push(name); };"


def script(field: str) -> str:
    """A text that calls `hit(field)` as HTML, as a Vue template, in a template string, or out of an attribute."""
    call = f"hit(`{field}`)"
    return f"""<img src=x onerror={call}>{{{{{call}}}}}${{{call}}}" :onclick='{call}' \\"""


def fill(directory: Path) -> None:
    """Makes a run with a script in every text, through the store's own calls, which check none of them."""
    run, devices = script("run"), [script("device"), ":" + script("other device")]
    classes = [script("class 0"), script("class 1")]
    settings: dict[str, Any] = {
        "name": run,
        "method": script("method"),
        "rounds": 3,
        script("setting"): script("value"),
    }
    contract = contract_pb2.Contract(classes=classes, input_shape=[1, 8, 8])
    profile = contract_pb2.DeviceProfile(samples=3, model_name=script("model"), sdk_version=script("sdk"), parameters=6)
    store = Store.open(directory)
    with store.transaction():
        store.runs.begin(run, {"run": settings, ":" + script("section"): {script("name"): [script("item")]}})
        store.runs.publish_contract(run, contract.SerializeToString())
        for device in devices:
            store.devices.register(run, device, device.encode(), profile.SerializeToString())
        times = {"issued_at": 1.0, "expires_at": time.time() + 9e5}
        store.credentials.add_certificate(
            Certificate(serial=script("serial"), device=devices[0], run=run, public_key=b"", pem=b"", **times)
        )
    with store.transaction():
        number = store.runs.start_round(run, devices)
        digest = hashlib.sha256(b"answer").digest()
        row: dict[str, Any] = {
            "run": run,
            "round": number,
            "step_number": 1,
            "step": script("step"),
            "expects": {},
            "payload": digest,
        }
        row |= {"payload_bytes": 5, "seed": 1, "deadline_at": 4e9}
        store.asks.add([Ask(**row, device=device) for device in devices])
        asked = store.asks.get(run, number, 1, devices[0])
        assert asked is not None
        store.asks.accept_upload(asked.id, 1, digest, 5, 3)
        counts = [ClassCount(label=label, sum=1, count=2) for label in range(len(classes))]
        for name, split in (("accuracy", "train"), ("accuracy", "test"), (script("variant") + "/accuracy", "test")):
            figure = Metric(name=name, split=split, sum=1, count=4, by_class=counts)
            store.history.add_figures(run, number, devices[0], Metrics(metrics=[figure]))
        counted = Counted()
        counted.tensor[script("kind of part")] = counted.sent[script("kind of part")] = 5
        store.history.add_traffic(run, number, devices[0], "up", counted, 3)
        store.history.add_event(
            run, script("kind"), script("event"), number=number, device=devices[0], code=script("code")
        )
        store.runs.close_round(run, number, digest, [asked.id], {})
        store.runs.start_round(run, devices)
        store.runs.close_short_round(run, number + 1, script("reason of a round"))
        store.runs.set_status(run, RunStatus.STOPPED, script("reason"))
    store.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard of a store with that run."""
    work = tmp_path_factory.mktemp("texts")
    fill(work / "store")
    with dashboard(work, "--store", "store") as address:
        yield address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page without the policy, so that a text which runs is seen to run."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, bypass_csp=True)
    context.add_init_script(_RECORD)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}/?token={TOKEN}")
    yield page
    context.close()


def seen(page: Any, *fields: str) -> None:
    """Waits until the text of each field is on the page, and checks that none of all has become markup or has run."""
    for field in fields:
        page.get_by_text(f"onerror=hit(`{field}`)").first.wait_for()
    check(page)


def check(page: Any) -> None:
    assert page.evaluate("window.ran") == []
    assert page.locator("img[src=x]").count() == 0


def test_no_text_of_a_run_is_a_script(page: Any, address: str) -> None:
    run = script("run")
    page.get_by_role("link", name="onerror").first.wait_for()
    seen(page, "run", "method")
    page.goto(f"{address}/runs/{quote(run, safe='')}")
    seen(page, "run", "reason")
    for tab, fields in {
        "Devices": ("device", "other device", "model", "sdk"),
        "Rounds": ("reason of a round",),
        "Events": ("kind", "event", "code", "device"),
        "Settings": ("setting", "value", "section", "name", "item"),
        "Add a device": ("run",),
        "Data and bytes": ("kind of part",),
    }.items():
        page.get_by_role("tab", name=tab).click()
        seen(page, *fields)
    bubbles = page.get_by_role("img", name=re.compile("Samples by class")).locator("path[fill-opacity='0.75']")
    for number in range(2):
        bubbles.nth(number).hover(force=True)
        page.get_by_text(re.compile(r"class <img .*: 2 samples")).wait_for()
        check(page)


@pytest.mark.long
def test_no_text_of_a_device_or_of_an_action_is_a_script(page: Any, address: str) -> None:
    run = quote(script("run"), safe="")
    page.goto(f"{address}/runs/{run}/devices/{quote(script('device'), safe='')}")
    seen(page, "device", "run", "model", "sdk", "step", "kind", "event", "code", "serial")
    chart = page.get_by_role("img", name=re.compile("Accuracy by round"))
    chart.hover()
    seen(page, "variant")
    page.get_by_role("button", name="Revoke permanently").click()
    page.get_by_role("dialog").get_by_text("Revoke device").wait_for()
    check(page)
    page.goto(f"{address}/runs/{run}")
    page.get_by_role("button", name="Delete permanently").click()
    page.get_by_role("dialog").get_by_text("Delete run").wait_for()
    check(page)
    page.goto(f"{address}/compare?runs={run}")
    seen(page, "run", "method")


@pytest.mark.long
@pytest.mark.parametrize("path", ["/runs/{}", "/runs/{}/devices/{}", "/compare?runs={}", "/{}"])
def test_no_text_of_an_address_is_a_script(page: Any, address: str, path: str) -> None:
    page.goto(address + path.replace("{}", quote(script("address"), safe="")))
    seen(page, "address")
    check(page)


def test_the_policy_allows_no_inline_script(browser: Any, address: str) -> None:
    context = browser.new_context()
    context.add_init_script(_RECORD)
    page = context.new_page()
    page.goto(f"{address}/?token={TOKEN}")
    page.get_by_role("heading", name="Runs").wait_for()
    for markup in ("<script>hit(1)</script>", "<img src=x onerror=hit(2)>", "<a href='javascript:hit(3)'>"):
        assert page.evaluate(_INSERT, markup).startswith("script-src")
    assert page.evaluate("window.ran") == []
    context.close()


def test_each_page_has_scripts_with_a_nonce_of_its_own(address: str) -> None:
    nonces = set()
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, follow_redirects=True) as opened:
        opened.get("/", params={"token": TOKEN})
        for path in ("/", "/compare", "/no-such-page"):
            answer = opened.get(path)
            policy = answer.headers["content-security-policy"]
            (nonce,) = re.findall(r"'nonce-([\w-]{20,})'", policy)
            assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
            without = re.findall(r"<script(?! nonce=\"" + nonce + r"\")[^>]*>", answer.text)
            assert set(without) <= {'<script defer src="/static/session.js">'}, "the dashboard's own file"
            nonces.add(nonce)
    assert len(nonces) == 3
