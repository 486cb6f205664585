"""Reward functions that hang, crash, print and fork cost their own answer, a bounded time, and nothing else."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from qurl_ray.errors import RewardError
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.sandbox import process as sandbox
from qurl_ray.types import Problem
from tests.rewards.verdicts import PROBLEM, statuses

TIMEOUT_S = 0.5
HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("bad_rewards_can_be_imported")


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """Text in the environment of all that this test starts; when the test ends, none of it may be alive."""
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("QURL_TEST_MARK", mark)
    yield mark
    assert wait_for(lambda: not alive(mark)), alive(mark)


def alive(mark):
    """Process ids, of children and their children; zombies, whose environment is empty, do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def judge(function, answers, *, timeout_s=TIMEOUT_S, **settings):
    with VerifierProcess(f"bad_rewards:{function}", timeout_s, **settings) as verifier:
        return verifier.judge_many([(answer, PROBLEM) for answer in answers])


GOOD, WRONG = (1.0, "ok"), (0.0, "ok")
KEEPER = "import qurl_ray.sandbox.keeper as keeper;"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "answer", "status", "detail"),
    [
        ("hangs", "hang", "timeout", "no verdict within 0.5 s"),
        ("hangs_in_a_thread", "hang", "timeout", "no verdict"),
        ("holds_the_interpreter_lock", "hang", "timeout", "no verdict"),
        ("ignores_signals", "hang", "timeout", "no verdict"),
        ("forks_and_hangs", "fork", "timeout", "no verdict"),
        ("forks_and_dies", "fork", "error", "exit code 3"),
        ("exits", "exit", "error", "exit code 3"),
        ("exits", "segfault", "error", "signal 11"),
        ("exits", "close", "error", "process that judged"),
        ("exits", "sys.exit", "error", "SystemExit"),
        ("exits", "interrupt", "error", "exit code 1"),
        ("exits", "kill parent", "error", "signal 9"),
        ("exits", "kill group", "error", "signal 9"),
        ("leaves_a_daemon", "hang", "timeout", "no verdict"),
        ("leaves_a_daemon", "die", "error", "exit code 3"),
        ("writes_to_every_open_file", "x" * 60_000 + "*100", "error", "wrote to the socket"),
        ("writes_to_every_open_file", "x\n*100000", "error", "wrote to the socket"),
        ("writes_to_every_open_file", "[" * 50_000 + "\n*1", "error", "wrote to the socket"),
        ("writes_to_every_open_file", "7\n*1", "error", "wrote to the socket"),
        ("writes_to_every_open_file", '[2, NaN, "ok", ""]\n*1', "error", "wrote to the socket"),
        ("writes_to_every_open_file", '[2, "1", "ok", ""]\n*1', "error", "wrote to the socket"),
        ("writes_to_every_open_file", '[2, 1.0, "fine", ""]\n*1', "error", "wrote to the socket"),
        ("writes_to_every_open_file", '[3, 1.0, "ok", ""]\n*1', "error", "wrote to the socket"),
        ("raises", "raise", "error", "KeyError"),
        ("returns_odd_values", "nan", "invalid", "nan"),
        ("returns_odd_values", "inf", "invalid", "inf"),
        ("returns_odd_values", "huge", "invalid", "inf"),
        ("returns_odd_values", "large", "invalid", "1e+300"),
        ("returns_odd_values", "odd", "error", "ZeroDivisionError"),
        ("returns_odd_values", "str", "invalid", "str"),
        ("returns_odd_values", "none", "invalid", "NoneType"),
    ],
)
def test_a_bad_answer_costs_itself_and_its_neighbours_are_judged(function, answer, status, detail):
    verdicts = judge(function, ["2", answer, "2", "3"])  # the hangs are longer than this test may take
    assert statuses(verdicts) == [GOOD, (0.0, status), GOOD, WRONG]
    assert detail in verdicts[1].detail


