"""Masks and rollouts through process boundaries: queues of `multiprocessing`, and Ray's store."""

import multiprocessing
import pickle

import numpy as np
import pytest

from rlreplay import Rollout, RolloutSamplingMask

ARRAYS = ("prompt_ids", "response_ids", "rollout_log_probs", "support_log_probs", "loss_mask")


def rollout(n: int) -> Rollout:
    """`n` response tokens with 8 ids each and every optional field."""
    ids = np.arange(8 * n) % 1000 + np.repeat(np.arange(n), 8)
    mask = RolloutSamplingMask(ids, np.arange(n + 1) * 8)
    log_prob = -float(np.log(8))
    return Rollout(
        prompt_ids=[1, 2, 3],
        response_ids=mask.ids[::8],
        sampling_mask=mask,
        rollout_log_probs=np.full(n, log_prob, np.float32),
        support_log_probs=np.full(8 * n, log_prob, np.float32),
        loss_mask=np.arange(n) % 2,
        weight_versions=[("7", 0, n // 2), ("8", n // 2, n)],
        finish_reason="stop",
    )


def mixed_mask() -> RolloutSamplingMask:
    return RolloutSamplingMask.from_mask_list([[3, 7], None, [5]], allow_unrestricted=True)


def arrays_of(value: Rollout) -> list[np.ndarray]:
    mask = value.sampling_mask
    return [mask.ids, mask.offsets, *(getattr(value, name) for name in ARRAYS)]


def answer(inbox, outbox) -> None:
    """In a process of its own: send back what comes, and what it looks like from there."""
    for mask, sent in iter(inbox.get, None):
        writeable = [array.flags.writeable for array in arrays_of(sent)]
        outbox.put((mask, sent, mask.to_mask_list(), writeable, sent.truncate(1)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_queue_between_processes(method):
    context = multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(inbox, outbox))
    process.start()
    try:
        for n in (2, 5000):
            inbox.put((mixed_mask(), rollout(n)))
            mask, again, listed, writeable, cut = outbox.get(timeout=100)
            assert mask == mixed_mask()
            assert listed == mixed_mask().to_mask_list()
            assert again == rollout(n)
            assert cut == rollout(n).truncate(1)
            assert not any(writeable), "immutable on the other side too"
    finally:
        inbox.put(None)
        process.join(100)
    assert process.exitcode == 0


def test_arrays_leave_the_pickle():
    """What stays in it does not grow with the response."""
    sizes = set()
    for n in (140_000, 200_000):  # every count in it takes four bytes
        whole = rollout(n)
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(whole, protocol=5, buffer_callback=buffers.append)
        moved = sum(buffer.raw().nbytes for buffer in buffers)
        assert moved == sum(array.nbytes for array in arrays_of(whole))
        sizes.add(len(data))
        assert pickle.loads(data, buffers=buffers) == whole
        in_band = pickle.dumps(whole, protocol=5)
        assert len(in_band) > moved, "without a callback they are inside"
    assert len(sizes) == 1
    assert sizes.pop() < 1000


def test_a_slice_does_not_drag_the_whole_along():
    cut = rollout(20_000).truncate(2)
    data = pickle.dumps(cut, protocol=5)
    assert len(data) < 2000
    assert pickle.loads(data) == cut


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.timeout(300)
def test_ray_moves_them_without_a_copy():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
    try:
        whole = rollout(20_000)
        stored = ray.put(whole)
        one, two = ray.get(stored), ray.get(stored)
        assert one == two == whole
        assert np.shares_memory(one.sampling_mask.ids, two.sampling_mask.ids), "both in the store"
        assert np.shares_memory(one.support_log_probs, two.support_log_probs)

        @ray.remote
        def cut(value, mask):
            return value.truncate(3), mask.to_mask_list()

        short, listed = ray.get(cut.remote(stored, mixed_mask()))
        assert short == whole.truncate(3)
        assert listed == mixed_mask().to_mask_list()
    finally:
        ray.shutdown()
