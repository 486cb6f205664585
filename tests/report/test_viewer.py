import math
import re
from pathlib import Path

import numpy as np
import pytest

from qurl_ray.report.page import script_data
from qurl_ray.report.report import write_report
from qurl_ray.report.tokens import gap_class, mismatch
from qurl_ray.report.viewer import card, step_page, write_rollouts
from tests.report.browser import Dom, Reader, needs_chromium, opened
from tests.report.test_report import HOSTILE, Page, a_run, a_sample, step

ACTS = [
    '</script><img src=x onerror="document.title=1">',
    "</script><script>document.title=1</script>",
    "<!--<script>",
    '"><svg onload=document.title=1>',
    "\u2028\u202e\0\ud800'`${document.title=1}",
]
LINKS = {"timeline": "../timeline.html", "report": "../report.html"}


def tokens_of(*gaps: float | None, uid: str = "u", **values) -> dict:
    """A sample whose tokens have these gaps; None where the learner's log-prob was not recorded."""
    engine = [-1.0 - 0.1 * t for t in range(len(gaps))]
    learner = [None if gap is None else b - gap for b, gap in zip(engine, gaps, strict=True)]
    learner = None if all(p is None for p in learner) else learner
    named = {"tokens": [f"{uid}{t}" for t in range(len(gaps))], "logprobs": engine, "proximal_logprobs": learner}
    return a_sample(uid=uid, **(named | values))


def pages(folder: Path, *samples: dict) -> Path:
    return write_rollouts(a_run(folder, [step(1)], samples=samples, config={"name": "n"})).parent


FIVE = [
    tokens_of(0.001, 0.02, uid="a", reward=1.0, advantage=0.5, finish="stop", versions=[[7, 2]]),
    tokens_of(-0.4, 0.1, uid="b", reward=0.0, finish="length", versions=[[6, 1], [7, 1]]),
    tokens_of(0.05, uid="c", reward=0.25),
    tokens_of(None, None, uid="d", reward=1.0),
    tokens_of(2.0, 0.0, 0.0, uid="e", reward=0.0, status="timeout"),
]


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_page_per_step_with_links_to_its_neighbours_and_a_table_of_all(tmp_path):
    folder = pages(tmp_path / "run", *({**sample, "step": n} for n in (3, 1, 12) for sample in FIVE))
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html",
        "step-1.html",
        "step-12.html",
        "step-3.html",
    ]
    hrefs = {
        n: [a["href"] for tag, a in Page(folder / f"step-{n}.html").elements if a.get("rel") in ("prev", "next")]
        for n in (1, 3, 12)
    }
    assert hrefs == {1: ["step-3.html"], 3: ["step-1.html", "step-12.html"], 12: ["step-3.html"]}
    index = Page(folder / "index.html")
    found = [a["href"] for _, a in index.elements if re.fullmatch(r"step-\d+\.html", a.get("href", ""))]
    assert found == ["step-1.html", "step-3.html", "step-12.html"]
    (first,) = re.findall(r'<tr><th scope="row"><a href="step-1.html">(.*?)</tr>', index.source)
    assert re.sub("<[^>]*>", " ", first).split() == [
        "1",
        "5",
        "2",
        "1",
        "1",
        "0.450",
        "+2.0000",
        "1.492",
        "0.7530",
    ]  # (e⁻² + 2)² / 3(e⁻⁴ + 2)


def test_a_step_that_is_no_longer_recorded_loses_its_page(tmp_path):
    pages(tmp_path / "run", tokens_of(0.1, step=1), tokens_of(0.1, step=2))
    folder = pages(tmp_path / "run", tokens_of(0.1, step=1))
    assert not (folder / "step-2.html").exists()


def test_no_rollouts_or_too_many_are_no_pages(tmp_path):
    run = a_run(tmp_path / "run", [step(1)])
    assert write_rollouts(run) is None
    a_run(run, [step(1)], samples=[tokens_of(0.1)])
    assert write_rollouts(run, limit_bytes=50) is None
    assert not (run / "rollouts").exists()
    assert write_rollouts(run, limit_bytes=5000)


def test_the_report_links_to_what_is_there(tmp_path):
    run = a_run(tmp_path / "run", [step(1)], samples=[tokens_of(0.1)])
    assert "rollouts/index.html" not in write_report(run).read_text()
    write_rollouts(run)
    assert write_report(run).read_text().count('href="rollouts/index.html"') == 2


