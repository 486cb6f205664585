"""Errors of a rank: which end the run, and which are left to a restart."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from torch.distributed import DistBackendError

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, QurlError
from qurl_ray.training.coordinator.coordinator import Coordinator
from qurl_ray.training.driver.run import run
from qurl_ray.training.rank import train
from qurl_ray.training.rank.entry import train_entry
from tests.training.runs import SMALL, events


class Rank:
    """A rank and the coordinator that outlives it, in one process."""

    def __init__(self, patch):
        self.told, self.ended, self.step = [], [], 1
        self._coordinator = Coordinator.__new__(Coordinator)
        self._coordinator._crashes = set()
        self._coordinator._events = SimpleNamespace(tell=lambda kind, message: self.told.append(message))
        handle = SimpleNamespace(
            crashed=SimpleNamespace(remote=self._coordinator.crashed),
            fail=SimpleNamespace(remote=self._fail),
        )
        context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
        patch.setattr("ray.train.get_context", lambda: context)
        patch.setattr(train, "_coordinator", lambda _: handle)
        patch.setattr(train, "wait", lambda call, *_: asyncio.run(call))
        self._patch = patch

    async def _fail(self, error):
        self.ended.append(error)

    def run(self, loop):
        """Run the rank once; return the error that it leaves to Ray Train."""
        self._coordinator._session = SimpleNamespace(asked=self.step)
        self._patch.setattr(train, "train_loop", loop)
        try:
            train_entry({})
        except Exception as error:
            return error
        return None


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def raising(error):
    def loop(_):
        raise error.with_traceback(None)

    return loop


def test_the_same_error_in_the_same_step_ends_the_run_with_its_reason(rank):
    loop = raising(ValueError("no such setting"))
    assert isinstance(rank.run(loop), ValueError)
    assert rank.ended == []
    assert rank.run(loop) is None
    (error,) = rank.ended
    assert isinstance(error, QurlError)
    assert "failed twice in the same way, in step 1: ValueError: no such setting (" in str(error)
    assert rank.told == [rank.told[0]] * 2
    assert "rank 0 of the learner failed in step 1: ValueError: no such setting" in rank.told[0]


def test_another_step_kind_or_place_is_another_error(rank):
    loop = raising(ValueError("the same"))
    for step in (1, 2, 3):
        rank.step = step
        assert isinstance(rank.run(loop), ValueError)
    assert isinstance(rank.run(raising(KeyError("the same"))), KeyError)
    assert isinstance(rank.run(lambda _: int("the same")), ValueError)
    assert rank.ended == []


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        DistBackendError("NCCL error: remote process exited"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_follows_from_the_death_of_another_process_never_ends_the_run(rank, error):
    for _ in range(4):
        assert rank.run(raising(error)) is error
    assert rank.ended == rank.told == []


def test_an_error_within_the_coordinator_is_no_death(rank):
    error = RayTaskError("close", "Traceback: KeyError", KeyError("step"))
    assert rank.run(raising(error)) is error
    assert rank.run(raising(error)) is None
    assert len(rank.ended) == 1


def test_our_own_errors_end_the_run_at_once(rank):
    assert rank.run(raising(ConfigError("wrong"))) is None
    assert [str(error) for error in rank.ended] == ["wrong"]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_whose_rank_fails_in_the_same_way_again_ends_with_the_reason(tmp_path, cluster):
    """After one restart, and not after learner.max_failures=3 of them."""
    given = [
        *SMALL,
        "steps=2",
        f"output_dir={tmp_path}",
        "name=again",
        "sync.transport=tests.training.rewards:NoTransport",
    ]
    with pytest.raises(QurlError, match=r"in step 0: ZeroDivisionError: on purpose"):
        run(load_config(None, given))
    messages = [line["message"] for line in events(tmp_path / "again", "warning")]
    assert sum("the learner restarted" in message for message in messages) == 1
    assert sum("failed in step 0: ZeroDivisionError: on purpose" in message for message in messages) == 2
