"""Whether a run tells the documents of a sample apart, which its attention then pays for."""

from plait import Config
from plait.host import build_source
from plait_plan.memo import Memo

ANSWERS = Memo[bool](16)  # a search asks for each layout, and a mixture makes all of its sources


def told_apart(config: Config) -> bool:
    """Whether the run's batches have positions, because tokens see none but their document."""
    return ANSWERS.once([config.data], lambda: getattr(build_source(config.data), "attention", "across") != "across")
