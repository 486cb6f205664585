"""Records for MLflow: metrics, parameters and traces, made from a run's events. This module contacts no server.

The same event always gives the same records, so that records missed by a server can be sent again from the run's files.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow.entities import AssessmentSource, Feedback, Metric, Span, SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode

from qurl_ray.report.text import storable
from qurl_ray.runs.files import finite
from qurl_ray.runs.values import plain
from qurl_ray.tracking.numbers import event_numbers
from qurl_ray.types import Event

TRACE_NAME = "sampled rollout"
_PREVIEW_CHARACTERS = 1000
_Sample = Mapping[str, Any]
"""One sample: a line of samples.jsonl, or an entry of an event of kind `samples`."""


# --- metrics and parameters -------------------------------------------------------------------------------------------


def event_metrics(event: Event, at: float) -> list[Metric]:
    """Return the numbers of an event as metrics, under names that MLflow accepts; NaN stays NaN. `at` is unix time in
    seconds."""
    numbers = event_numbers(event).items()
    return [Metric(metric_name(name), value, int(at * 1000), event.step) for name, value in numbers]


def metric_name(key: str) -> str:
    """Return the most similar name that MLflow accepts: letters, digits and _ . - space, no empty or dot path parts."""
    parts = re.sub(r"[^\w.\- /]", "_", key).split("/")
    path = "/".join(part for part in parts if part not in ("", ".", ".."))
    path = re.sub(r"^\.+", "_", path)  # MLflow takes any name that starts with two dots for a parent folder
    return path[:MAX_ENTITY_KEY_LENGTH].rstrip("/") or "_"


def param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(plain(value))
    return storable(text)[:MAX_PARAM_VAL_LENGTH]


# --- traces -----------------------------------------------------------------------------------------------------------


def trace_id(run_id: str, step: int, sample: _Sample) -> str:
    """Id of a trace. It depends only on the run and the sample, so that sending it twice gives one trace."""
    return f"tr-{_digest(run_id, step, sample.get('uid'), bits=128):032x}"


def trace_info(run_id: str, experiment_id: str, step: int, sample: _Sample, at: float) -> TraceInfo:
    """Header of a sample's trace: the fields that MLflow lists, filters by, and shows with the run."""
    identity = trace_id(run_id, step, sample)
    reward, gaps = finite(sample.get("reward")), [gap for gap in token_gaps(sample) if gap is not None]
    ok = sample.get("status", "ok") == "ok"
    began, seconds = _time_of(sample, at)
    tags = {
        TraceTagKey.TRACE_NAME: TRACE_NAME,
        "step": str(step),
        "uid": storable(str(sample.get("uid", ""))),
        "reward": "" if reward is None else f"{reward:g}",
        "largest_gap": f"{max(gaps, key=abs):.4f}" if gaps else "",
    }
    assessments = []
    if reward is not None:
        assessment = Feedback(
            name="reward",
            value=reward,
            source=AssessmentSource("CODE", "task.reward"),
            trace_id=identity,
            create_time_ms=int(at * 1000),
            last_update_time_ms=int(at * 1000),
        )
        assessment.assessment_id = f"a-{_digest(identity, 'reward', bits=128):032x}"
        assessments.append(assessment)
    return TraceInfo(
        trace_id=identity,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=int(began * 1000),
        execution_duration=int(seconds * 1000),
        state=TraceState.OK if ok else TraceState.ERROR,
        request_preview=_text(sample, "prompt")[:_PREVIEW_CHARACTERS],
        response_preview=_text(sample, "answer")[:_PREVIEW_CHARACTERS],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={key: value for key, value in tags.items() if value},
        assessments=assessments,
    )


def trace_spans(run_id: str, step: int, sample: _Sample, at: float) -> list[Span]:
    """Convert a sample to a tree of spans: the rollout, with children for the engine's tokens, the environment's
    messages, and the verdict.

    Turns and calls of an environment have the times at which they began and ended. Of other samples `samples.jsonl` has
    only one time, so that spans have no duration. A nanosecond between the starts of children preserves their order.
    """
    identity = trace_id(run_id, step, sample)
    began, seconds = _time_of(sample, at)
    prompt, answer, expected = (_text(sample, key) for key in ("prompt", "answer", "expected"))
    reward = {"reward": finite(sample.get("reward")), "status": sample.get("status", "ok")}
    more: dict[str, Any] = {"step": step, "seconds_queued": finite(sample.get("queued"))}
    root = _span(identity, TRACE_NAME, began, SpanType.CHAIN, prompt, {"answer": answer} | reward, seconds, **more)
    parts = _turn_spans(identity, sample, root, began)
    if not parts:
        drawn = _drawn(sample, 0, None)
        parts = [_span(identity, "generate", began, SpanType.LLM, prompt, answer, parent=root, order=1, **drawn)]
    asked, ended = {"answer": answer, "expected": expected}, began + seconds
    judged = _span(identity, "judge", ended, SpanType.EVALUATOR, asked, reward, parent=root, order=1 + len(parts))
    return [root, *parts, judged]


