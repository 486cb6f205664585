"""YAML that would be ignored in part, or end in a traceback."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.config.serving import load_serving
from qurl_ray.config.yaml_text import read_yaml
from qurl_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3\nseed: 1\nsteps: 4\n", "line 3, column 1: key 'steps' is given twice, in lines 1 and 3"),
        ("rollout:\n  slots: 3\n  'slots': 4\n", "key 'slots' is given twice, in lines 2 and 3"),
        ("rollout: {slots: 3, slots: 4}", "key 'slots' is given twice, in lines 1 and 1"),
        ("steps: " + "[" * 100_000, "nested too deeply"),
        ("steps: *a", "found undefined alias 'a'"),
        ("steps: " + "1" * 5000, f"{'1' * 40}… (5,000 characters) is no int"),
        ("steps: 2001-13-45", "2001-13-45 is no timestamp"),
        ("steps: !!bool perhaps", "perhaps is no bool"),
        ("steps: !!timestamp x", "x is no timestamp"),
        ("steps: !!int ''", "is no int"),
        ("name: a\0b", "unacceptable character #x0000"),
        (r'output_dir: "a\0b"', "text with a NUL or half of a surrogate pair"),
        (r'tracking: {experiment: "\ud800"}', "text with a NUL or half of a surrogate pair"),
        ("steps: 1\n---\nsteps: 2", "expected a single document in the stream"),
    ],
)
def test_what_settings_do_not_need_is_refused_at_once_in_a_short_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for load in (load_config, load_serving):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path} is not valid YAML: ")
        assert message in str(caught.value)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=" + "1" * 5000, "is no int"),
        ("rollout={slots: 1, slots: 2}", "key 'slots' is given twice"),
        ("steps=" + "[" * 5000, "nested too deeply"),
        ("quantization.keep=[&a [x], *b]", "found undefined alias 'b'"),
    ],
)
def test_overrides_are_read_in_the_same_way(override, message):
    with pytest.raises(ConfigError, match="the value is not valid YAML") as caught:
        load_config(None, [override])
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps='" + "1" * 5000 + "'", "steps: Unable to parse input string as an integer"),
        ("steps=" + "x" * 100_000, "steps: Input should be a valid integer"),
        ("quantization.keep=" + "x" * 100_000, "quantization.keep: "),
        ("x" * 100_000, "is not of the form key=value"),
        ("x" * 100_000 + "=1", "unknown key"),
        ("steps." + "x" * 100_000 + "=1", "steps"),
    ],
)
def test_errors_do_not_repeat_long_values(override, message):
    for load in (load_config, load_serving):
        with pytest.raises(ConfigError) as caught:
            load(None, ["steps=1", override] if override.startswith("steps.") else [override])
        assert len(str(caught.value)) < 1500
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["steps=1", override] if override.startswith("steps.") else [override])


def test_many_errors_are_counted_and_not_all_told():
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"key{n}=1" for n in range(1000)])
    assert len(str(caught.value).splitlines()) == 21
    assert str(caught.value).endswith("\nand 980 more")


def test_anchors_and_merged_keys_may_be_used():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n"
    assert read_yaml(text, "text") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [{"x": 1, "y": 2}] * 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff\xfe\n", "is not UTF-8 text"),
        ("name: x\n".encode("utf-16"), "is not UTF-8 text"),
        (b"# " + b"x" * 2**18, "is larger than 262,144 bytes"),
        (b"", "is empty, expected a mapping of sections"),
        (b"# nothing\n", "is empty, expected a mapping of sections"),
        (b"[1]", "holds list, expected a mapping of sections"),
    ],
)
def test_a_file_that_holds_no_settings_says_why(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_byte_order_mark_is_taken(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfsteps: 3\n")
    assert load_config(path).steps == 3


def test_a_file_that_cannot_be_read_is_an_error_that_says_why(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3")

    def refuse(*_: object, **__: object):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError, match=r"config file .*run\.yaml cannot be read: Permission denied"):
        load_config(path)


def test_a_path_that_no_file_system_takes_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="File name too long"):
        load_config(tmp_path / ("x" * 5000))
