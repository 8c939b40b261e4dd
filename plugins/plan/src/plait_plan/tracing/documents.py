"""Whether a run tells the documents of a sample apart, which its attention then pays for."""

from plait import Config
from plait.host import build_source


def told_apart(config: Config) -> bool:
    """Whether the run's batches have positions, because tokens see none but their document."""
    return getattr(build_source(config.data), "attention", "across") != "across"