def test_mismatch_of_an_answer_by_its_definition():
    engine, learner = np.array([-0.5, -2.0, -0.25, -3.0]), np.array([-1.0, -1.95, -0.25, -5.0])
    found, rho = mismatch(engine.tolist(), learner.tolist()), np.exp(learner - engine)
    assert found.gap == 2.0
    assert found.max_rho == pytest.approx(rho.max())
    assert found.ess == pytest.approx(rho.sum() ** 2 / (4 * (rho**2).sum()))
    assert mismatch([0.0, None], [-1e9, -1.0]).max_rho == math.exp(-20)
    assert mismatch([-1.0], []) is None


# --- foreign text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*HOSTILE, *ACTS])
def test_no_element_and_no_attribute_comes_from_data(tmp_path, text):
    def shapes(text: str, folder: Path) -> list:
        sample = tokens_of(0.1, 0.2, uid=text, prompt=text, answer=text, expected=text, status=text, finish=text)
        run = a_run(folder, [step(1)], samples=[sample | {"tokens": [text, "b"]}], config={"name": text})
        found = [Page(path) for path in sorted(write_rollouts(run).parent.iterdir())]
        assert all(page.oddities == [] for page in found)
        return [[element for element in page.elements if element[0] != "meta"] for page in found]

    assert shapes(text, tmp_path / "a") == shapes("harmless", tmp_path / "b")


def test_data_cannot_leave_its_element():
    assert script_data({"</script><!--": "\u2028\ud800"}) == '{"\\u003c/script>\\u003c!--":"\\u2028\\ud800"}'


def test_a_page_lets_nothing_in_but_its_own_script_and_style(tmp_path):
    page = Page(pages(tmp_path / "run", tokens_of(0.1)) / "step-1.html")
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]{44}'; base-uri 'none'; form-action 'none'; "
        r"script-src 'sha256-[\w+/=]{44}'",
        policy,
    )
    names = {name for _, attributes in page.elements for name in attributes}
    assert not names & {"src", "srcset", "style", "action"}
    assert not [name for name in names if name.startswith("on")]
    hrefs = {a["href"] for _, a in page.elements if "href" in a}
    assert hrefs == {"index.html", "../timeline.html#step=1", "../report.html"}


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> Path:
    return pages(tmp_path_factory.mktemp("five"), *FIVE, tokens_of(0.1, step=2)) / "step-1.html"


@pytest.mark.sampled(3)
@needs_chromium
@pytest.mark.parametrize(
    ("view", "uids"),
    [
        ("", "abcde"),
        ("reward=solved", "ad"),
        ("reward=unsolved", "bc"),
        ("reward=failed", "e"),
        ("min=0.2&max=0.9", "c"),
        ("min=0.25", "acd"),
        ("gap=0.05", "bce"),
        ("gap=0.1&reward=unsolved", "b"),
        ("gap=9", ""),
        ("sort=gap-", "ebcad"),
        ("sort=gap%2B", "acbed"),
        ("sort=reward-", "adcbe"),
        ("sort=reward%2B&gap=0.02", "beca"),
        ("sort=length-", "eabdc"),
        ("gap=x&reward=&sort=_", "abcde"),
    ],
)
def test_filters_and_order_in_the_browser(five, tmp_path, view, uids):
    dom = opened(five, tmp_path, view)
    assert "".join(dom.all("uid")) == uids
    assert dom.text("count") == f"{len(uids)} of 5 recorded samples"
    assert (dom.attribute("none", "hidden") is None) == (uids == "")


@needs_chromium
def test_the_way_to_the_next_step_keeps_the_filters(five, tmp_path):
    dom = opened(five, tmp_path, "reward=solved&gap=0.01&at=0.1")
    assert dom.attribute("after", "href").endswith("/step-2.html#reward=solved&gap=0.01")


@needs_chromium
def test_keys_controls_and_mouse(five, tmp_path):
    shown = "find('count').textContent"
    with Reader(tmp_path) as reader:
        reader.open(five, "gap=0.05")
        assert reader.find(shown) == "3 of 5 recorded samples"
        reader.press("ArrowRight")
        reader.until("location.pathname.endsWith('step-2.html') && document.readyState === 'complete'")
        assert (reader.find("location.hash"), reader.find(shown)) == ("#gap=0.05", "1 of 1 recorded samples")
        reader.press("ArrowLeft")
        reader.until("location.pathname.endsWith('step-1.html') && document.readyState === 'complete'")
        reader.point("find('gap')", click=True)
        reader.find("find('gap').select()")
        reader.write("0.1")
        reader.press("ArrowLeft")  # in a field, the cursor moves
        reader.until(f"{shown} === '2 of 5 recorded samples'")
        reader.point("document.querySelector('button[type=reset]')", click=True)
        reader.until(f"{shown} === '5 of 5 recorded samples' && find('gap').value === ''")
        reader.point("document.querySelectorAll('.answer .t')[3]")
        reader.until("find('tip').textContent.includes('token2 of 2') && !find('tip').hidden")
        reader.point("document.querySelectorAll('.answer .t')[3]", click=True)
        reader.until("location.hash === '#at=1.1' && document.querySelector('.t.pinned')?.textContent === 'b1'")
        reader.point("document.querySelector('h1')")
        reader.until("find('tip').hidden")
        assert reader.complaints == []