def test_printing_neither_blocks_nor_forges_a_verdict_nor_shows(capfd):
    assert statuses(judge("prints", ["print", "2", "print", "3"], timeout_s=5)) == [WRONG, GOOD, WRONG, WRONG]
    assert capfd.readouterr() == ("", "")


def test_a_reward_that_reads_from_the_keyboard_gets_nothing():
    assert statuses(judge("reads", ["2", "2"])) == [GOOD, GOOD]


def test_a_reward_that_returns_twice_answers_once():
    assert statuses(judge("returns_from_both_sides_of_a_fork", ["fork", "2", "fork", "2"])) == [
        WRONG,
        GOOD,
        WRONG,
        GOOD,
    ]


def test_a_daemon_that_an_answer_leaves_behind_goes_with_the_process(mark):
    with VerifierProcess("bad_rewards:leaves_a_daemon", 5.0) as verifier:
        assert statuses(verifier.judge_many([("return", PROBLEM), ("2", PROBLEM)])) == [WRONG, GOOD]
        assert len(alive(mark)) == 3  # keeper, judge, daemon: that this test can see it


def test_more_processes_than_any_reward_needs_are_killed(monkeypatch):
    monkeypatch.setattr(sandbox, "_BOOT", KEEPER + "keeper._MAX_PROCESSES = 20;" + sandbox._BOOT)
    verdicts = judge("leaves_many_processes", ["many", "2"], timeout_s=5)
    assert statuses(verdicts) == [(0.0, "error"), GOOD]
    assert "too many processes" in verdicts[0].detail


def test_an_answer_that_stops_its_keeper_times_out_and_leaves_no_process(mark):
    verdicts = judge("stops_its_keeper", ["stop", "2"], timeout_s=3.0)
    assert statuses(verdicts) == [(0.0, "timeout"), GOOD]
    assert wait_for(lambda: not alive(mark)), "orphans"


def test_memory_is_bounded_without_being_asked_for():
    verdicts = judge("eats_memory", ["eat", "2"], timeout_s=5)
    assert statuses(verdicts) == [(0.0, "error"), GOOD]
    assert "MemoryError" in verdicts[0].detail


def test_processes_share_one_bound_on_memory():
    verdicts = judge("eats_memory", ["eat together", "2"], timeout_s=10, memory_gb=0.5)
    assert statuses(verdicts) == [(0.0, "error"), GOOD]
    assert "held more than 0.5 GiB" in verdicts[0].detail


def test_what_processes_share_counts_once():
    assert statuses(judge("eats_memory", ["share"], timeout_s=10, memory_gb=0.5)) == [GOOD]


@pytest.mark.parametrize(
    ("answer", "detail"), [("one file", "File too large"), ("many files", "held more than 0.125 GiB")]
)
def test_temporary_files_are_bounded_and_taken_away(answer, detail, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    verdicts = judge("fills_the_disk", ["2", answer, "2"], timeout_s=10, memory_gb=0.125)
    assert statuses(verdicts) == [GOOD, (0.0, "error"), GOOD]
    assert detail in verdicts[1].detail
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def threads():
    with VerifierProcess("bad_rewards:leaves_threads", 10) as verifier:
        yield verifier


def judged_by(verifier, answer):
    """Id of the process that judged `answer`."""
    return verifier.judge_many([(answer, PROBLEM)])[0].reward


@pytest.mark.parametrize("answer", ["busy", "busy later", "asleep"])
def test_a_process_whose_threads_run_on_or_are_many_is_replaced(answer, threads, caplog):
    """At the next answer or, where threads wait or the machine is busy, about a second later."""
    for _ in range(2):
        first = judged_by(threads, answer)
        assert wait_for(lambda: judged_by(threads, "2") != first)  # noqa: B023
    assert [record.message for record in caplog.records if "leaves threads" in record.message] == [
        "reward 'bad_rewards:leaves_threads' leaves threads that run on, or many; "
        "its process is replaced after such answers"
    ]


def test_answers_after_one_that_left_busy_threads_are_judged_by_one_process_without(threads):
    first = judged_by(threads, "busy")
    assert wait_for(lambda: judged_by(threads, "2") != first)
    (second,) = {verdict.reward for verdict in threads.judge_many([("2", PROBLEM)] * 100)}
    assert second != first
    assert psutil.Process(int(second)).num_threads() == 1


def test_an_idle_pool_of_threads_keeps_its_process(threads, caplog):
    assert len({judged_by(threads, "pool") for _ in range(30)}) == 1
    assert not caplog.records


def test_every_answer_has_the_whole_deadline():
    """Three answers of 0.3 s each outlast one deadline of 0.5 s together."""
    with VerifierProcess("slow_rewards:slow", TIMEOUT_S) as verifier:
        assert statuses(verifier.judge_many([("2", PROBLEM)] * 3)) == [GOOD] * 3


def test_many_hung_answers_in_a_row_each_time_out():
    assert statuses(judge("hangs", ["hang"] * 3 + ["2"], timeout_s=0.2)) == [(0.0, "timeout")] * 3 + [GOOD]


def test_deadlines_hold_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(judge("hangs", ["hang", "2"])))
    thread.start()
    thread.join(timeout=10)
    assert statuses(found) == [(0.0, "timeout"), GOOD]


