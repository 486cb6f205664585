"""The worker_group and Ray on logical GPUs: who is given which, and what is said when there are not enough."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qurl_ray.actors.cluster import check_room, own_assignment, without_room
from qurl_ray.actors.placement import demand
from qurl_ray.actors.worker_group import WorkerGroup
from qurl_ray.errors import DeadlineExceeded, PlacementError
from qurl_ray.training.driver.run import scaling_config
from qurl_ray.types import PolicySpec
from tests.actors.reporter import Reporter
from tests.actors.test_placement import preset
from tests.training.runs import ROOT

pytestmark = pytest.mark.ray

JET = "jet_rl_qwen3_8b"
APART = ["placement=disaggregated"]


@pytest.fixture(scope="module")
def sixteen():
    """One node with as many GPUs as two boxes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init("local", num_cpus=32, num_gpus=16, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def boxes():
    """Makes a cluster of two nodes with so many GPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster()

        def make(gpus: int) -> None:
            for _ in range(2):
                cluster.add_node(num_cpus=32, num_gpus=gpus)
            ray.init(address=cluster.address, log_to_driver=False)

        yield make
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def crew_of():
    """Makes crews of reporters, and ends them."""
    made = []

    def make(config) -> WorkerGroup:
        colocated = config.placement == "colocated"
        spec = PolicySpec(source="nowhere")
        made.append(
            WorkerGroup(
                config=config.rollout, spec=spec, kernel="auto", threads=1, colocated=colocated, worker=Reporter
            )
        )
        return made[-1]

    yield make
    for worker_group in made:
        worker_group.stop()


@pytest.fixture
def ranks_of():
    """Reports of ranks, placed as Ray Train places them, which stay until the test is over."""
    groups, actors = [], []

    def place(config) -> list:
        asked = demand(config)
        groups.append(placement_group([asked.rank] * asked.ranks, strategy="PACK"))
        assert groups[-1].wait(10)
        for index in range(asked.ranks):
            where = PlacementGroupSchedulingStrategy(groups[-1], placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": asked.rank["GPU"], "scheduling_strategy": where}
            actors.append(ray.remote(Reporter).options(**options).remote())
        return reports(actors[-asked.ranks :])

    yield place
    for actor in actors:
        ray.kill(actor)
    for group in groups:
        remove_placement_group(group)


def reports(actors) -> list:
    return ray.get([actor.report.remote() for actor in actors], timeout=120)


@pytest.mark.slow
def test_apart_every_gpu_of_two_boxes_is_given_once(sixteen, crew_of, ranks_of):
    config = preset(JET, "placement=disaggregated", "rollout.workers=4", "rollout.vllm.tensor_parallel=2")
    check_room(demand(config))
    worker_group = crew_of(config)
    worker_group.start()
    ranks, workers = ranks_of(config), reports(worker_group.actors)
    assert [len(report.own.gpus) for report in workers] == [2] * 4
    assert sorted(int(gpu) for report in [*ranks, *workers] for gpu in report.own.gpus) == list(range(16))
    for report in workers:
        assert sorted(report.visible.split(",")) == sorted(report.own.gpus)
        assert not report.made["colocated"]


@pytest.mark.slow
def test_together_engines_have_the_gpus_of_the_ranks_and_ray_gives_them_none(sixteen, crew_of, ranks_of):
    config = preset(JET, "rollout.workers=4", "rollout.vllm.tensor_parallel=2")
    worker_group = crew_of(config)
    worker_group.start()
    assert worker_group.actors == []  # the ranks come first
    ranks = [report.own for report in ranks_of(config)]
    worker_group.place_on(ranks)
    workers = reports(worker_group.actors)
    assert all(report.own.gpus == () and report.made["colocated"] for report in workers)
    assert [report.visible.split(",") for report in workers] == [
        [*ranks[i].gpus, *ranks[i + 1].gpus] for i in range(0, 8, 2)
    ]
    before = list(worker_group.actors)
    worker_group.place_on(list(ranks))
    assert worker_group.actors == before  # nobody moved
    worker_group.place_on(ranks[::-1])
    assert reports(worker_group.actors[:1])[0].visible == ",".join([*ranks[7].gpus, *ranks[6].gpus])
    assert not set(worker_group.actors) & set(before)


def test_what_the_cluster_can_never_hold_is_said_at_once(sixteen):
    with pytest.raises(PlacementError, match=r"25 GPU are asked .* It asks for .* 1 rollout worker of 17 GPU"):
        check_room(demand(preset(JET, *APART, "rollout.workers=1", "rollout.vllm.tensor_parallel=17")))
    with pytest.raises(PlacementError, match="24 GPU are asked for, and it has 16 GPU in all"):
        check_room(demand(preset(JET, *APART, "rollout.workers=16")))


def test_engines_for_which_others_leave_no_room_end_in_a_deadline_that_says_so(sixteen, crew_of):
    others = placement_group([{"GPU": 9}], strategy="PACK")
    assert others.wait(10)
    worker_group = crew_of(
        preset(JET, *APART, "rollout.vllm.tensor_parallel=4", "rollout.workers=3", "rollout.start_timeout_s=4")
    )
    try:
        with pytest.raises(
            DeadlineExceeded,
            match=r"2 of 3 rollout worker\(s\) of 1 CPU, 4 GPU were not placed within 4 s; the cluster has .* 16 GPU,",
        ):
            worker_group.start()
    finally:
        remove_placement_group(others)


# --- two nodes, and Ray Train itself -------------------------------------------------------------------------------


class Desk:
    """Where ranks leave their assignments; they stay until it closes."""

    def __init__(self) -> None:
        self._assignments, self._open = {}, True

    def leave(self, rank, assignment) -> None:
        self._assignments[rank] = assignment

    def assignments(self) -> list:
        return [self._assignments[rank] for rank in sorted(self._assignments)]

    def close(self) -> None:
        self._open = False

    def is_open(self) -> bool:
        return self._open


def sit_down(context) -> None:
    """What every rank runs."""
    import ray.train

    desk = context["desk"]
    ray.get(desk.leave.remote(ray.train.get_context().get_world_rank(), own_assignment()))
    while ray.get(desk.is_open.remote()):
        time.sleep(0.2)


@contextmanager
def ray_train(config, folder) -> Iterator[list]:
    """The assignments of ranks that Ray Train has placed."""
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    desk = ray.remote(num_cpus=0)(Desk).remote()
    trainer = DataParallelTrainer(
        sit_down,
        train_loop_config={"desk": desk},
        scaling_config=scaling_config(config),
        run_config=ray.train.RunConfig(storage_path=str(folder)),
    )
    fit = threading.Thread(target=trainer.fit, daemon=True)
    fit.start()
    ends = time.monotonic() + 240
    while len(assignments := ray.get(desk.assignments.remote())) < config.learner.workers:
        assert fit.is_alive()
        assert time.monotonic() < ends
        time.sleep(0.5)
    yield assignments
    ray.get(desk.close.remote())
    fit.join(60)


@pytest.mark.slow
def test_a_preset_apart_on_two_boxes_with_ray_train(boxes, crew_of, tmp_path):
    boxes(8)
    config = preset(JET, *APART)
    check_room(demand(config))
    worker_group = crew_of(config)
    worker_group.start()
    with ray_train(config, tmp_path) as ranks:
        found = Counter(
            (assignment.node, gpu)
            for assignment in [*ranks, *(r.own for r in reports(worker_group.actors))]
            for gpu in assignment.gpus
        )
    assert len(found) == 16
    assert set(found.values()) == {1}


@pytest.mark.slow
def test_engines_of_a_whole_box_each_sit_with_the_ranks_of_ray_train_on_it(boxes, crew_of, tmp_path):
    boxes(2)  # small ones: every rank of Ray Train takes seconds to start
    config = preset(JET, "learner.workers=4", "rollout.workers=2", "rollout.vllm.tensor_parallel=2")
    check_room(demand(config))
    worker_group = crew_of(config)
    with ray_train(config, tmp_path) as ranks:
        worker_group.place_on(ranks)
        engines = [(report.own.node, sorted(report.visible.split(","))) for report in reports(worker_group.actors)]
    of_ranks = {assignment.node: sorted(s.gpus[0] for s in ranks if s.node == assignment.node) for assignment in ranks}
    assert len(of_ranks) == 2
    assert sorted(engines) == sorted(of_ranks.items())
    assert all(gpus == ["0", "1"] for _, gpus in engines)


def test_room_is_taken_once_it_stays_and_not_from_a_rank_that_is_placed_anew(monkeypatch):
    """Ray looks again for room once a second, so its own answers come too unevenly to count them: these come from a
    clock that the test turns."""
    now, free, given_back = [100.0], [True], []
    monkeypatch.setattr("qurl_ray.actors.worker_group.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        "qurl_ray.actors.worker_group.placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: free[0])
    )
    monkeypatch.setattr("qurl_ray.actors.worker_group.remove_placement_group", given_back.append)
    monkeypatch.setattr(WorkerGroup, "_start_worker", lambda self, group: self.actors.append(group))
    config = preset(JET, *APART, "rollout.workers=1", "rollout.max_workers=2").rollout
    growing = WorkerGroup(
        config=config, spec=PolicySpec(source="nowhere"), kernel="auto", threads=1, actors=["the first"]
    )

    def grow_for(seconds: float) -> int:
        for _ in range(round(seconds / 0.1)):
            growing.grow()
            now[0] += 0.1
        return len(growing.actors)

    for _ in range(3):  # the room is the rank's but for a moment
        free[0] = True
        assert grow_for(12) == 1
        free[0] = False
        assert grow_for(5) == 1
    asked = len(given_back)
    assert 18 <= asked <= 24
    free[0] = True
    assert grow_for(15) == 1
    assert grow_for(10) == 2
    assert growing.actors[1] not in given_back
    asked = len(given_back)
    assert grow_for(30) == 2
    assert len(given_back) == asked  # there are as many as there may be


def test_a_worker_beyond_those_asked_for_makes_room_for_ranks_that_wait(sixteen, crew_of, monkeypatch):
    monkeypatch.setattr("qurl_ray.actors.worker_group._ASK_S", 0.2)
    monkeypatch.setattr("qurl_ray.actors.worker_group._TIMES", 1)
    sizes = ("learner.workers=8", "rollout.workers=1", "rollout.max_workers=2", "rollout.vllm.tensor_parallel=8")
    config = preset(JET, *APART, *sizes)
    asked, worker_group = demand(config), crew_of(config)
    worker_group.start()
    until = time.monotonic() + 20
    while len(worker_group.actors) < 2 and time.monotonic() < until:
        worker_group.grow()
    assert worker_group.spare
    assert not without_room(asked)
    ranks = placement_group([asked.rank] * asked.ranks, strategy="PACK")
    try:
        assert not ranks.wait(3)
        assert without_room(asked)
        worker_group.withdraw_request()
        worker_group.shrink()
        assert ranks.wait(10)
        assert not without_room(asked)
        assert not worker_group.spare
        assert len(reports(worker_group.actors)) == 1
    finally:
        remove_placement_group(ranks)
