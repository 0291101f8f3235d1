"""The page in Chromium: charts with gaps, figures that agree, requests as bars and the tree."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from serve_help import fixtures

import quire.serve
import system

pytestmark = pytest.mark.system("chromium")
server, nothing_stays = fixtures()

SCRIPTS = [Path(quire.serve.__file__).with_name(name) for name in ("charts.js", "requests.js", "tree.js")]  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Opens an address in Chromium, and returns its document some seconds later."""

    def open_in_browser(url):
        argv = [system.need("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/home",
                "--window-size=1280,900", "--virtual-time-budget=5000", "--dump-dom", url]  # fmt: skip
        done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120)
        return done.stdout

    return open_in_browser


@pytest.fixture
def said(opened, tmp_path):
    """Returns the value of an expression of the page's scripts, and the document after it."""

    def value(expression):
        scripts = "\n".join(each.read_text("utf-8") for each in SCRIPTS)
        end = f"document.title = 'said'; $('said').textContent = JSON.stringify({expression});"
        page = f"<!doctype html><meta charset='utf-8'><div id='place'></div><pre id='said'></pre><script>{scripts}\n{end}</script>"
        (tmp_path / "said.html").write_text(page, "utf-8")
        document = opened((tmp_path / "said.html").as_uri())
        found = re.search(r'<pre id="said">(.+?)</pre>', document, re.DOTALL)
        assert found, "the script failed"
        return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")), document  # fmt: skip

    return value


def test_a_line_has_a_gap_where_nothing_ran_and_where_no_sample_was_taken(said):
    samples = [{"at": at} for at in (0, 2, 4, 6, 8, 60, 62)]
    values = [1, 2, None, 3, 4, 5, 6]
    runs, _ = said(f"runs({json.dumps(samples)}, {json.dumps(values)}, 2)")
    assert runs == [[0, 1], [3, 4], [5, 6]]
    series = json.dumps([{"name": "n", "kind": "one", "values": values}])
    drawn = (
        f"chart($('place'), {json.dumps(samples)}, {series}, {{show: num, everyS: 2, label: 'n'}})"
    )
    _, document = said(f"[{drawn}] && 1")
    assert document.count('class="curve"') == 3


def test_a_counter_that_began_anew_or_did_not_change_has_no_share(said):
    samples = json.dumps([{"at": at, "n": n} for at, n in enumerate((5, 8, 0, 4))])
    changes, _ = said(f"change({samples}, 'n', 1)")
    assert [each and each["by"] for each in changes] == [None, 3, None, 4]


def test_a_chart_without_any_value_says_so(said):
    drawn = "chart($('place'), [{at: 1}], [{name: 'n', kind: 'one', values: [null]}], {show: num, everyS: 2})"
    _, document = said(f"[{drawn}] && 1")
    assert "nothing ran in this time" in document


def test_names_of_tenants_are_text_and_no_markup(said):
    scope = {"id": 1, "start": 0, "end": 0, "uses": 1, "heat": 1, "running": 0, "branches": 0, "children": [],
             "scope": {"tenant": "<b id='evil'>", "lora": None, "salt": None}}  # fmt: skip
    _, document = said(f"[showTree($('place'), {json.dumps([scope])})] && 1")
    assert "&lt;b id='evil'&gt;" in document
    assert '<b id="evil">' not in document


def test_the_page_shows_the_hit_rate_at_1_x_bars_and_the_tree(server, opened):
    client = server.client()
    for at in range(3):
        prompt = "A page shows requests that share this text, the ones that found it before. " * 2
        client.completions.create(model="quire-tiny", prompt=f"{prompt}{at}", max_tokens=4)
    stats = server.get("/v1/cache").json()["stats"]
    rate = f"{100 * stats['hit_rate']:.0f} %"
    document = opened(server.url)
    assert ">live<" in document
    assert "no answer" not in document.partition("<script>")[0]
    text = re.sub(r"<[^>]+>", "|", document.partition("<script>")[0])
    text = re.sub(r"\|+", "|", text)
    assert f"|hit rate|{rate}|" in text
    assert f"|1 x|{rate}|" in text
    assert f"{stats['hit_tokens']} cached tokens" in text
    assert document.count('class="request"') == 3
    for words in (
        "Misses by reason",
        "never stored",
        "queued",
        "loaded from tiers",
        "computed",
        "decoded",
    ):
        assert words in text
    assert re.search(r'class="branch"[^>]*title="tokens 0.\d+', document)
