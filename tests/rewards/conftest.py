"""Every learned reward with small random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import put_all


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like models/reward_models, with a small checkpoint under each published name."""
    folder = tmp_path_factory.mktemp("reward_models")
    put_all(folder)
    return folder
