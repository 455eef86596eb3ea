"""Spans of requests for OpenTelemetry: the request, and per reply its wait, its prefill and its decoding, with token counts.

Owns what a span tells: times, counts and routes, never a prompt, a reply, a key or a path that a client made up. The library is
optional and loaded only when tracing is asked for; without it nothing here runs. W3C traceparent is honoured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from kvist.engine.progress import Progress

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

NOT_TRACED = ("/live", "/health", "/metrics")


class Tracing:
    """Makes spans on a provider, which says where they go. Needs opentelemetry-sdk."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._api = provider, trace
        self._tracer = provider.get_tracer("kvist.server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Headers, method: str, path: str) -> Span | None:
        """The span of a request, inside the caller's trace if its headers name one; None for paths that are asked all day."""
        if path in NOT_TRACED:
            return None
        context = self._propagator.extract(dict(headers))
        return self._tracer.start_span(
            method, context=context, kind=self._api.SpanKind.SERVER, attributes={"http.request.method": method}
        )

    def end(self, span: Span, method: str, route: str, status: int, number: str, facts: dict[str, Any]) -> None:
        """End a request's span: its route, status and figures."""
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "http.response.status_code": status, "kvist.request_id": number})
        span.set_attributes({f"kvist.{name}": value for name, value in facts.items() if isinstance(value, int | float)})
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def replies(self, span: Span, ways: Sequence[Progress]) -> None:
        """The spans inside: of each reply what the engine has noted of its way. Times are of time.monotonic."""
        if not span.is_recording():
            return
        context = self._api.set_span_in_context(span)
        now, epoch_ns = time.monotonic(), time.time_ns() - time.monotonic_ns()
        for index, way in enumerate(ways):
            ended = now if way.ended_at is None else way.ended_at
            usage = way.usage
            parts = (
                ("queue", way.queued_at, way.started_at, {"kvist.prompt_tokens": usage.prompt_tokens}),
                ("prefill", way.started_at, way.first_at, _prefill_figures(way)),
                ("decode", way.first_at, ended, _decode_figures(way)),
            )
            for name, start, stop, figures in parts:
                if start is None:
                    break
                inner = self._tracer.start_span(
                    name, context=context, start_time=epoch_ns + int(start * 1e9), attributes={"kvist.index": index, **figures}
                )
                inner.end(epoch_ns + int((ended if stop is None else stop) * 1e9))

    def close(self) -> None:
        """Send what waits and end."""
        self._provider.shutdown()


def _prefill_figures(way: Progress) -> dict[str, int]:
    usage = way.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        **{f"kvist.cached_tokens.{tier}": tokens for tier, tokens in usage.cached.items()},
        "kvist.cached_tokens": usage.cached_tokens,
        "kvist.replayed_tokens": usage.replayed_tokens,
        "kvist.encoder_rows": way.encoder_rows,
        "kvist.decoder_rows": way.decoder_rows,
    }


def _decode_figures(way: Progress) -> dict[str, int | str]:
    usage = way.usage
    return {
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "kvist.drafted_tokens": usage.drafted_tokens,
        "kvist.accepted_tokens": usage.accepted_tokens,
        "kvist.preemptions": usage.preemptions,
        "kvist.end": way.reason or "left",
    }


def otlp_tracing() -> Tracing:
    """Tracing to a collector over OTLP/HTTP, where OTEL_EXPORTER_OTLP_ENDPOINT says. ValueError without the library."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ValueError(f"tracing needs {error.name}, which is missing; pip install '.[otel]' in the checkout") from error
    named = Resource.create({SERVICE_NAME: "kvist"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
