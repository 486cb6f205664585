"""Engines and learner on one GPU: at no moment do both hold all that they have."""

from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.learner.backend import Resident
from qurl_ray.training.deadlines import Watchdog
from qurl_ray.training.messages import Directive, WeightsWanted
from qurl_ray.training.rank.gpu_turns import Turn, Turns, resident
from qurl_ray.training.rank.train import RankLoop


@pytest.mark.parametrize(
    ("colocated", "offload", "held"),
    [
        (False, False, [Resident.ALL, Resident.ALL, Resident.ALL]),
        (False, True, [Resident.ALL, Resident.ALL, Resident.NOTHING]),
        (True, True, [Resident.ALL, Resident.PARAMETERS, Resident.NOTHING]),
        (True, False, [Resident.ALL, Resident.ALL, Resident.ALL]),
    ],
)
def test_what_a_learner_holds_in_each_turn(colocated, offload, held):
    assert [resident(turn, colocated=colocated, offload=offload) for turn in Turn] == held


class Gpu:
    """A learner, its coordinator and its sender, which say when both sides of a GPU are full."""

    def __init__(self, wanted: int) -> None:
        self.held, self.awake, self.story = Resident.ALL, False, []
        self._wanted = wanted
        """How often engines want weights while they generate."""

    def note(self, what: str) -> None:
        assert not (self.awake and self.held is Resident.ALL), what
        self.story.append(what)

    # the learner
    def keep_on_device(self, resident: Resident) -> None:
        self.held = resident
        self.note(resident.name)

    def learn(self, mini_batches):
        assert self.held is Resident.ALL
        self.note("learn")
        return SimpleNamespace(seconds={"logprob": 0.0, "update": 0.0})

    # the sender
    sent = "int8"

    def send(self, format_name: str) -> float:
        assert self.held is Resident.PARAMETERS
        self.awake = True
        self.note("send")
        return 0.0

    def resend(self) -> None:
        assert self.held is Resident.PARAMETERS
        self.note("resend")

    # the coordinator
    def rest(self) -> None:
        self.awake = False
        self.note("rest")

    def share(self, step, rank, sent):
        assert self.held is Resident.NOTHING
        self.awake = True
        self.note("generate")
        if self._wanted:
            self._wanted -= 1
            return WeightsWanted()
        return ["a mini-batch"]

    def evaluate(self, label, step, sent):
        return self.share(step, 0, sent) and 0.5

    def report(self, *_):
        return Directive()

    def close(self, *_):
        pass


@pytest.fixture
def rank_end(monkeypatch):
    monkeypatch.setattr("qurl_ray.training.rank.gpu_turns.wait", lambda found, *_: found)
    monkeypatch.setattr("qurl_ray.training.rank.train.wait", lambda found, *_: found)

    def make(*overrides, wanted=0, together=False):
        gpu, config = Gpu(wanted), load_config(None, overrides)
        names = ("rest", "share", "evaluate", "report", "close")
        coordinator = SimpleNamespace(**{name: SimpleNamespace(remote=getattr(gpu, name)) for name in names})
        offload = config.learner.offload_while_waiting
        turns = Turns(
            gpu,
            coordinator,
            colocated=config.placement == "colocated",
            offload=bool(offload),
            together=together,
            timeout_s=config.sync.timeout_s,
        )
        return gpu, turns, RankLoop(config, gpu, gpu, turns, coordinator, 0, Directive(), Watchdog(late=pytest.fail))

    return make


def test_a_colocated_run_never_has_an_engine_awake_beside_a_whole_learner(rank_end):
    gpu, turns, end = rank_end("placement=colocated")
    end.send("int8")
    assert end.evaluate("before", 0) == 0.5
    end.send("int8")
    assert end.step(1)
    turns.take(Turn.LEARN)  # a checkpoint
    assert end.step(2)
    assert gpu.story == [
        *("PARAMETERS", "send", "NOTHING", "generate"),
        *("PARAMETERS", "send"),
        *("NOTHING", "generate", "rest", "ALL", "learn", "PARAMETERS", "send"),
        *("rest", "ALL"),
        *("NOTHING", "generate", "rest", "ALL", "learn", "PARAMETERS", "send"),
    ]  # fmt: skip


def test_engines_that_want_weights_while_others_generate_meet_the_parameters_alone(rank_end):
    gpu, _, end = rank_end("placement=colocated", wanted=2)
    end.send("int8")
    end.step(1)
    again = ["PARAMETERS", "resend", "NOTHING", "generate"]
    assert gpu.story[2:-5] == ["NOTHING", "generate", *again, *again]


def test_with_gpus_of_its_own_a_learner_holds_everything(rank_end, monkeypatch):
    monkeypatch.setattr(Gpu, "note", lambda self, what: self.story.append(what))
    monkeypatch.setattr(Gpu, "share", lambda self, *_: ["a mini-batch"])
    monkeypatch.setattr(Gpu, "send", lambda self, _: 0.0)
    gpu, _, end = rank_end()
    end.step(1)
    assert gpu.story == ["learn"]


def test_where_both_fit_nothing_is_moved_and_no_engine_sleeps(rank_end, monkeypatch):
    monkeypatch.setattr(Gpu, "note", lambda self, what: self.story.append(what))
    monkeypatch.setattr(Gpu, "share", lambda self, *_: ["a mini-batch"])
    monkeypatch.setattr(Gpu, "send", lambda self, _: 0.0)
    gpu, turns, end = rank_end("placement=colocated", together=True)
    end.send("int8")
    assert end.evaluate("before", 0) == 0.5
    assert end.step(1)
    turns.take(Turn.LEARN)
    assert gpu.story == ["learn"]
