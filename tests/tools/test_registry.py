"""Functions as tools: what the policy is told of them, and what becomes of its arguments."""

import asyncio

import pytest

from qurl_ray.errors import EnvironmentFailed
from qurl_ray.tools.calls import ToolCall
from qurl_ray.tools.registry import CallError, Registry

HERE = "tests.tools.functions"


def registry(*names) -> Registry:
    return Registry([f"{HERE}:{name}" if isinstance(name, str) else name for name in names])


def called(made: Registry, name: str, **arguments) -> str:
    return asyncio.run(made.call(ToolCall(name=name, arguments=arguments)))


def test_the_schema_comes_from_hints_and_docstring():
    assert registry("weather").schemas() == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Return the weather of a city.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Name of the city, without its country."},
                        "unit": {"type": "string", "enum": ["C", "F"], "default": "C", "description": "C or F."},
                        "days": {
                            "anyOf": [{"items": {"type": "integer"}, "type": "array"}, {"type": "null"}],
                            "default": None,
                        },
                    },
                    "required": ["city"],
                },
            },
        }
    ]


def test_results_become_text():
    made = registry("weather", "later", "odd_names")
    assert called(made, "weather", city="Köln") == '{"city": "Köln", "unit": "C", "days": null}'
    assert called(made, "later", day="2026-01-31", share=1) == "31.01.2026 1.0"
    assert called(made, "odd_names", json="a", copy=1, self_=True, model_config="b") == "a 1 True b"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("weather", {}, "city: Field required"),
        ("weather", {"city": 3}, "city: .*string"),
        ("weather", {"city": "x", "unit": "K"}, "unit: .*'C' or 'F'"),
        ("weather", {"city": "x", "days": ["1"]}, r"days\.0: .*integer"),
        ("weather", {"city": "x", "country": "y"}, "country: .*not permitted"),
        ("later", {"day": "tomorrow"}, "day: .*date"),
        ("wether", {}, "no tool has the name 'wether': there is weather, later, raises; did you mean 'weather'"),
        ("raises", {"text": "boo"}, "KeyError: 'boo'"),
    ],
)
def test_bad_arguments_are_told(name, arguments, message):
    with pytest.raises(CallError, match=message):
        called(registry("weather", "later", "raises"), name, **arguments)


def test_a_class_is_a_tool_with_state_and_settings():
    one, other = (registry({f"{HERE}:Counter": {"start": 5}}) for _ in range(2))
    assert [called(one, "Counter", step=2), called(one, "Counter", step=2)] == ["7", "9"]
    assert called(other, "Counter", step=0) == "5"
    (schema,) = one.schemas()
    assert schema["function"]["description"] == "Count further."
    assert schema["function"]["parameters"]["properties"]["step"]["description"] == "How far."


def test_a_result_that_is_no_text_is_an_error_of_the_tool():
    with pytest.raises(TypeError, match="returns_an_object returned what is neither text nor JSON"):
        called(registry("returns_an_object"), "returns_an_object")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["without_hints"], "text needs a type hint"),
        (["with_anything"], "cannot be given by its name"),
        (["weather", "weather"], "two tools have the name 'weather'"),
        (["wether"], "did you mean 'weather'"),
        ([{f"{HERE}:weather": {"unit": "F"}}], "only classes take keyword arguments"),
        (["Silent"], r"no method __call__, .* such as def __call__\(self, city: str\) -> str"),
        ([], "names no tool"),
    ],
)
def test_functions_that_cannot_be_tools(names, message):
    with pytest.raises(EnvironmentFailed, match=message):
        registry(*names)