@needs_chromium
def test_a_sample_and_a_token_say_all_that_is_known(five, tmp_path):
    dom = opened(five, tmp_path, "at=1.0")
    assert re.sub(r"\s+", " ", dom.text("tip")) == (  # exp(-1) = 0.36788, exp(0.4) = 1.49182
        "textb0token1 of 2engine's log-prob−1.0000its probability0.3679learner's log-prob−0.6000"
        "gap−0.4000 natsrho1.492weights' version6"
    )
    assert dom.all("pinned t") == ["b0"]
    first, second, *_, last = dom.all("sample")
    assert "✓ reward 1" in first
    assert "2 tokensweights 7advantage +0.500largest gap +0.0200 natsmax rho 0.999ESS 0.9999" in first
    assert "✗ reward 0truncated" in second
    assert "weights 6, 7" in second
    assert "timeout" in last


@needs_chromium
def test_a_sample_shows_its_rendered_prompt_its_limit_its_failure_and_what_is_folded(tmp_path):
    told = tokens_of(
        *[0.1],
        finish="length",
        limit="environment.turn_tokens=8",
        rendered="<|user|>1+1=",
        expected="2",
        status="error",
        detail="KeyError: 'x' (/me/rewards.py, line 3, in score)",
        meta={"secret": 7},
        said=[{"calls": 0}, {"calls": 0, "state": {"board": "x"}}],
    )
    folder = pages(tmp_path / "run", told, tokens_of(0.1, uid="d"))
    first, plain = opened(folder / "step-1.html", tmp_path / "profile").all("sample")
    for part in ("truncatedenvironment.turn_tokens=8", "prompt<|user|>1+1=", "expected2", "failureKeyError: 'x' (/me"):
        assert part in first
    assert re.search(r'meta\{\s*"secret": 7\s*\}', first)
    assert re.search(r'state after turn 1\{\s*"board": "x"\s*\}', first)
    assert "meta" not in plain


TURNS = tokens_of(
    *[0.1, 0.2, None, 0.1],
    uid="t",
    advantage=None,
    versions=[[7, 2], [-1, 1], [7, 1]],
    turns=[{"at": 2, "calls": 1}, {"at": 4, "calls": 0}],
    credit=[{"end": 2, "reward": 0.0, "advantage": -0.25}, {"end": 4, "reward": 1.0, "advantage": 0.5}],
)


@needs_chromium
def test_turns_say_their_rewards_and_advantages_where_they_differ(tmp_path):
    same = TURNS | {"uid": "s", "credit": [turn | {"reward": 0.5, "advantage": None} for turn in TURNS["credit"]]}
    path = pages(tmp_path / "run", TURNS, same, tokens_of(0.1, uid="w")) / "step-1.html"
    dom = opened(path, tmp_path / "profile", "at=0.3")
    assert "turn2 of 2its reward1its advantage+0.500" in dom.text("tip")
    turns, equal, whole = dom.all("sample")
    assert "rewards of turns 0, 1advantages of turns −0.250, +0.500" in turns
    assert "of turns" not in equal
    assert "of turns" not in whole
    assert "turn1 of 2its reward0its advantage−0.250" in opened(path, tmp_path / "b", "at=0.1").text("tip")
    told = opened(path, tmp_path / "c", "at=0.2").text("tip")
    assert "the environment" in told
    assert "its reward" not in told


@needs_chromium
def test_a_trajectory_says_its_turns_and_tool_calls(tmp_path):
    turns = [{"at": 0, "tokens": 1}, {"at": 2, "tokens": 1}]
    said = [{"calls": 0}, {"calls": 2}, {"calls": None}]
    course = tokens_of(0.0, None, 0.0, turns=turns, said=said, versions=[[7, 1], [-1, 1], [7, 1]])
    folder = pages(tmp_path / "run", course, tokens_of(0.1, uid="d"))
    first, plain = opened(folder / "step-1.html", tmp_path / "profile").all("sample")
    assert "3 tokens2 turnsweights 72 tool calls" in first
    assert "turn" not in plain


