"""`plait report`: what is on the page, and how a real browser shows it."""

import json
import re
import shutil
import subprocess
import time

import attrs
import pytest

from plait.host import Job, Ledger, Outcome, RunFolder, metrics
from plait_report.charts import AXES, Chart, Curve
from plait_report.meshes import drawn
from plait_report.pictures import draw

pytest.importorskip("plotly")

LONG = "ValueError: made to fail; " + "a_reason_without_any_space_in_it_" * 12
MESH = {
    "world_size": 8,
    "dense": [
        {"name": "dp", "degree": 4, "splits": "batch", "shards": ["embed"], "strategy": "fsdp2"},
        {"name": "tp", "degree": 2, "splits": None, "shards": ["heads", "ffn"], "strategy": "tensor_parallel"},
    ],
    "views": {},
}


def make_run(path, lr=1e-3, steps=30, outcome="finished", mesh=MESH, name=None, experts=False):
    folder = RunFolder(path)
    folder.ranks.mkdir(parents=True)
    config = {
        "run": {"name": name},
        "optimizer": {"lr": lr},
        "strategy": {"fsdp2": {"shard": -1}},
        "train": {"steps": steps},
    }
    folder.write_config(config)
    folder.write_versions({"python": "3.11.7", "plait": "0.1.0", "torch": "2.13.0"})
    folder.write_mesh(mesh)
    folder.log_of(0).write_text("process 1 on node-a\nwaits on node-aa\nprocess 2 on node-b\n")
    file = metrics.MetricsFile(path / "metrics.jsonl")
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 - lr * 100 * step / steps, "grad_norm": 1.0, "tokens": 100 * step}
        row |= {"tokens_per_second": 50.0, "peak_memory_bytes": 2 << 30}
        row |= {"val_loss": 5.0} if step == steps else {}
        row |= {"experts/layers.0/max_over_mean": 2.0, "experts/layers.1/max_over_mean": None} if experts else {}
        file.log(row)
    if outcome:
        folder.set_outcome(Outcome(outcome, f"it {outcome}", step=steps))


def make_sweep(path):
    make_run(path / "0", 1e-3)
    make_run(path / "1", 2e-3, steps=7, outcome="failed")
    jobs = [
        Job(0, "0", "finished", overrides=["optimizer.lr=1e-3"], planned_memory_bytes=3 << 29),
        Job(1, "1", "failed", overrides=["optimizer.lr=2e-3"], reason=LONG),
        Job(2, "2", "pruned", overrides=["optimizer.lr=3e-3"], reason="does not fit </script><b>"),
    ]
    with Ledger(path).changing(["-m"]) as written:
        written[:] = jobs


pytestmark = pytest.mark.usefixtures("plait_project")


def data_of(page):
    return json.loads(re.search(r"const report = (.*?);</script>", page)[1])


def text_of(page):
    return re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S))


def test_a_page_of_a_sweep_and_a_run(plait_project, tmp_path):
    make_sweep(tmp_path / "runs/sweep")
    make_run(tmp_path / "runs/alone", experts=True)
    done = plait_project("report", "runs", "--out", "out/page.html")
    assert (done.code, done.out, done.err) == (0, "report: out/page.html\n", "")
    page = (tmp_path / "out/page.html").read_text()
    data = data_of(page)
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert list(charts) == ["loss", "grad_norm", "tokens_per_second", "memory", "balance"]
    loss = charts["loss"]["curves"]
    assert [curve["name"] for curve in loss] == [
        *("alone", "0 (optimizer.lr=1e-3)", "1 (optimizer.lr=2e-3)"),
        *(f"{name}, validation" for name in ("alone", "0 (optimizer.lr=1e-3)", "1 (optimizer.lr=2e-3)")),
    ]
    assert loss[2]["x"] == {
        "steps": [1, 2, 3, 4, 5, 6, 7],
        "tokens": [100 * i for i in range(1, 8)],
        "time": [2.0 * i for i in range(1, 8)],
    }
    assert loss[2]["y"][-1] == pytest.approx(4.8)
    assert loss[2]["run"] == loss[5]["run"] == 2
    planned = [curve for curve in charts["memory"]["curves"] if curve["dashed"]]
    assert [(curve["name"], set(curve["y"])) for curve in planned] == [("0 (optimizer.lr=1e-3), planned", {1.5})]
    assert set(charts["balance"]["curves"][0]["y"]) == {2.0}
    text = text_of(page)
    assert "2 finished, 1 failed, 1 pruned" in text
    for said in (
        LONG,
        "does not fit &lt;/script&gt;&lt;b&gt;",
        "2.00 GiB",
        "1.50 GiB",
        "node-a, node-b",
        "2.13.0",
        "dp  = 4",
    ):
        assert said in text, said
    differences = text[text.index("Where the configs differ") : text.index("Mesh")]
    assert "optimizer.lr" in differences
    assert "strategy" not in differences
    assert "http" not in page.partition("<script>")[0]  # nothing is loaded


