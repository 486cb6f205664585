"""Numbers of trajectories of several turns that wait for engines and for environments, over time. Pure."""

from collections.abc import Sequence

import numpy as np

from qurl_ray.actors.trajectories import Played

_INTERVALS = 100
_SHORTEST_S = 0.02


def trajectory_levels(played: Sequence[Played]) -> list[tuple[float, float, dict[str, float]]]:
    """Return (start in unix seconds, seconds, mean number of trajectories in each state) of intervals of equal length
    that follow each other. The states:

    - `engines`: at an engine, which draws their turn, or has no slot for it yet
    - `environments`: their environment works
    - `waiting`: their environment is asked, and does not work yet: it shares its process with others, or starts
    - `queued`: they wait for a place beside an environment

    A trajectory that has ended is in none of them.
    """
    pieces: dict[str, list[tuple[float, float]]] = {"engines": [], "environments": [], "waiting": [], "queued": []}
    for trajectory in played:
        began = trajectory.began
        pieces["queued"].append((began - trajectory.queued, trajectory.queued))
        pieces["engines"] += [(began + drew.asked, drew.waited) for drew in trajectory.drew]
        for said in trajectory.said:
            asked, worked = began + said.asked, min(said.seconds, said.waited)
            pieces["waiting"].append((asked, said.waited - worked))  # it works last
            pieces["environments"].append((asked + said.waited - worked, worked))
    waits = [wait for in_state in pieces.values() for wait in in_state]
    moments = [moment for start, seconds in waits for moment in (start, start + seconds)]
    if not moments or max(moments) == min(moments):
        return []
    first, whole = min(moments), max(moments) - min(moments)
    count = max(1, int(min(_INTERVALS, whole / _SHORTEST_S)))
    edges, width = np.linspace(0.0, whole, count + 1), whole / count
    means: dict[str, np.ndarray] = {}
    for state, in_state in pieces.items():
        starts, seconds = np.array(in_state or [(first, 0.0)]).T
        # Seconds that all trajectories together were in the state before each edge.
        spent = np.array([np.clip(edge - (starts - first), 0.0, seconds).sum() for edge in edges])
        means[state] = np.diff(spent) / width
    rows = [{state: round(float(mean[i]), 3) for state, mean in means.items()} for i in range(count)]
    return [(first + float(edge), width, row) for edge, row in zip(edges, rows, strict=False)]
