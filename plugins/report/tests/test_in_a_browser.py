"""How a real browser shows the page of `plait report`, and what clicks and keys do there."""

import base64
import io
import threading
import time

import pytest

from plait.host import RunFolder
from plait_report.looks import COLORS
from plait_report.page import page
from plait_report.recorded import recorded
from plait_report.serve import Server
from plugins.report.tests.chromium import Chromium
from plugins.report.tests.made_runs import make_run, make_sweep

pytest.importorskip("plotly")
pytestmark = pytest.mark.slow

OUTSIDE = """[...document.querySelectorAll("main *")].filter(e => !e.closest(".wide, .ranks, .chart, caption")
  && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className)"""
NAMES = """[...document.querySelectorAll("#runs tbody tr")].filter(row => !row.hidden)
  .map(row => row.querySelector("button").textContent)"""
DRAWN = "document.querySelectorAll('#chart-0 .scatterlayer .trace .js-line').length"  # lines of the first chart


@pytest.fixture
def browser(tmp_path):
    opened = []

    def start(width=1400, dark=False):
        opened.append(Chromium(tmp_path / f"browser-{len(opened)}", width, dark))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def written(folder, runs):
    (folder / "report.html").write_text(page(recorded([runs])))
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 500])
def test_it_shows_all_of_a_page(browser, tmp_path, width, dark):
    """Nothing sticks out, each chart is drawn, and the color of each run is in the picture."""
    from PIL import Image

    make_sweep(tmp_path / "runs/sweep")
    make_run(tmp_path / "runs/alone", experts=True)
    window = browser(width, dark)
    window.open(written(tmp_path, tmp_path / "runs"))
    window.until("document.querySelectorAll('.chart .scatterlayer .trace').length >= 20")
    assert window.value(OUTSIDE) == []
    assert window.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert window.value("document.querySelectorAll('.chart:empty').length") == 0
    background = window.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    image = Image.open(io.BytesIO(base64.b64decode(window.picture()))).convert("RGB")
    assert image.width == width
    colors = {color: count for count, color in image.getcolors(1 << 24)}
    assert all(colors.get(tuple(bytes.fromhex(COLORS[run][1:])), 0) > 100 for run in range(3))
    assert window.said == []


def test_what_a_reader_can_do(browser, tmp_path):
    for i, (lr, seed) in enumerate(((1e-3, 1), (1e-3, 2), (3e-3, 1), (2e-3, 1))):
        more = {"val_loss": 4.0 - i, "tokens_per_second": 50.0 - i, "grad_norm": 1e-3}
        make_run(tmp_path / f"runs/{i}", lr=lr, seed=seed, more=more.items())
    window = browser()
    window.open(written(tmp_path, tmp_path / "runs"))
    window.until(f"{DRAWN} === 4")

    window.value("document.getElementById('run-2').click()")  # a click, then Enter, hide a run in all charts
    window.until(f"{DRAWN} === 3")
    window.value("document.getElementById('run-3').focus()")
    window.key("Enter", 13)
    window.until(f"{DRAWN} === 2")
    pressed = "[...document.querySelectorAll('[aria-pressed]')].map(b => b.getAttribute('aria-pressed')).join()"
    assert window.value(pressed) == "true,true,false,false"
    assert window.value("document.activeElement.id") == "run-3"
    assert window.value("document.getElementById('shown').textContent") == "2 of 4 shown"
    assert window.value("[...document.querySelectorAll('#chart-1 .trace')].length") == 2

    window.value("location.reload()")  # the address keeps what was chosen
    window.until("document.readyState === 'complete' && typeof show === 'function'")
    window.until(f"{DRAWN} === 2")
    assert window.value(pressed) == "true,true,false,false"
    window.value("document.getElementById('show').click()")
    window.until(f"{DRAWN} === 4")

    sort = "document.querySelector(`[data-sort='optimizer.lr']`)"
    window.value(f"{sort}.click()")
    assert window.value(NAMES) == ["0", "1", "3", "2"]
    window.value(f"{sort}.click()")
    assert window.value(NAMES) == ["2", "3", "0", "1"]
    assert window.value(f"{sort}.closest('th').getAttribute('aria-sort')") == "descending"

    def put(name, value):
        kind = "checked" if isinstance(value, bool) else "value"
        given = str(value).lower() if isinstance(value, bool) else repr(value)
        window.value(f"{{ const e = document.querySelector('[name={name}]'); e.{kind} = {given};"
                     " e.dispatchEvent(new Event('input', { bubbles: true })); }")  # fmt: skip

    put("filter", "0.001 finished")
    window.until(f"{DRAWN} === 2")
    assert window.value(NAMES) == ["0", "1"]
    put("filter", "")
    window.until(f"{DRAWN} === 4")

    best = "[...document.querySelectorAll('.best')].filter(b => !b.hidden).map(b => b.closest('tr').dataset.run).join()"
    assert window.value(best) == "3"
    put("best", "tokens/s")
    assert window.value(best) == "0"
    assert window.value("document.getElementById('best').textContent") == "0: tokens/s 50, the highest of 4 runs."

    data = "document.getElementById('chart-0').data"
    assert window.value(f"{data}[0].y[29]") == pytest.approx(4.9)
    put("smooth", "0.9")
    window.until(f"{data}.length === 12")  # of each run the curve as it is, the smoothed one, and the markers
    weights = [0.9**i for i in range(30)]
    expected = sum(w * (5 - 0.1 * (30 - i) / 30) for i, w in enumerate(weights)) / sum(weights)
    assert window.value(f"{data}[1].y[29]") == pytest.approx(expected)
    assert window.value("new Set(document.getElementById('chart-2').data[1].y).size") == 1  # what is constant stays so
    put("smooth", "0")
    put("logy", True)
    window.until("document.getElementById('chart-0').layout.yaxis.type === 'log'")
    put("band", True)
    window.until(f"{data}.some(trace => trace.fill === 'tonexty')")
    assert window.value(f"{data}.map(trace => trace.name).filter(Boolean)") == ["mean of 2: 0, 1", "2", "3"]

    window.value("history.replaceState = () => { throw new DOMException('too often'); }; 0")  # as Safari does
    put("band", False)
    window.until(f"{data}.every(trace => trace.fill !== 'tonexty')")
    assert window.said == []