def ranks_drawn(*degrees):
    axes = [{"name": f"a{i}", "degree": n, "splits": None, "shards": [], "strategy": ""} for i, n in enumerate(degrees)]
    return re.findall(r'class="rank">(\d+)<', drawn({"dense": axes, "views": {}}))


def test_a_mesh_shows_every_rank_once_and_of_a_long_axis_the_ends():
    for degrees in ((4, 2), (2, 2, 2), (8, 1), (1, 8)):
        assert ranks_drawn(*degrees) == [str(rank) for rank in range(8)]
    assert ranks_drawn(9) == ["0", "1", "2", "3", "4", "5", "6", "8"]
    assert ranks_drawn(16, 2)[-4:] == ["12", "13", "30", "31"]


def test_pictures(plait_project, tmp_path):
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "a")
    assert plait_project("report", "a", "--png=pictures").code == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names >= {"loss-over-steps.png", "loss-over-tokens.png", "loss-over-time.png", "memory.png"}
    assert all((tmp_path / "pictures" / name).read_bytes()[:4] == b"\x89PNG" for name in names)


def test_a_picture_shows_values_over_their_axis(monkeypatch, tmp_path):
    shown = {}

    def keep(figure, path):
        [line] = figure.axes[0].lines
        shown[path.name] = (list(line.get_xdata()), list(line.get_ydata()), figure.axes[0].get_xlabel())

    monkeypatch.setattr(pytest.importorskip("matplotlib.figure").Figure, "savefig", keep)
    along = {"steps": [1, 2], "tokens": [100, 200], "time": [2.0, 4.0]}
    draw([Chart("loss", "Loss", "nats per token", [Curve("a", 0, along, [5.0, 4.0])])], tmp_path)
    assert shown == {f"loss-over-{axis}.png": (x, [5.0, 4.0], AXES[axis]) for axis, x in along.items()}


def test_a_long_run_keeps_its_spikes(plait_project, tmp_path):
    make_run(tmp_path / "a", steps=9000)
    path = tmp_path / "a/metrics.jsonl"
    rows = path.read_text().splitlines()
    rows[4321] = json.dumps({**json.loads(rows[4321]), "loss": 77.0})
    path.write_text("\n".join(rows) + "\n")
    assert plait_project("report", "a").code == 0
    curve = data_of((tmp_path / "report.html").read_text())["charts"][0]["curves"][0]
    assert len(curve["y"]) <= 2002
    assert curve["x"]["steps"][curve["y"].index(77.0)] == 4322
    assert (curve["x"]["steps"][0], curve["x"]["steps"][-1]) == (1, 9000)


def test_damaged_and_old_runs_are_shown_as_far_as_they_go(plait_project, tmp_path):
    make_run(tmp_path / "a", outcome=None)
    make_run(tmp_path / "b")
    (tmp_path / "b/metrics.jsonl").write_text("{\n{}\n")
    (tmp_path / "a/mesh.json").unlink()
    (tmp_path / "a/versions.json").write_text("{")
    (tmp_path / "a/ranks/rank-0.log").unlink()
    assert plait_project("report", "a", "b").code == 0
    text = text_of((tmp_path / "report.html").read_text())
    assert "1 interrupted, 1 damaged" in text
    assert "line 1 of" in text
    assert "b: 8 ranks" in text
    assert "a and 1 more" not in text


