"""Memory of the dashboard, and time to first paint, with a large run.

    python benchmarks/dashboard.py                                  # 1,000 devices, 1,000 rounds that ask all of them
    python benchmarks/dashboard.py --per-round 10                   # rounds that ask ten
    python benchmarks/dashboard.py --store DIR                      # a store that an earlier call has filled
    python benchmarks/dashboard.py --store DIR --reads              # only the processor time of reads, no browser

Fills a store through the store's own calls (for 1,000,000 asks this takes a quarter of an hour and 1 GB), starts
`fleetdistill dashboard` as a process, and opens the run's page in headless Chromium, each time with an empty cache.
First paint is Chromium's `first-contentful-paint`; *figures shown* is when the curves and the devices' states are
there. Memory is the resident memory of the dashboard's process. Linux only; needs `chromium` and playwright.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the same run as in the tests
from support.dashboards import TOKEN, browser_arguments, chromium, dashboard
from support.large_run import RUN, device_name, fill

from fleetdistill_server.store.store import Store
from fleetdistill_server.views import fleet, overview, runs

TABS = ("Devices", "Rounds", "Events", "Data and bytes", "Settings", "Add a device")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=1000, help="devices that each round asks")
    parser.add_argument("--store", type=Path, help="directory of the store; filled if it does not exist")
    parser.add_argument("--repeats", type=int, default=5, help="browsers that open the page, each with an empty cache")
    parser.add_argument("--reads", action="store_true", help="only print the processor time of reads")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or Path(folder) / "store"
        if not store.exists():
            began = time.perf_counter()
            fill(store, given.devices, given.rounds, given.per_round)
            print(f"store filled in {time.perf_counter() - began:.0f} s")
        if given.reads:
            measure_reads(store, given.repeats)
        else:
            measure(store.resolve(), Path(folder), given.repeats)


def measure_reads(directory: Path, repeats: int) -> None:
    """Prints the processor time of what commands and the dashboard read."""
    store = Store.open(directory)
    reads: dict[str, Callable[[], object]] = {
        "overview": lambda: overview.overview(store),
        "runs show": lambda: runs.run(store, RUN),
        "devices": lambda: runs.devices(store, RUN),
        "page of a device": lambda: fleet.device(store, RUN, device_name(7)),
        "curves": lambda: overview.rounds(store, RUN, 0),
        "bytes by round": lambda: overview.traffic(store, RUN, 0),
        "progress": lambda: store.runs.progress(RUN),
    }
    for name, read in reads.items():
        print(f"{name}: {in_words(tuple(processor_seconds(read) for _ in range(repeats)), 3)}")
    store.close()


def processor_seconds(read: Callable[[], object]) -> float:
    """Returns the processor time of a call in seconds."""
    began = time.process_time()
    read()
    return time.process_time() - began


def measure(store: Path, work: Path, repeats: int) -> None:
    """Starts the dashboard, opens the page several times, and prints the figures."""
    began = time.perf_counter()
    with dashboard(work, "--store", str(store)) as url, sync_playwright() as started:
        print(f"the dashboard listens after {time.perf_counter() - began:.1f} s")
        process = psutil.Process(
            next(child.pid for child in psutil.Process().children() if "dashboard" in child.cmdline())
        )
        show_memory(process, "nobody looks")
        path = chromium()
        assert path is not None, "no browser found"
        browser = started.chromium.launch(executable_path=path, args=browser_arguments())
        paints, shown = zip(*(open_once(browser, url) for _ in range(repeats)), strict=True)
        print(f"first paint: {in_words(paints)}; figures shown: {in_words(shown)}; first of {repeats} has a cold cache")
        show_memory(process, f"{repeats} browsers have looked")
        look_at_all(browser, url)
        show_memory(process, "every tab was open")
        pages = [opened(browser, url)[0] for _ in range(10)]
        time.sleep(10)
        cpu = process.cpu_percent(10)
        show_memory(process, f"{len(pages)} pages are open ({cpu:.0f} % of a core)")
        browser.close()


def opened(browser: Browser, url: str) -> tuple[Any, float]:
    """Opens the run's page with an empty cache; returns it with the seconds until its figures are shown."""
    context = browser.new_context(
        viewport={"width": 1400, "height": 900}, extra_http_headers={"Authorization": f"Bearer {TOKEN}"}
    )
    page = context.new_page()
    page.set_default_timeout(600_000)
    began = time.perf_counter()
    page.goto(f"{url}/runs/{RUN}")
    page.locator("[aria-label^='Accuracy by round']").wait_for()
    page.get_by_text("devices acknowledged").wait_for()
    return page, time.perf_counter() - began


def open_once(browser: Browser, url: str) -> tuple[float, float]:
    """Returns the seconds to first paint, and until the figures are shown."""
    page, shown = opened(browser, url)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    page.context.close()
    return float(paint), shown


def look_at_all(browser: Browser, url: str) -> None:
    """Opens every tab and prints how long its first rows took."""
    page, _ = opened(browser, url)
    for tab in TABS:
        began = time.perf_counter()
        page.get_by_role("tab", name=tab).click()
        ready = {"Settings": "th[scope=row]", "Add a device": "text=with Device(", "Events": ".ag-row"}
        page.locator(ready.get(tab, ".ag-row")).first.wait_for()
        elements = page.evaluate("document.querySelectorAll('*').length")
        print(f"tab {tab}: first rows after {time.perf_counter() - began:.1f} s, {elements:,} elements on the page")
    page.context.close()


def in_words(seconds: tuple[float, ...], digits: int = 2) -> str:
    """Returns the median and the range."""
    median, least, most = (f"{item:.{digits}f}" for item in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median} s ({least} to {most})"


def show_memory(process: psutil.Process, when: str) -> None:
    """Prints the resident memory of a process."""
    print(f"resident memory, {when}: {process.memory_info().rss / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