def test_many_answers_keep_their_order():
    answers = [str(number % 5) for number in range(200)]
    with VerifierProcess("exact", 5.0) as verifier:
        verdicts = verifier.judge_many([(answer, PROBLEM) for answer in answers])
    assert [verdict.reward for verdict in verdicts] == [float(answer == "2") for answer in answers]


def test_answers_larger_than_any_buffer_and_odd_text_get_through():
    answers = ["x" * 2_000_000, "\ud800", "2\n", "", "2"]
    with VerifierProcess("exact", 5.0) as verifier:
        verdicts = verifier.judge_many([(answer, PROBLEM) for answer in answers])
    assert statuses(verdicts) == [WRONG, WRONG, GOOD, WRONG, GOOD]


def test_no_answers_need_no_process():
    with VerifierProcess("no_such_module:f", 5.0) as verifier:
        assert verifier.judge_many([]) == []


def test_a_warm_process_is_sent_many_answers_at_a_time(monkeypatch):
    """512 take about 30 ms. Nobody waits for a process between two answers."""
    asked, ask = [], VerifierProcess.ask
    monkeypatch.setattr(
        VerifierProcess, "ask", lambda verifier, calls, *args: asked.append(len(calls)) or ask(verifier, calls, *args)
    )
    with VerifierProcess("exact", 5.0) as verifier:
        verifier.check()
        verifier.judge_many([("2", PROBLEM)] * 512)
    assert sum(asked) == 512
    assert asked[0] == 1
    assert len(asked) < 512 / 2


def test_the_process_loads_neither_torch_nor_ray():
    assert statuses(judge("tells_if_torch_is_loaded", ["2"])) == [WRONG]


def test_check_is_silent_about_a_good_reward():
    with VerifierProcess("bad_rewards:raises", 5.0) as verifier:
        verifier.check()
        verifier.check()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:f", "cannot import no_such_module"),
        ("bad_rewards:hang", "did you mean 'hangs'"),
        ("dies_on_import:f", "exit code 9"),
    ],
)
def test_check_reports_a_bad_reward_before_any_answer(spec, message):
    with VerifierProcess(spec, 5.0) as verifier:
        for act in (verifier.check, lambda: verifier.judge_many([("2", PROBLEM)])):
            with pytest.raises(RewardError, match=message):
                act()


def test_a_module_that_hangs_on_import_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox, "_START_S", 1.0)
    with (
        VerifierProcess("hangs_on_import:f", 5.0) as verifier,
        pytest.raises(RewardError, match="importing it took longer than 1 s"),
    ):
        verifier.check()


