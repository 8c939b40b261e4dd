"""`plait report`: what is on the page. test_in_a_browser.py tests how a browser shows it."""

import json
import re
import time
from html.parser import HTMLParser
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from plait import PlaitError
from plait.host import RunFolder, locked
from plait_report.charts import AXES, Chart, Curve
from plait_report.looks import look
from plait_report.meshes import drawn
from plait_report.pictures import draw
from plait_report.recorded import going_on, recorded
from plait_report.serve import Server
from plugins.report.tests.made_runs import LONG, make_run, make_sweep

get_plotlyjs = pytest.importorskip("plotly.offline").get_plotlyjs

pytestmark = pytest.mark.usefixtures("plait_project")


def data_of(page):
    return json.loads(re.search(r'id="report">(.*?)</script>', page)[1])


def text_of(page):
    return re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S))


def test_a_page_of_a_sweep_and_a_run(plait_project, tmp_path):
    make_sweep(tmp_path / "runs/sweep")
    make_run(tmp_path / "runs/alone", experts=True)
    done = plait_project("report", "runs", "--out", "out/page.html")
    assert (done.code, done.out, done.err) == (0, "report: out/page.html\n", "")
    page = (tmp_path / "out/page.html").read_text()
    data = data_of(page)
    charts = {chart["key"]: chart for chart in data["charts"]}
    assert list(charts) == ["loss", "val_loss", "grad_norm", "tokens_per_second", "memory", "balance"]
    loss = charts["loss"]["curves"]
    assert [curve["name"] for curve in loss] == data["names"][:3]
    assert data["names"][:3] == ["alone", "0 (optimizer.lr=1e-3)", "1 (optimizer.lr=2e-3)"]
    assert loss[2]["x"] == {
        "steps": [1, 2, 3, 4, 5, 6, 7],
        "tokens": [100 * i for i in range(1, 8)],
        "time": [2.0 * i for i in range(1, 8)],
    }
    assert loss[2]["y"][-1] == pytest.approx(4.8)
    assert [curve["run"] for curve in loss] == [0, 1, 2]
    planned = [curve for curve in charts["memory"]["curves"] if curve["planned"]]
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
        "4.9 at step 30",
    ):
        assert said in text, said
    assert re.findall(r'data-sort="(.*?)"', page)[4:6] == ["optimizer.lr", "train.steps"]  # no other key differs
    assert " and 1 (optimizer.lr=2e-3): validation loss 5.0000, the lowest of 3 runs." in text
    assert "The runs stand at different steps, 7 to 30." in text
    assert re.findall(r'<span class="best"( hidden)?>', page) == ["", "", "", " hidden"]
    assert "Equal at every step: alone, 0 (optimizer.lr=1e-3)." in text
    assert "http" not in page.partition("<script>")[0]  # nothing is loaded


def test_the_slow_rank_of_a_run_is_named(plait_project, tmp_path):
    """Without the first steps, which compile; a run of one rank has none."""
    make_run(tmp_path / "runs/alone")
    make_run(tmp_path / "runs/divided", steps=30)
    file = tmp_path / "runs/divided" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        slow, seconds = (3, 0.3) if 10 < row["step"] <= 25 else (1, 9.0)
        row |= {"world_size": 4, "rank_seconds": 0.2, "slowest_rank": slow, "slowest_seconds": seconds}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plait_project("report", "runs").code == 0
    page = (tmp_path / "report.html").read_text()
    chart = next(each for each in data_of(page)["charts"] if each["key"] == "ranks")
    assert [curve["name"] for curve in chart["curves"]] == ["divided"]
    assert chart["curves"][0]["y"][10] == pytest.approx(0.5)
    shown = " ".join(text_of(page.partition("<h2>Slow ranks</h2>")[2]).split())
    assert "divided 4 3 15 of 20 (75%) 0.3 s 0.2 s 50% rank 1 in 25%" in shown


def ranks_drawn(*degrees):
    axes = [{"name": f"a{i}", "degree": n, "splits": None, "shards": [], "strategy": ""} for i, n in enumerate(degrees)]
    return re.findall(r'class="rank">(\d+)<', drawn({"dense": axes, "views": {}}))


