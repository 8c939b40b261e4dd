"""What needs a GPU, as few tests as will do. Where it makes sense a test also runs on a CPU, which proves the test."""

import pytest

ON_BOTH = (pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=ON_BOTH)
def device(request):
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return request.param


@pytest.fixture(scope="session")
def gpu_ranks():
    """A pool of one rank that has a GPU."""
    from plait_testing.pool import Pool

    pool = Pool(1, "nccl", timeout=300)
    yield pool
    pool.close()


@pytest.fixture
def ranks(device, plait_ranks, gpu_ranks):
    """The ranks that compute on `device`; each pool starts when it is used."""
    return plait_ranks if device == "cpu" else gpu_ranks
