"""Fixtures for tests of predicted memory, which several files share."""

import pytest

from rlhf.plan.predict import Predictor


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    """A predictor that has predicted nothing before."""
    with pytest.MonkeyPatch.context() as patch, Predictor() as found:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield found
