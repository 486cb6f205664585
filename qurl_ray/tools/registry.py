"""Functions as tools: their JSON schema from type hints and docstring, and calls that are checked against it."""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from qurl_ray.errors import EnvironmentFailed
from qurl_ray.extensions import did_you_mean, keep_traceback
from qurl_ray.tables import TOOLS
from qurl_ray.tools.calls import ToolCall
from qurl_ray.types import Problem

FunctionName = str | Mapping[str, Mapping[str, Any]]
"""A name of the table TOOLS, or one name with keyword arguments of a class: {"python": {"timeout_s": 2}}."""


class CallError(Exception):
    """A call that failed through the policy's fault, or in the tool. The message is for the policy."""


class Tool:
    """A function that a policy may call.

    Its parameters need type hints, which make the schema together with the docstring: the first paragraph describes
    the tool, and lines such as `city: Name of the city.` below `Args:` its parameters.

    Args:
        function: it may be a coroutine function. What it returns is text, or becomes JSON.

    Raises:
        EnvironmentFailed: a parameter has no type hint, or one that JSON cannot express.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self._reset = getattr(function, "reset", None)
        self._arguments, schema = _model_of(name, function)
        for plain in (schema, *schema.get("properties", {}).values()):
            plain.pop("title", None)
        schema.pop("additionalProperties", None)
        self.schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": " ".join(_doc(function).partition("\n\n")[0].split()),
                "parameters": {"properties": {}} | schema,
            },
        }
        """Description in OpenAI's format, as chat templates take it."""

    async def reset(self, problem: Problem) -> None:
        """Tell the problem to a tool that has a method `reset`, such as an object with the solution."""
        if callable(self._reset):
            result = self._reset(problem)
            if inspect.isawaitable(result):
                await result

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function and return its result as text.

        Raises:
            CallError: the arguments do not fit the schema, or the function raised.
            TypeError: the result is neither text nor JSON.
        """
        try:
            # From JSON: in strict mode a date is text there, and a number is never made from text.
            checked = self._arguments.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            faults = []
            for fault in error.errors(include_url=False):
                place = ".".join(map(str, fault["loc"]))
                faults.append(f"{place}: {fault['msg']}" if place else fault["msg"])
            raise CallError("; ".join(faults)) from None
        try:
            fields = self._arguments.model_fields
            result = self._function(**{str(about.alias): getattr(checked, field) for field, about in fields.items()})
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:  # a tool may raise anything, and the policy is to hear of it
            keep_traceback(error)
            raise CallError(f"{type(error).__name__}: {error}") from error
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"tool {self.name} returned what is neither text nor JSON: {error}") from None


class Registry:
    """The tools of an environment, by name.

    Args:
        functions: `package.module:function`, a class in its place, of which an object is made for each registry, or a
            name of the table TOOLS. A tool's name is that of its function.

    Raises:
        EnvironmentFailed: there is no such function, or two have one name.
    """

    def __init__(self, functions: Sequence[FunctionName]) -> None:
        self._tools: dict[str, Tool] = {}
        for given in functions:
            named: Mapping[str, Mapping[str, Any]] = {given: {}} if isinstance(given, str) else given
            if len(named) != 1:
                raise EnvironmentFailed(f"a tool is a name, or one name with its keyword arguments: {given!r}")
            ((name, params),) = named.items()
            target: Any = TOOLS.load(name)
            if params and not inspect.isclass(target):
                raise EnvironmentFailed(
                    f"tool {name!r} is a function: only classes take keyword arguments, which make an object"
                )
            function: Any = target(**params) if inspect.isclass(target) else target
            if not callable(function):
                raise EnvironmentFailed(
                    f"tool {name!r}: the class has no method __call__, which answers a call, such as "
                    "def __call__(self, city: str) -> str"
                )
            tool = Tool(name.rpartition(":")[2], function)
            if tool.name in self._tools:
                raise EnvironmentFailed(f"two tools have the name {tool.name!r}")
            self._tools[tool.name] = tool
        if not self._tools:
            raise EnvironmentFailed("environment.params.functions names no tool")

    def schemas(self) -> list[dict[str, Any]]:
        """Return the descriptions of all tools, in their order."""
        return [tool.schema for tool in self._tools.values()]

    async def reset(self, problem: Problem) -> None:
        """Tell the problem to all tools that want to know it; see Tool.reset."""
        for tool in self._tools.values():
            await tool.reset(problem)

    async def call(self, call: ToolCall) -> str:
        """Return the result of a call as text.

        Raises:
            CallError: there is no such tool, or see Tool.call.
            TypeError: see Tool.call.
        """
        if call.name not in self._tools:
            there = f"there is {', '.join(self._tools)}{did_you_mean(call.name, self._tools)}"
            raise CallError(f"no tool has the name {call.name!r}: {there}")
        return await self._tools[call.name].call(call.arguments)


def _model_of(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    """Return the model of a function's arguments, and its JSON schema. Its fields are numbered, since a parameter may
    have any name."""
    described = _described(_doc(function))
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function, eval_str=True).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentFailed(f"tool {name!r}: {parameter} cannot be given by its name")
        if parameter.annotation is parameter.empty:
            # The code of an object is that of the method that answers its calls.
            code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
            place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
            raise EnvironmentFailed(f"tool {name!r}: the parameter {parameter.name} needs a type hint{place}")
        default = ... if parameter.default is parameter.empty else parameter.default
        about = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[f"p{number}"] = (parameter.annotation, about)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        return model, model.model_json_schema()
    except Exception as error:  # pydantic has several errors for types that it, or JSON, does not know
        raise EnvironmentFailed(f"tool {name!r}: a type hint has no JSON schema: {error}") from error


def _doc(function: Any) -> str:
    """Return the docstring of a function; of an object, that of its method `__call__`."""
    return inspect.getdoc(function if inspect.isroutine(function) else function.__call__) or ""


def _described(doc: str) -> dict[str, str]:
    """Return what a docstring says below `Args:` about each parameter."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    if not section:
        return {}
    lines = textwrap.dedent(section[1])
    entries = re.split(r"^(\w+)(?: \([^)]*\))?:", lines, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
