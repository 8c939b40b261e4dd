"""The helpers beside these tests, here and in the ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fresh():
    """Nothing is known of a family from another test, nor kept for one."""
    from plait_transformers import proof

    proof._facts.cache_clear()
    yield
    proof._facts.cache_clear()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """kind -> (folder of the model, photos, folder for model.images, file of conversations); each made once."""
    import torch
    from shown import CHATS, drawn, model_in

    from plait_testing.widened import Widened
    from plait_transformers.images import write

    known: dict[str, Any] = {}

    def of(kind):
        if kind not in known:
            where = tmp_path_factory.mktemp(kind)
            photos, folder = drawn(where / "photos"), model_in(where / "model", kind)
            with Widened():
                write(str(folder), str(photos), str(where / "seen"), torch.float64)
            chats = where / "chats.jsonl"
            chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS))
            known[kind] = folder, photos, where / "seen", chats
        return known[kind]

    return of
