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
    for one in played:
        pieces["queued"].append((one.began - one.queued, one.queued))
        pieces["engines"] += [(one.began + drew.asked, drew.waited) for drew in one.drew]
        for said in one.said:
            asked, worked = one.began + said.asked, min(said.seconds, said.waited)
            pieces["waiting"].append((asked, said.waited - worked))  # it works last
            pieces["environments"].append((asked + said.waited - worked, worked))
    moments = [moment for found in pieces.values() for start, seconds in found for moment in (start, start + seconds)]
    if not moments or max(moments) == min(moments):
        return []
    began, seconds = min(moments), max(moments) - min(moments)
    count = max(1, int(min(_INTERVALS, seconds / _SHORTEST_S)))
    edges, width = np.linspace(0.0, seconds, count + 1), seconds / count
    means = {state: np.diff(_spent(edges, found, began)) / width for state, found in pieces.items()}
    rows = [{state: round(float(mean[i]), 3) for state, mean in means.items()} for i in range(count)]
    return [(began + float(edge), width, row) for edge, row in zip(edges, rows, strict=False)]


def _spent(edges: np.ndarray, pieces: Sequence[tuple[float, float]], began: float) -> np.ndarray:
    """Return the seconds that all pieces, as (start, seconds), together last before each edge, counted from `began`."""
    starts, seconds = np.array(pieces or [(began, 0.0)]).T
    return np.array([np.clip(edge - (starts - began), 0.0, seconds).sum() for edge in edges])