def _turn_spans(identity: str, sample: _Sample, root: Span, began: float) -> list[Span]:
    """Return a span for each turn of the policy and each call of the environment, in their order; none if the sample
    has none. The input of each is the output of the one before."""
    records = [(key, record) for key in ("said", "turns") for record in sample.get(key) or []]
    spans: list[Span] = []
    numbers, given = {"said": 0, "turns": 1}, _text(sample, "prompt")  # the first call is the reset
    for order, (key, record) in enumerate(sorted(records, key=lambda part: (part[1]["at"], part[0])), start=1):
        number, seconds = numbers[key], record["waited"]
        if key == "turns":
            name, kind, out = f"turn {number}", SpanType.LLM, record.get("text")
            more = _drawn(sample, record["at"], record.get("tokens", 0))
        else:
            name, kind, out = f"environment {number}" if number else "reset", SpanType.TOOL, record.get("messages")
            more = {field: record.get(field) for field in ("reward", "calls", "failed_calls", "failed")}
            more |= {"seconds_worked": record.get("seconds"), "seconds_waited": seconds}
        at = began + record["asked"]
        spans.append(_span(identity, name, at, kind, given, out, seconds, parent=root, order=order, **more))
        numbers[key] += 1
        given = out or given
    return spans


def _time_of(sample: _Sample, at: float) -> tuple[float, float]:
    """Return start (unix time) and duration of a sample in seconds: those of a trajectory, else `at` and 0."""
    return (sample["began"], sample["seconds"]) if "began" in sample else (at, 0.0)


def _drawn(sample: _Sample, start: int, count: int | None) -> dict[str, Any]:
    """Return attributes for so many of the sample's tokens from `start` on, or for all: text of each, log-probs, gaps
    between them, and weight versions as [version, number of tokens]."""
    part = slice(start, None if count is None else start + count)
    gaps = token_gaps(sample)[part]
    known = [abs(gap) for gap in gaps if gap is not None]
    names = {"tokens": "tokens", "logprob_engine": "logprobs", "logprob_learner": "proximal_logprobs"}
    lists = {name: sample[key][part] for name, key in names.items() if isinstance(sample.get(key), list)}
    return lists | {
        "uid": sample.get("uid"),
        "logprob_gap": gaps or None,
        "mean_abs_gap": math.fsum(known) / len(known) if known else None,
        "largest_abs_gap": max(known, default=None),
        "versions": list(_versions(sample.get("versions") or [], part)) or None,
    }


def _versions(runs: Sequence[tuple[int, int]], part: slice) -> Iterator[list[int]]:
    """Yield [version, number of tokens] for a part of the tokens, from those of all."""
    place = 0
    for version, count in runs:
        here = min(place + count, place + count if part.stop is None else part.stop) - max(place, part.start)
        if here > 0:
            yield [version, here]
        place += count


def token_gaps(sample: _Sample) -> list[float | None]:
    """Engine's log-prob minus the learner's for every token, in nats; empty if the learner's were not recorded."""
    pairs = zip(sample.get("logprobs") or [], sample.get("proximal_logprobs") or [], strict=False)
    return [None if finite(b) is None or finite(p) is None else round(b - p, 4) for b, p in pairs]


def _span(
    identity: str,
    name: str,
    at: float,
    kind: str,
    inputs: Any,
    outputs: Any,
    seconds: float = 0.0,
    *,
    parent: Span | None = None,
    order: int = 0,
    **more: Any,
) -> Span:
    """Create a span. `more` are attributes; values of None are omitted. `failed` gives the status of an error."""
    attributes = {
        SpanAttributeKey.REQUEST_ID: identity,
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
    } | {key: value for key, value in more.items() if value is not None}
    start = _nanoseconds(at) + order
    span = ReadableSpan(
        name=name,
        context=_context(identity, _digest(identity, name, bits=64)),
        parent=_context(identity, int(parent.span_id, 16)) if parent else None,
        start_time=start,
        end_time=max(start, _nanoseconds(at + seconds)),
        attributes={key: storable(json.dumps(plain(value), ensure_ascii=False)) for key, value in attributes.items()},
        status=Status(StatusCode.ERROR, str(more["failed"])) if more.get("failed") else Status(StatusCode.OK),
        resource=Resource.get_empty(),  # else it would be the machine's, which is irrelevant for a rollout
    )
    return Span(span)


def _nanoseconds(at: float) -> int:
    """Convert seconds of unix time. As a float they are exact to less than a microsecond."""
    return 1000 * round(at * 1e6)


def _context(identity: str, span: int) -> SpanContext:
    return SpanContext(trace_id=int(identity.removeprefix("tr-"), 16), span_id=span, is_remote=False)


def _digest(*parts: Any, bits: int) -> int:
    """Hash the text of the parts to a positive number of `bits` bits."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[: bits // 8], "big") or 1


def _text(sample: _Sample, key: str) -> str:
    value = sample.get(key)
    return "" if value is None else storable(str(value))