def test_a_mesh_shows_every_rank_once_and_of_a_long_axis_the_ends():
    for degrees in ((4, 2), (2, 2, 2), (8, 1), (1, 8)):
        assert ranks_drawn(*degrees) == [str(rank) for rank in range(8)]
    assert ranks_drawn(9) == ["0", "1", "2", "3", "4", "5", "6", "8"]
    assert ranks_drawn(16, 2)[-4:] == ["12", "13", "30", "31"]


def test_pictures_that_cannot_be_written(plait_project, tmp_path):
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "a", steps=1)
    (tmp_path / "taken").write_text("")
    done = plait_project("report", "a", "--png=taken")
    assert (done.code, done.err.splitlines()[-1].partition(":")[0]) == (1, "plait")
    assert "the pictures taken cannot be written" in done.err


def test_pictures(plait_project, tmp_path):
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "a", steps=1)
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "peak_memory_bytes": 1024}\n')
    assert plait_project("report", "a", "--png=pictures").code == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss-over-steps.png", "loss-over-tokens.png", "loss-over-time.png", "memory.png"}
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


def test_each_picture_is_a_file_of_its_own_in_the_folder_itself(monkeypatch, tmp_path):
    monkeypatch.setattr("plait_report.pictures._draw", lambda chart, axis, path: path.touch())
    keys = ["val_loss", "val_loss/web", "val_loss/../../web", "val_loss/a:b", "val_loss/a/b", "val_loss/A-b"]
    draw([Chart(key, key, "nats per token", []) for key in keys], tmp_path / "pictures")
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        *("val_loss.png", "val_loss-web.png", "val_loss-..-..-web.png"),
        *("val_loss-a-b.png", "val_loss-a-b-2.png", "val_loss-A-b-3.png"),
    }


def test_a_long_run_keeps_its_spikes(plait_project, tmp_path):
    make_run(tmp_path / "a", steps=9000)
    path = tmp_path / "a/metrics.jsonl"
    rows = path.read_text().splitlines()
    rows[4321] = json.dumps({**json.loads(rows[4321]), "loss": 77.0})
    path.write_text("\n".join(rows) + "\n")
    assert plait_project("report", "a").code == 0
    curve = data_of((tmp_path / "report.html").read_text())["charts"][0]["curves"][0]
    assert len(curve["y"]) == len(curve["mean"]) <= 2002
    means = [value for value in curve["mean"] if value > 6.0]  # of the nine steps around it: what is smoothed
    assert means == [pytest.approx(12.9, abs=0.1)] * 2
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


def test_watch_serves_the_page_until_the_runs_end(plait_project, tmp_path):
    make_run(tmp_path / "a", outcome=None)
    folder = RunFolder(tmp_path / "a")
    folder.lock()
    seen = []

    def sleep(seconds):
        page = (tmp_path / "report.html").read_text()
        seen.append((seconds, data_of(page)["refresh"], "1 running" in page))
        folder.unlock()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        done = plait_project("report", "a", "--watch=3")
    assert done.code == 0
    assert re.fullmatch(r"report: report.html, and live at http://127.0.0.1:\d+/ until all runs have ended\n", done.out)
    assert seen == [(3, 3, True)]
    assert data_of((tmp_path / "report.html").read_text())["refresh"] is None


def test_only_a_browser_of_this_machine_gets_the_page():
    server = Server(0)
    try:
        server.show("<script>" + get_plotlyjs() + "</script>rest")
        assert urlopen(server.address).read().endswith(b"</script>rest")
        assert urlopen(f"{server.address}live").read() == b"<script></script>rest"
        for path, host in (("", "stranger.example"), ("other", "localhost:1")):
            with pytest.raises(HTTPError, match="403" if host.startswith("s") else "404"):
                urlopen(Request(server.address + path, headers={"Host": host}))
        with pytest.raises(PlaitError, match="it must be a port that is free"):
            Server(int(server.address.split(":")[2].strip("/")))
    finally:
        server.close(0)


def test_a_sweep_goes_on_between_its_jobs(tmp_path):
    make_sweep(tmp_path / "sweep")
    assert not going_on(recorded([tmp_path]))
    with locked(tmp_path / "sweep/.live"):
        assert going_on(recorded([tmp_path]))