def test_watch_ends_with_the_runs(plait_project, tmp_path):
    make_run(tmp_path / "a", outcome=None)
    folder = RunFolder(tmp_path / "a")
    folder.lock()
    seen = []

    def sleep(seconds):
        page = (tmp_path / "report.html").read_text()
        seen.append((seconds, '<meta http-equiv="refresh" content="3">' in page, "1 running" in page))
        folder.unlock()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        done = plait_project("report", "a", "--watch=3")
    assert done.code == 0
    assert seen == [(3, True, True)]
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()


TAKES = "DIR..., --out PAGE.html, --png FOLDER, --watch[=SECONDS]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "plait report needs DIR: plait report DIR... [--out PAGE.html] [--png FOLDER] [--watch[=SECONDS]]"),
        (["nowhere"], "nowhere is not a folder: give folders of runs or sweeps, such as runs/a or runs"),
        (["."], ". holds no run and no sweep: neither config.yaml nor sweep.json is in it or below"),
        ([".", "--watch=0"], "--watch is '0'; it must be a whole number of seconds, such as --watch=10"),
        ([".", "--pgn"], f"plait report has no option --pgn; it takes {TAKES}; did you mean '--png'?"),
        ([".", "--out"], "--out needs a value: --out PAGE.html"),
    ],
)
def test_bad_arguments(plait_project, arguments, sentence):
    done = plait_project("report", *arguments)
    assert (done.code, done.out, done.err) == (1, "", f"plait: {sentence}\n")  # no word of a page that is not there


def test_without_plotly(plait_project, monkeypatch, tmp_path):
    make_run(tmp_path / "a")
    monkeypatch.setattr("plait_report.page.find_spec", lambda name: None)
    done = plait_project("report", "a")
    assert done.err.endswith("draws with plotly, which is not installed: pip install 'plait-report[charts]'\n")


BROWSERS = ("chromium-headless-shell", "chromium", "chrome-headless-shell", "google-chrome", "chromium-browser")
PROBE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".wide, .ranks, .chart")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className);
  document.body.dataset.measured = JSON.stringify({ wide, page: document.documentElement.scrollWidth - innerWidth,
    curves: document.querySelectorAll(".scatterlayer .trace").length,
    charts: document.querySelectorAll(".chart .main-svg").length,
    dark: getComputedStyle(document.body).backgroundColor });
});</script>"""


@attrs.frozen
class Browser:
    """Chromium without a window, and without a network."""

    path: str

    def __call__(self, page, *options):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'browser'}"]
        command = [self.path, *flags, *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no headless browser: none of {', '.join(BROWSERS)}")
    return Browser(path)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_shows_all_of_it(plait_project, browser, tmp_path, width, dark):
    """Nothing sticks out at either width, each curve is drawn, and the picture is not empty."""
    from PIL import Image

    make_sweep(tmp_path / "runs/sweep")
    make_run(tmp_path / "runs/alone", experts=True)
    assert plait_project("report", "runs").code == 0
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    options = (f"--window-size={width},5000", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    shown = browser(page, "--dump-dom", *options)
    measured = json.loads(re.search(r'data-measured="(.*?)"', shown)[1].replace("&quot;", '"'))
    assert measured["wide"] == []
    assert measured["page"] <= 0
    data = data_of(page.read_text())
    assert measured["curves"] == sum(len(chart["curves"]) for chart in data["charts"])
    assert measured["charts"] >= len(data["charts"])
    assert measured["dark"] == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    picture = tmp_path / "page.png"
    browser(page, f"--screenshot={picture}", *options)
    image = Image.open(picture).convert("RGB")
    assert image.width == width
    colors = {color: count for count, color in image.getcolors(1 << 24)}
    assert max(colors.values()) < 0.97 * image.width * image.height
    for run in range(3):  # the color of each run's curves is there
        wanted = tuple(int(data["colors"][run][i : i + 2], 16) for i in (1, 3, 5))
        assert colors.get(wanted, 0) > 100, run
