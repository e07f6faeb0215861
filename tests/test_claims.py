"""The claims, the report of them, the figures, and running them all."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from programs import environment, started, wait_until

from sparse2d.errors import UserError
from sparse2d.report.__main__ import TABLES as RUN_TABLES
from sparse2d.report.claims import Claim, TableView, claims_file, read_claims
from sparse2d.report.page import write_report
from sparse2d.report.views import latex, markdown, view, write_views
from sparse2d.reproduce import _no_testbed

CHECKOUT = Path(__file__).parents[1]
TABLES = CHECKOUT / "results" / "tables"
CLAIMS = read_claims(claims_file())
TABLE = """label,num_groups,qps,qps_std,ne_gap_pct,fingerprints
paper,1,1e6,,,arXiv 1
measured,1,1.5e6,2e4,-0.104,aaaabbbbcccc dddd
"""
VIEW = TableView("speed", {"label": "label", "qps": "QPS", "ne_gap_pct": "gap %", "fingerprints": "runs"})
FOUND = "{{ value('speed', 'qps', label='measured') }} QPS; {{ value('speed', 'qps') }}"
CLAIM = Claim("speed", "A|B & 100 %_", "this project", "It is <fast>.", "holds", "Sure.", FOUND, [VIEW], ["speed"])


@pytest.fixture
def results(tmp_path) -> Path:
    (tmp_path / "results" / "tables").mkdir(parents=True)
    (tmp_path / "results" / "tables" / "speed.csv").write_text(TABLE)
    return tmp_path / "results"


def pages(results: Path, *claims: Claim) -> list[str]:
    return [path.read_text() for path in write_report(claims, results, results.parent / "paper_figures")]


def test_the_committed_tables_are_what_the_claims_say_they_are(tmp_path):
    results = tmp_path / "results"
    shutil.copytree(TABLES, results / "tables")
    for page in pages(results, *CLAIMS):
        assert all(claim.title.replace("&", "&amp;") in page or claim.title in page for claim in CLAIMS)
        assert "(not in this table)" not in page
    views = [of for claim in CLAIMS for of in claim.tables]
    assert len({of.name for of in views}) == len(views)
    write_views(views, results / "tables")
    assert all(
        (results / "tables" / f"{of.name}.tex").is_file() for of in views if (TABLES / f"{of.name}.csv").is_file()
    )


def test_the_committed_report_is_what_the_committed_tables_give(tmp_path):
    """Else: make report, and commit what it writes."""
    results = tmp_path / "results"
    shutil.copytree(TABLES, results / "tables")
    report = write_report(CLAIMS, results, CHECKOUT / "paper_figures")[0]
    assert report.read_text() == (CHECKOUT / "results" / "REPORT.md").read_text()
    for path in [*TABLES.glob("*.md"), *TABLES.glob("*.tex")]:
        (results / "tables" / path.name).unlink()
    write_views([of for claim in CLAIMS for of in claim.tables], results / "tables")
    for path in [*TABLES.glob("*.md"), *TABLES.glob("*.tex")]:
        assert (results / "tables" / path.name).read_text() == path.read_text(), path.name


def test_every_claim_has_its_folder_and_every_figure_its_claim():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.verdict == "not run" or (CHECKOUT / "experiments" / claim.name / "README.md").is_file(), claim.name
        assert claim.laptop is not None or claim.full is not None
    scripts = {path.stem for path in (CHECKOUT / "paper_figures").glob("*.py")} - {"style", "ne_study", "__main__"}
    assert scripts <= {figure for claim in CLAIMS for figure in claim.figures}


def test_every_table_of_runs_is_shown_by_some_claim():
    assert set(RUN_TABLES) <= {of.name for claim in CLAIMS for of in claim.tables}


def test_the_laptop_takes_less_than_half_an_hour():
    assert sum(claim.laptop.minutes for claim in CLAIMS if claim.laptop is not None) < 30


def test_the_report_shows_the_papers_rows_beside_ours_rounded_with_spread_and_runs(results):
    text, page = pages(results, CLAIM)
    assert "| paper | 1000000 | - | arXiv 1 |" in text
    assert "| measured | 1500000 +- 20000 | -0.10 | aaaabbbb and 1 more |" in text
    assert "1500000 QPS; 1000000 to 1500000" in text
    assert '<tr class="paper"><td>paper</td><td>1000000</td>' in page
    assert "It is &lt;fast&gt;." in page


def test_what_is_published_in_words_comes_first(results):
    words = dataclasses.replace(VIEW, published=[{"label": "paper", "ne_gap_pct": "no loss"}])
    rows = pages(results, dataclasses.replace(CLAIM, tables=[words]))[0].split("|---|---|---|---|\n")[1].splitlines()
    assert rows[0] == "| paper | - | no loss | - |"
    assert rows[1].startswith("| paper | 1000000 |")


def test_what_is_found_follows_the_table(results):
    (results / "tables" / "speed.csv").write_text(TABLE.replace("1.5e6", "2.5e6"))
    for page in pages(results, CLAIM):
        assert "2500000 QPS; 1000000 to 2500000" in page


def test_what_is_missing_is_said_to_be(results):
    (results / "tables" / "speed.csv").unlink()
    for page in pages(results, CLAIM):
        assert "results/tables/speed.csv" in page
        assert "is missing: it has not been made yet" in page
        assert "too few runs to draw, or not drawn yet" in page
        # Whatever the entry says.
        assert "holds" not in page


def test_a_verdict_of_more_seeds_is_withheld_and_told(results):
    (results / "tables" / "speed.csv").write_text(
        "label,num_groups,qps,ne_gap_pct,n_seeds,fingerprints\nmeasured,1,2,3,2,a\n"
    )
    for page in pages(results, dataclasses.replace(CLAIM, seeds=3)):
        assert "not judged" in page
        assert "it took 3 seeds, these tables have 2" in page
        assert "Sure." not in page
    assert all("not judged" not in page for page in pages(results, dataclasses.replace(CLAIM, seeds=2)))
    absent = dataclasses.replace(CLAIM, found="It rose to {{ value('speed', 'qps', label='shaped') }}.")
    for page in pages(results, absent):
        assert "some of the runs that it rests on are not in these tables" in page
        assert "It rose" not in page


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tables": [TableView("speed", {"step_ms": "ms"})]}, "table speed has no column 'step_ms'"),
        ({"found": "{{ valu('speed', 'qps') }}"}, "claim speed: found: 'valu' is undefined"),
    ],
)
def test_a_claim_that_does_not_fit_its_table_is_refused(changes, text, results):
    with pytest.raises(UserError, match=re.escape(text)):
        pages(results, dataclasses.replace(CLAIM, **changes))


def test_the_report_is_the_same_bytes_each_time(results):
    assert pages(results, CLAIM) == pages(results, CLAIM)


def test_markdown_and_latex_escape_what_would_break_a_table():
    shown = view(
        pd.DataFrame({"tool": ["a|b_c & 5%"], "ms": [1234.5], "ms_std": [0.5]}),
        TableView("t", {"tool": "x_y", "ms": "ms"}),
    )
    assert markdown(shown).splitlines()[-1] == r"| a\|b_c & 5% | 1234 +- 0.5 |"
    assert r"a|b\_c \& 5\% & 1234 $\pm$ 0.5 \\" in latex(shown)
    assert r"x\_y & ms \\" in latex(shown)


def test_values_that_only_rounding_tells_apart_have_no_spread():
    shown = view(pd.DataFrame({"a": [3.2], "a_std": [5e-16]}), TableView("t", {"a": "a"}))
    assert shown["a"].tolist() == ["3.2 +- 0"]


def test_large_numbers_are_written_out_and_bytes_have_a_unit():
    columns = {
        "table_rows": [40_000_001.0],
        "rows_per_s": [1_592_801.3],
        "step_ms": [1321.4],
        "sent_bytes": [33_900_000.0],
    }
    shown = view(pd.DataFrame(columns | {"sent_bytes_std": [42e3]}), TableView("t", {name: name for name in columns}))
    assert shown.iloc[0].tolist() == ["40000001", "1590000", "1321", "33.9 MB +- 42 KB"]


def test_an_entry_with_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([dataclasses.asdict(CLAIM) | {"verdikt": "holds"}]))
    with pytest.raises(UserError, match=r"0\.verdikt: "):
        read_claims(path)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = """<iframe id="page" src="results/report.html" width="{width}" height="800"></iframe>