ROWS = tokens_of(
    *[0.1, None, None, 0.1, None, 0.1],
    uid="r",
    versions=[[7, 1], [-1, 2], [7, 1], [-1, 1], [7, 1]],
    turns=[{"at": 0}, {"at": 3}, {"at": 5}],
    rows=[1],
)


@needs_chromium
def test_a_trajectory_shows_where_a_new_row_begins(tmp_path):
    folder = pages(tmp_path / "run", ROWS, tokens_of(0.1, uid="d"))
    rows, plain = opened(folder / "step-1.html", tmp_path / "profile").all("sample")
    assert "r0new row: the conversation as the chat template writes itr1" in rows
    assert "3 turns2 rows" in rows
    assert "row" not in plain
    for token, said in ((0, "row1 of 2"), (2, "row2 of 2fromthe prompt of the row"), (4, "fromthe environment")):
        assert said in opened(folder / "step-1.html", tmp_path / f"{token}", f"at=0.{token}").text("tip")


@needs_chromium
def test_tokens_have_colours_and_signs(tmp_path):
    gaps = [0.0, 0.0029, 0.003, -0.01, 0.0301, -0.1, 0.35, -0.99, 1.0, -30.0]
    probabilities = [0.95, 0.9, 0.89, 0.5, 0.3, 0.05, 0.001]
    odd = {
        "": "∅",
        "a b": "a·b",
        "\n": "⏎",
        "\t": "⇥",
        "\0": "␀",
        "\x1b": "␛",
        "\u200b": "U+200B",
        "\u202e": "U+202E",
        "\u2028": "U+2028",
        "\xa0": "U+00A0",
        "é": "é",
        "日本": "日本",
        "😀": "😀",
        "\ue000": "U+E000",
        "𐀀\U000e0041x": "𐀀U+E0041x",
    }
    samples = [
        tokens_of(*gaps),
        tokens_of(*[None] * 7, logprobs=[math.log(p) for p in probabilities]),
        tokens_of(*[None] * len(odd), tokens=list(odd), logprobs=[]),
    ]
    dom = opened(pages(tmp_path / "run", *samples) / "step-1.html", tmp_path / "profile")
    drawn = [(a["class"], "".join(t)) for tag, a, t in dom.elements if a.get("class", "").split()[:1] == ["t"]]
    drawn = drawn[-sum(map(len, (gaps, probabilities, odd))) :]  # those before are the legend's
    # The log-probs that a page has are differences of doubles, so the gap is the one that Python finds in them.
    learner, engine = samples[0]["proximal_logprobs"], samples[0]["logprobs"]
    expected = [gap_class(b - p) for b, p in zip(engine, learner, strict=True)]
    expected += ["", "", "q1", "q1", "q2", "q3", "q4"] + [""] * len(odd)
    assert [classes.removeprefix("t").strip() for classes, _ in drawn] == expected
    assert [text for _, text in drawn[-len(odd) :]] == list(odd.values())


@needs_chromium
@pytest.mark.parametrize("text", ACTS)
def test_foreign_text_stays_text_in_the_browser(tmp_path, text):
    sample = tokens_of(0.1, 0.2, uid=text, prompt=text, expected=text, status=text, finish=text)
    sample["tokens"] = [text, "b"]
    dom = opened(pages(tmp_path / "run", sample) / "step-1.html", tmp_path / "profile", "at=0.0")
    (title,) = dom.all(tag="title")
    assert title == "n · rollouts of step 1"
    tags = [tag for tag, _, _ in dom.elements]
    assert not {"img", "svg", "iframe"} & set(tags)
    assert tags.count("script") == 2
    signs = {"\0": "␀"} | {char: f"U+{ord(char):04X}" for char in "\u2028\u202e\ud800"}
    assert dom.all("prompt") == ["".join(signs.get(char, char) for char in text)]


@needs_chromium
def test_long_answers_are_drawn_when_they_come_into_sight(tmp_path):
    many = [tokens_of(*[0.01] * 400, uid=f"{i}.") for i in range(60)]
    path = pages(tmp_path / "run", *many) / "step-1.html"
    dom = opened(path, tmp_path / "profile")
    assert len(dom.all("uid")) == 60
    assert 4 * 400 <= len([1 for text in dom.all("t") if "." in text]) < 60 * 400
    pinned = opened(path, tmp_path / "other", "at=59.399")  # brings its sample into sight
    assert pinned.all("pinned t") == ["59.399"]


def test_a_page_is_made_of_what_it_is_given():
    page = step_page("n", 3, [card(tokens_of(0.1))], LINKS, before=1)
    assert Dom(page).attribute("before", "href") == "step-1.html"