def test_a_process_killed_between_calls_is_replaced():
    with VerifierProcess("exact", 5.0) as verifier:
        assert statuses(verifier.judge_many([("2", PROBLEM)])) == [GOOD]
        os.kill(verifier._keeper.pid, signal.SIGKILL)
        assert wait_for(lambda: not verifier.running)
        assert statuses(verifier.judge_many([("2", PROBLEM)])) == [GOOD]


def test_close_may_be_repeated_and_a_later_call_starts_again():
    verifier = VerifierProcess("exact", 5.0)
    verifier.close()
    verifier.check()
    verifier.close()
    verifier.close()
    assert statuses(verifier.judge_many([("2", PROBLEM)])) == [GOOD]
    verifier.close()


def test_a_module_in_the_working_directory_can_be_used(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(answer, problem):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    with VerifierProcess("mine:score", 5.0) as verifier:
        assert verifier.judge_many([("2", PROBLEM)])[0].reward == 0.25


@pytest.mark.parametrize(
    ("function", "answer", "processes"),  # parent, keeper and judge, and what the reward starts
    [
        ("hangs", "hang", 3),
        ("forks_and_hangs", "fork", 5),
        ("leaves_a_daemon", "hang", 4),
        ("holds_the_interpreter_lock", "hang", 3),
    ],
)
def test_all_go_when_the_parent_is_killed_in_the_middle_of_an_answer(function, answer, processes, mark):
    code = f"""
        import sys
        sys.path.insert(0, {str(HERE)!r})
        from qurl_ray.rewards.process import VerifierProcess
        from qurl_ray.types import Problem
        verifier = VerifierProcess("bad_rewards:{function}", 60.0)
        verifier.check()
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
        verifier.judge_many([({answer!r}, Problem(uid="a", prompt="", answer="2"))])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        assert wait_for(lambda: len(alive(mark)) == processes)
        time.sleep(0.2)
        parent.kill()
    assert wait_for(lambda: not alive(mark))


def test_whoever_wants_no_more_verdicts_leaves_a_process_that_goes_on():
    with VerifierProcess("exact", timeout_s=20) as verifier:
        problem = Problem(uid="a", prompt="", answer="2")
        for _ in range(3):
            verdicts = verifier.judging([("2", problem), ("3", problem)] * 20)
            assert next(verdicts).reward == 1
            keeper = verifier._keeper
            verdicts.close()
            assert verifier._keeper is keeper
        assert [v.reward for v in verifier.judge_many([("2", problem), ("3", problem)])] == [1, 0]


def test_what_a_reward_prints_and_its_tracebacks_are_in_its_log(tmp_path):
    log = tmp_path / "run" / "logs" / "reward-0-0.log"
    problem = Problem(uid="a", prompt="", answer="2")
    with VerifierProcess("tests.rewards.bad_rewards:speaks", timeout_s=20, log=log) as verifier:
        good, failed, died = verifier.judge_many([("2", problem), ("raise", problem), ("exit", problem)])
        assert good.reward == 1
        place = rf"LookupError: no such answer \(.*/bad_rewards\.py, line \d+, in speaks; traceback in {log}\)"
        assert re.fullmatch(place, failed.detail)
        assert died.detail == f"the process that judged the answer ended with exit code 3; it printed into {log}"
        printed = log.read_text()
        assert [line for line in printed.splitlines() if line.startswith("judging")] == [
            f"judging {answer}" for answer in ("2", "raise", "exit")
        ]
        assert "Traceback (most recent call last):" in printed
        assert 'raise LookupError("no such answer")' in printed
        log.write_bytes(b"x" * (64 << 20) + b"x")
        assert verifier.judge_many([("3", problem)])[0].reward == 0
        assert log.read_text() == "judging 3\n", "a log that has become too large begins again"


def test_a_log_that_cannot_be_written_stops_no_reward(tmp_path):
    (tmp_path / "logs").write_text("no folder")
    with VerifierProcess("exact", timeout_s=20, log=tmp_path / "logs" / "reward-0-0.log") as verifier:
        assert verifier.judge_many([("2", Problem(uid="a", prompt="", answer="2"))])[0].reward == 1