<script>
page.onload = () => {{
  const root = page.contentDocument.documentElement;
  const images = [...page.contentDocument.images];
  document.title = JSON.stringify({{wide: root.scrollWidth, images: images.length,
    drawn: images.filter(image => image.naturalWidth > 0).length,
    sections: page.contentDocument.querySelectorAll("section").length}});
}};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_in_a_browser(width, tmp_path):
    """Offline, without a word on the console, and without a scroll bar at the bottom, on a desk and on a phone."""
    shutil.copytree(TABLES, tmp_path / "results" / "tables")
    (path,) = write_report(CLAIMS, tmp_path / "results", CHECKOUT / "paper_figures")[1:]
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", path.read_text())
    (tmp_path / "measure.html").write_text(MEASURE.format(width=width))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    offline = [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [CHROMIUM, *flags, *offline, "--dump-dom", (tmp_path / "measure.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "CONSOLE" not in done.stderr
    (found,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    measured = json.loads(found)
    assert measured["wide"] <= width
    assert measured["sections"] == len(CLAIMS)
    assert measured["images"] == measured["drawn"] > 5


@pytest.mark.slow
def test_all_figures_are_drawn_from_the_tables_alone_and_are_the_same_each_time(tmp_path):
    ignored = shutil.ignore_patterns("*.pdf", "*.png", "__pycache__")
    shutil.copytree(CHECKOUT / "paper_figures", tmp_path / "paper_figures", ignore=ignored)
    shutil.copytree(TABLES, tmp_path / "results" / "tables")
    drawn = []
    for _ in range(2):
        subprocess.run([sys.executable, tmp_path / "paper_figures"], cwd=tmp_path, check=True, capture_output=True)
        files = sorted((tmp_path / "paper_figures").glob("*.p[dn][fg]"))
        drawn.append({file.name: file.read_bytes() for file in files})
        for file in files:
            file.unlink()
    assert len(drawn[0]) >= 12
    assert drawn[0] == drawn[1]


@pytest.fixture
def draw(tmp_path):
    """Draws figures in a copy, which has no tables yet and the committed pictures."""
    shutil.copytree(CHECKOUT / "paper_figures", tmp_path / "paper_figures")
    (tmp_path / "results" / "tables").mkdir(parents=True)

    def run(*names: str) -> tuple[int, str]:
        command = [sys.executable, tmp_path / "paper_figures", *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr

    return run


def test_a_figure_that_cannot_be_drawn_is_said_to_be_and_does_not_stay_from_other_tables(draw, tmp_path):
    tables, pictures = tmp_path / "results" / "tables", tmp_path / "paper_figures"
    shutil.copy(TABLES / "sync_cost.csv", tables)
    (tables / "ne_parity.csv").touch()
    for name in ("large_m", "sync_interval"):
        (tables / f"{name}.csv").write_text((TABLES / f"{name}.csv").read_text().partition("\n")[0] + "\n")
    code, told = draw()
    assert code == 1
    assert "no figure ne_parity: results/tables/ne_parity.csv is no table (No columns" in told
    assert "no figure large_m: its table has no two rules to compare\n" in told
    assert "no figure sync_interval: its table has no run of 2D\n" in told
    assert "no figure best_m: it needs results/tables/best_m.csv\n" in told
    assert sorted(path.name for path in pictures.glob("*.p[dn][fg]")) == ["sync_cost.pdf", "sync_cost.png"]
    (tables / "ne_parity.csv").unlink()
    # Only a figure that was asked for must have its table.
    assert draw("sync_cost")[0] == 0
    assert draw("ne_parity") == (1, "no figure ne_parity: it needs results/tables/ne_parity.csv\n")


def test_figures_of_one_seed_are_drawn_without_intervals_if_there_are_no_more(draw, tmp_path):
    def picture(rows: pd.DataFrame) -> bytes:
        rows.to_csv(tmp_path / "results" / "tables" / "batch_size.csv", index=False)
        assert draw("batch_size") == (0, "")
        return (tmp_path / "paper_figures" / "batch_size.png").read_bytes()

    rows = pd.read_csv(TABLES / "batch_size.csv")
    few = rows.assign(n_seeds=2, ne_gap_pct_ci95=1e4)
    assert picture(pd.concat([rows, few.assign(table_lr=7)])) == picture(rows)
    assert picture(few) == picture(few.assign(ne_gap_pct_ci95=None)) != picture(rows)


STEP = """
import sys
from pathlib import Path
name = sys.argv[1]
with open("log.txt", "a") as log:
    print(name, file=log)
sys.exit(name == "breaks" and not Path("repaired").exists())
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout whose three claims write one word each; the second one fails until it is repaired."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "paper_figures").mkdir()
    (tmp_path / "paper_figures" / "__main__.py").touch()
    (tmp_path / "step.py").write_text(STEP)
    claims = [
        dataclasses.asdict(dataclasses.replace(CLAIM, name=name, tables=[], figures=[], found=""))
        | {"laptop": {"commands": [f"python step.py {name} {{data}}"], "minutes": 0.1}}
        for name in ("first", "breaks", "last")
    ]
    (tmp_path / "experiments" / "claims.yaml").write_text(yaml.safe_dump(claims))
    for module in ("sparse2d.reproduce", "sparse2d.report.__main__"):
        monkeypatch.setattr(f"{module}.claims_file", lambda: tmp_path / "experiments" / "claims.yaml")
    # The report's own process would tell of the real claims: it is another test's.
    monkeypatch.setattr("sparse2d.reproduce.AFTERWARDS", ("python paper_figures",))
    return tmp_path


def test_reproduce_runs_the_rest_after_a_failure_and_goes_on_with_what_is_left(checkout, program):
    ended = program("reproduce")
    assert (ended.code, ended.err) == (
        1,
        "sparse2d.reproduce: error: failed: breaks; the same command goes on with them\n",
    )
    assert (checkout / "log.txt").read_text().split() == ["first", "breaks", "last"]
    assert "[2/3] breaks: failed after" in ended.log
    (checkout / "repaired").touch()
    ended = program("reproduce")
    assert ended.code == 0
    assert "[1/3] first: finished before" in ended.log
    assert "[2/3] breaks: done in" in ended.log
    assert (checkout / "log.txt").read_text().split() == ["first", "breaks", "last", "breaks"]
    # Other rows are other commands.
    assert program("reproduce", "claims=[last]", "data_path=rows.tsv").err == (
        "sparse2d.reproduce: error: data_path=rows.tsv does not exist; give raw Criteo rows, or leave it out\n"
    )
    ended = program("reproduce", "claims=[last]", f"data_path={checkout / 'step.py'}")
    assert ended.code == 0
    assert "data_path has no part in it" not in ended.log
    assert (checkout / "log.txt").read_text().split()[-1] == "last"


def test_reproduce_leaves_out_what_needs_a_testbed_where_there_can_be_none(checkout, program, monkeypatch):
    path = checkout / "experiments" / "claims.yaml"
    claims = yaml.safe_load(path.read_text())
    claims[1]["laptop"]["testbed"] = True
    path.write_text(yaml.safe_dump(claims))
    monkeypatch.setenv("PATH", str(checkout))
    _no_testbed.cache_clear()
    ended = program("reproduce")
    assert ended.code == 0
    assert "[2/3] breaks: left out, the testbed needs unshare, mount, ip, tc: install iproute2" in ended.log
    assert (checkout / "log.txt").read_text().split() == ["first", "last"]
    assert not list(checkout.glob("results/reproduced/breaks-*"))


ENDS = """
import signal, sys, time
from pathlib import Path

def end(*_):
    time.sleep(1)
    Path("ended").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
Path("begun").touch()
time.sleep(100)
"""


def test_reproduce_that_is_ended_lets_its_command_end_in_order(tmp_path):
    for folder in ("src", "conf"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ends.py").write_text(ENDS)
    scale = {"commands": ["python ends.py"], "minutes": 1}
    claim = dataclasses.asdict(dataclasses.replace(CLAIM, tables=[], found="")) | {"laptop": scale}
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "claims.yaml").write_text(yaml.safe_dump([claim]))
    ours = environment(PYTHONPATH=str(tmp_path / "src"))
    with started(module="sparse2d.reproduce", cwd=tmp_path, env=ours) as process:
        wait_until((tmp_path / "begun").exists, process)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (143, "sparse2d.reproduce: terminated")
    assert (tmp_path / "ended").exists()
    assert not (tmp_path / "results").exists()


def test_reproduce_of_an_unknown_claim(checkout, program):
    ended = program("reproduce", "claims=[firts]")
    assert (ended.code, ended.err) == (
        1,
        "sparse2d.reproduce: error: unknown claim 'firts'; choose from: first, breaks, last\n",
    )
