"""The counts of benchmarks/review_counts.py, of sources that are counted by hand."""

import pytest

from benchmarks.review_counts import circles, nearest_rank, read, report, row

SOURCE = '''\
"""A module."""

# a comment
from a import b
from . import near


class Public:
    """Has two methods."""

    def typed(self, x: int, *, y: str = "#") -> int:
        """Documented."""
        return x  # also a comment, but not a line of its own

    async def untyped(self, x, *more: int) -> None:
        def inside(): ...

    class _Private:
        def hidden(self) -> None:
            """Documented, and not public."""
'''


def test_a_module_is_counted_as_by_hand():
    module = read(SOURCE, name="whole.part.module", file="whole/part/module.py")
    assert (module.package, module.lines, module.comments) == ("part", 20, 1)
    assert module.imports == {"a.b", "whole.part.near"}
    found = {one.name: one for one in module.definitions}
    assert {name: one.length for name, one in found.items()} == {
        "Public": 13,
        "Public.typed": 3,
        "Public.untyped": 2,
        "Public.untyped.inside": 1,
        "Public._Private": 3,
        "Public._Private.hidden": 2,
    }
    assert (found["Public"].methods, found["Public._Private"].methods) == (2, 1)
    assert [name for name, one in found.items() if one.public] == ["Public", "Public.typed", "Public.untyped"]
    assert [name for name, one in found.items() if one.typed] == ["Public.typed", "Public._Private.hidden"]
    assert [one.arguments for one in found.values() if one.methods is None] == [2, 2, 0, 0]


def test_a_row_adds_up_its_modules():
    module = read(SOURCE, name="whole.part.module", file="whole/part/module.py")
    counts = row([module, module], test_lines=30, circular=1)
    assert counts["lines"] == "40"
    assert counts["functions"] == "8"
    assert counts["function p50/p90/p99/max"] == "2/3/3/3"
    assert counts["typed %"] == "50.0"
    assert counts["public docstrings %"] == "66.7"
    assert counts["comment lines %"] == "5.0"
    assert counts["tests : code"] == "0.75"
    assert row([], None, 0)["functions"] == "0"


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.51, 3), (0.9, 4), (1, 4)])
def test_a_nearest_rank_is_a_value(share, value):
    assert nearest_rank([4, 1, 3, 2], share) == value


def test_circles_are_found_through_names_and_other_modules():
    imports = {
        "p": {"p.x.name"},
        "p.x": {"os.path", "p.y"},
        "p.y": {"p.z.f"},
        "p.z": {"p.x"},
        "p.w": {"p.v"},
        "p.v": (),
    }
    assert circles(imports) == [["p.x", "p.y", "p.z"]]


def test_a_report_has_a_row_per_package_and_the_longest():
    modules = [
        read(SOURCE, name="qurl_ray.one.module", file="qurl_ray/one/module.py"),
        read("import qurl_ray.one.module\n", name="qurl_ray.top", file="qurl_ray/top.py"),
        read("", name="qurl_ray.one", file="qurl_ray/one/__init__.py"),
    ]
    text = report(modules, {None: 42, "one": 10}.get)
    assert "| qurl_ray | 3 | 21 |" in text
    assert "| one/ | 2 | 20 |" in text
    assert "| *.py | 1 | 1 |" in text
    assert "- qurl_ray/one/module.py:8 Public: 2 methods, 13 lines" in text
