"""Profile the time and memory of a run."""

from composer.profiler.json_trace_handler import JSONTraceHandler as JSONTraceHandler
from composer.profiler.marker import Marker as Marker
from composer.profiler.profiler import Profiler as Profiler
from composer.profiler.profiler_action import ProfilerAction as ProfilerAction
from composer.profiler.profiler_schedule import cyclic_schedule as cyclic_schedule
from composer.profiler.system_profiler import SystemProfiler as SystemProfiler
from composer.profiler.torch_profiler import TorchProfiler as TorchProfiler
from composer.profiler.trace_handler import TraceHandler as TraceHandler

__all__ = [
    "JSONTraceHandler",
    "Marker",
    "Profiler",
    "ProfilerAction",
    "SystemProfiler",
    "TorchProfiler",
    "TraceHandler",
    "cyclic_schedule",
]
