"The explorer as its user meets it: served by Voila, in a browser, a slider moves and the picture changes."
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from qk_geometry.columns import write_rows
from qk_geometry.example import example_grid, example_interventions
from qk_geometry.page import BROWSERS

ROOT = Path(__file__).resolve().parent.parent
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("voila", reason="voila is not installed")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def free_port():
    "A port that nothing listens on."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def served(tmp_path):
    "Address of an explorer over a made-up grid; its server ends with the test."
    for name, (rows, cells) in {"characters": example_grid()[:2], "interventions": example_interventions()[:2]}.items():
        write_rows(rows, tmp_path / "results/made_up" / name / "rows.parquet")
        cells.to_csv(tmp_path / "results/made_up" / name / "cells.csv", index=False)
    port = free_port()
    command = [sys.executable, "-c", "from qk_geometry.cli import main; main()", "explore", "--results", str(tmp_path / "results"), "--port", str(port), "--no-browser"]
    with open(tmp_path / "log", "wb") as log: server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(240):
            try: urllib.request.urlopen(f"http://127.0.0.1:{port}/voila/static/voila.js", timeout=1); break
            except urllib.error.HTTPError: break
            except OSError: time.sleep(0.5)
            assert server.poll() is None, (tmp_path / "log").read_text()
        yield f"http://127.0.0.1:{port}/"
    finally:
        os.killpg(server.pid, 15)
        server.wait(timeout=20)


def test_a_slider_moves_and_the_plot_changes_without_an_error_in_the_console(served):
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, errors = browser.new_page(viewport={"width": 1400, "height": 900}), []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.route(lambda url: not url.startswith(served), lambda route: route.fulfill(status=200, body=""))   # icons that Voila's page asks of the network
        page.goto(served, timeout=120_000)
        picture = page.locator("img.widget-image, .widget-image img, img.jupyter-widgets").first
        picture.wait_for(timeout=120_000)
        def changed(act):
            before = picture.get_attribute("src")
            act()
            page.wait_for_function("([e, before]) => e.src !== before", arg=[picture.element_handle(), before], timeout=60_000)
        layer = page.locator(".widget-hslider", has_text="layer").locator(".noUi-handle, [role=slider]").first
        changed(lambda: (layer.focus(), layer.press("ArrowRight")))
        changed(lambda: page.locator(".widget-dropdown", has_text="metric").locator("select").select_option("attention_entropy"))
        changed(lambda: page.locator(".widget-dropdown", has_text="grid").locator("select").select_option("interventions"))
        changed(lambda: page.get_by_text("logarithmic steps").click())
        browser.close()
    assert errors == [], "\n".join(errors)