def test_columns_with_names_and_seeds_of_one_config(plait_project, tmp_path):
    for seed, value in ((1, 2.0), (2, 2.5)):
        named = {"val_loss/web": value, "loss/code": 1.0, "epoch/code": 0.5, "epoch": 0.25, "loss": 3.0 + seed}
        make_run(tmp_path / f"runs/{seed}", seed=seed, more=named.items())
    make_run(tmp_path / "runs/other", lr=2e-3)
    assert plait_project("report", "runs").code == 0
    page = (tmp_path / "report.html").read_text()
    data = data_of(page)
    assert [(chart["title"], len(chart["curves"])) for chart in data["charts"]][:6] == [
        *(("Loss", 3), ("Validation loss", 3), ("Validation loss of web", 2), ("Loss of code", 2)),
        *(("Passes over code", 2), ("Gradient norm, before clipping", 3)),
    ]
    assert [each["title"] for each in data["best"]] == [
        *("validation loss", "validation loss of web", "loss", "loss of code", "tokens/s", "memory")
    ]
    assert data["best"][1]["sentence"] == "1: validation loss of web 2.0000, the lowest of 2 runs."
    assert data["leaders"] == [0, 0, 2]
    assert "4.5000 (4.0000 to 5.0000)" in text_of(page)


def test_a_mean_over_fewer_seeds_than_there_are_says_so(plait_project, tmp_path):
    make_run(tmp_path / "runs/1", seed=1)
    make_run(tmp_path / "runs/2", seed=2, more={"val_loss": None}.items())  # it has not come to its validation
    assert plait_project("report", "runs").code == 0
    assert "5.0000 (5.0000 to 5.0000), 1 of 2 runs" in text_of((tmp_path / "report.html").read_text())


class Headings(HTMLParser):
    """What a screen reader needs: `wrong` has each table, heading of a table, control and chart that lacks it."""

    def __init__(self):
        super().__init__()
        self.wrong, self.open, self.tables, self.captions = [], [], 0, 0

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if tag == "th" and "scope" not in given:
            self.wrong.append("th")
        if tag in ("input", "select") and "label" not in self.open:
            self.wrong.append(given)
        if given.get("class") == "chart" and not (given["role"] == "img" and given["aria-label"]):
            self.wrong.append(given)
        if tag not in ("input", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


def test_a_screen_reader_is_told_what_each_table_and_control_is(plait_project, tmp_path):
    make_sweep(tmp_path / "runs/sweep")
    assert plait_project("report", "runs").code == 0
    page = re.sub(r"<(script|style)\b.*?</\1>", "", (tmp_path / "report.html").read_text(), flags=re.S)
    headings = Headings()
    headings.feed(page)
    assert headings.wrong == []
    assert headings.tables == headings.captions > 5
    assert 'id="run-2" aria-pressed="true"' in page


def test_runs_are_told_apart_without_color():
    assert len({(look(run).marker, look(run).dash) for run in range(28)}) == 28


USAGE = "DIR... [--out PAGE.html] [--png FOLDER] [--watch[=SECONDS]] [--port N]"
FITS = "a run or its name, a sweep, or a folder that contains some, such as runs"
PAGE = "the name of a page, which ends in .html, such as report.html"
PORT = "the number of a port, at most 65535, such as 8000, or 0 for a free one"
TAKES = "DIR..., --out PAGE.html, --png FOLDER, --watch[=SECONDS], --port N"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], f"plait report needs DIR: plait report {USAGE}"),
        (["nowhere"], f"nowhere is not there; it must be {FITS}"),
        pytest.param([__file__], f"{__file__} is not a folder; it must be {FITS}", id="a file"),
        ([".", "--out=x.pdf"], f"--out is 'x.pdf'; it must be {PAGE}"),
        ([".", "--out=x"], f"--out is 'x'; it must be {PAGE}"),
        (["."], ". holds no run and no sweep: neither config.yaml nor sweep.json is in it or below"),
        ([".", "--watch=0"], "--watch is '0'; it must be a whole number of seconds, such as --watch=10"),
        ([".", "--port=x"], f"--port is 'x'; it must be {PORT}"),
        ([".", "--port=70000"], f"--port is '70000'; it must be {PORT}"),
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