def test_equal_curves_show_the_markers_of_each(browser, tmp_path):
    for name in "abc":
        make_run(tmp_path / f"runs/{name}")
    window = browser()
    window.open(written(tmp_path, tmp_path / "runs"))
    window.until(f"{DRAWN} === 3")
    marks = "document.getElementById('chart-0').data.filter(t => t.mode === 'markers').map(t => [t.marker.symbol, t.x])"
    symbols, places = zip(*window.value(marks), strict=True)
    assert len(set(symbols)) == 3
    assert len({x for run in places for x in run}) == 18  # no marker covers another one


def test_a_live_page_gets_new_rows_and_keeps_what_was_chosen(browser, tmp_path):
    make_run(tmp_path / "runs/a", outcome=None)
    make_run(tmp_path / "runs/b")
    folder = RunFolder(tmp_path / "runs/a")
    folder.lock()
    server = Server(0)
    try:
        server.show(page(recorded([tmp_path / "runs"]), 1))
        window = browser()
        window.open(server.address)
        window.until(f"{DRAWN} === 2")
        window.value("document.getElementById('run-1').focus(); document.getElementById('run-1').click()")
        window.until(f"{DRAWN} === 1")
        make_run(tmp_path / "runs/c")
        with (tmp_path / "runs/a/metrics.jsonl").open("a") as file:
            file.write('{"step": 31, "loss": 1.25, "val_loss": 5.0, "tokens": 3100}\n')
        folder.unlock()
        server.show(page(recorded([tmp_path / "runs"])))
        window.until("document.querySelector('#runs').textContent.includes('1.2500')")
        window.until("document.getElementById('chart-0').data[0].y.at(-1) === 1.25")
        assert window.value("document.activeElement.id") == "run-1"
        assert window.value("document.getElementById('shown').textContent") == "2 of 3 shown"
        assert window.value("document.querySelector('h1').textContent") == "3 runs"
        assert window.value("document.getElementById('live').textContent") == ""
        assert window.said == []
    finally:
        server.close(0)


def test_the_last_state_reaches_an_open_page(browser, tmp_path):
    """`close` waits for it."""
    make_run(tmp_path / "runs/a")
    runs = recorded([tmp_path / "runs"])
    server = Server(0)
    server.show(page(runs, 1))
    window = browser()
    window.open(server.address)
    server.show(page(runs))
    began = time.monotonic()
    ending = threading.Thread(target=server.close, args=(1,))
    ending.start()
    window.until("document.getElementById('live').textContent === ''")
    ending.join()
    assert time.monotonic() - began < 10
    assert window.said == []
