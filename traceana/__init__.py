"""traceana: where every pipeline stage of an LLM server spends its time, in nanoseconds that add up."""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
