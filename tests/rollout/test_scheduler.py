"""The scheduler against a fake device that remembers what every slot holds."""

import collections
import itertools

import numpy as np
import pytest
from fake_device import VOCAB, FakeDevice, complete

from fp8rl_jax.rollout.scheduler import Scheduler
from fp8rl_jax.rollout.types import FinishReason, Request, SamplingParams

PAGE = 4
NEVER_DRAWN = VOCAB + 1


def sampling(limit=8, num_samples=1, stop_ids=(NEVER_DRAWN,), **kwargs):
    return SamplingParams(1.0, limit, stop_ids, num_samples, **kwargs)


class Run:
    """A scheduler, its device, and what each sequence must draw."""

    def __init__(self, num_shards=1, num_slots=4, num_pages=32, **kwargs):
        sizes = {
            "page_size": PAGE,
            "prefill_rows": 2,
            "prefill_length": 2 * PAGE,
            "max_length": num_pages * PAGE,
        } | kwargs
        self.scheduler = Scheduler(num_shards, num_slots, num_pages, **sizes)
        self.device = FakeDevice(num_shards, num_pages, PAGE)
        self.requests = {}
        self.known = {}  # all tokens of each sequence, by (request id, sample)
        self.events = collections.defaultdict(list)
        self.sequences = {}
        self.num_shared = 0  # plans with groups
        self._next_id = 0
        self._last = {}

    def submit(self, prompt, params=None, sample_ids=None):
        params = params or sampling()
        if sample_ids is None:
            sample_ids = tuple(range(self._next_id, self._next_id + params.num_samples))
        self._next_id += params.num_samples
        request = Request(prompt, params, sample_ids)
        request_id = self.scheduler.submit(request)
        self.requests[request_id] = request
        for sample in range(params.num_samples):
            self.known[request_id, sample] = list(prompt)
        return request_id

    def prefill(self):
        plan = self.scheduler.next_prefill()
        if plan is not None:
            self.device.prefill(plan)
        return plan

    def decode(self, num_steps=4, meanwhile=lambda: None):
        plan = self.scheduler.next_decode(num_steps)
        if plan is None:
            return None
        self._check_tables(plan)
        self._check_shared(plan)
        self._check_preemptions(plan)
        out = self.device.decode(plan, self.known)
        meanwhile()
        self.note(self.scheduler.record(plan, *out))
        return plan

    def note(self, events):
        for sequence, tokens, log_probs, reason in events:
            key = sequence.request_id, sequence.sample
            assert not self.events[key] or self.events[key][-1][2] is None
            self.events[key].append((tokens.tolist(), log_probs.tolist(), reason))
            self.known[key].extend(tokens.tolist())
            self.sequences[key] = sequence

    def round(self, num_steps=4):
        """Prefills all there is, then decodes."""
        while self.prefill() is not None:
            pass
        return self.decode(num_steps)

    def run(self, num_steps=4):
        plans = []
        while self.scheduler.has_work:
            plans.append(self.round(num_steps))
            assert plans[-1] is not None, "nothing happens and there is work"
        return plans

    def _check_tables(self, plan):
        """Each row names the pages of its sequence and no more."""
        for table, sequence in zip(plan.page_table, plan.sequences, strict=True):
            pages = [] if sequence is None else sequence.placement.pages
            assert table[: len(pages)].tolist() == pages
            assert (table[len(pages) :] == -1).all()

    def _check_shared(self, plan):
        """Each row of a group has the shared pages, and all of their tokens."""
        if plan.shared is None:
            return
        self.num_shared += 1
        groups = np.split(plan.shared.groups, self.device.num_shards)
        tables = np.split(plan.page_table, self.device.num_shards)
        positions = np.split(plan.positions, self.device.num_shards)
        counts = np.split(plan.shared.num_pages, self.device.num_shards)
        for shard in zip(groups, counts, tables, positions, strict=True):
            members = shard[0][shard[0] >= 0]
            assert len(set(members.tolist())) == len(members)
            for rows, count in zip(*shard[:2], strict=True):
                rows = rows[: (rows >= 0).sum()]
                assert (rows >= 0).all() and (len(rows) > 1) == (count > 0)
                pages = shard[2][rows, :count]
                assert (pages == pages[:1]).all() and (pages >= 0).all()
                assert (shard[3][rows] >= count * PAGE).all()

    def _check_preemptions(self, plan):
        """Who had to go was younger than all who stayed on its shard."""
        per_shard = len(plan.positions) // self.device.num_shards
        now = {
            sequence: row // per_shard
            for row, sequence in enumerate(plan.sequences)
            if sequence is not None
        }
        for sequence, shard in self._last.items():
            if sequence not in now and sequence.finish_reason is None:
                stayed = [s.order for s, where in now.items() if where == shard]
                assert all(order < sequence.order for order in stayed)
        self._last = now

    def check(self, cut=(), cancelled=()):
        """All have ended with what they draw on their own, and hold nothing."""
        assert not self.scheduler.has_work
        assert self.scheduler.metrics.pages_in_use == 0
        assert self.scheduler.next_prefill() is None
        assert self.scheduler.next_decode(4) is None
        for request_id, request in self.requests.items():
            for sample, sample_id in enumerate(request.sample_ids):
                tokens, log_probs, stopped = complete(
                    request.prompt, sample_id, request.sampling
                )
                done = self.sequences[request_id, sample].completion()
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                if (request_id, sample) in cut:
                    length, reason = cut[request_id, sample]
                elif done.finish_reason == FinishReason.CANCELLED:
                    assert request_id in cancelled
                    length, reason = len(done.tokens), FinishReason.CANCELLED
                else:
                    length = len(tokens)
                assert done.finish_reason == reason
                assert (done.request, done.sample) == (request_id, sample)
                assert done.tokens.dtype == np.int32
                assert done.log_probs.dtype == np.float32
                np.testing.assert_array_equal(done.tokens, tokens[:length])
                np.testing.assert_array_equal(done.log_probs, log_probs[:length])
                events = self.events[request_id, sample]
                for i, whole in enumerate((done.tokens, done.log_probs)):
                    drawn = itertools.chain.from_iterable(event[i] for event in events)
                    assert list(drawn)[:length] == whole.tolist()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def random_params(rng, num_samples):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        max_new_tokens=int(rng.integers(1, 12)),
        stop_ids=tuple(rng.choice(VOCAB, size=rng.integers(1, 6)).tolist()),
        num_samples=num_samples,
        top_k=int(rng.integers(3)),
        top_p=float(rng.choice([0.5, 1.0])),
        min_p=float(rng.choice([0.0, 0.1])),
    )


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_every_completion_is_what_it_would_be_alone(seed, drained):
    """Random workloads on small pools; ``drained``: all prefill before each burst."""
    rng = np.random.default_rng(seed)
    num_pages = int(rng.integers(8, 24))
    run = Run(
        num_shards=int(rng.integers(1, 4)),
        num_slots=int(rng.integers(1, 7)),
        num_pages=num_pages,
        prefill_rows=int(rng.integers(1, 4)),
        prefill_length=PAGE * int(rng.integers(1, 4)),
        min_rows=int(rng.integers(1, 4)),
        group_size=int(rng.integers(2, 4)),
        share_prefixes=[None, True][seed % 2],
    )
    stems = [prompt(int(rng.integers(1, 18)), seed) for seed in range(3)]
    cut, cancelled, left = {}, set(), 25

    def arrive():
        nonlocal left
        while left and rng.random() < 0.5:
            left -= 1
            stem = rng.integers(len(stems))
            if rng.random() < 0.3:
                stems[stem] = prompt(int(rng.integers(1, 30)), left)
            tokens = list(stems[stem])
            ended = [k for k, s in run.sequences.items() if s.finish_reason is not None]
            if ended and rng.random() < 0.3:  # the next turn
                tokens = list(run.known[ended[rng.integers(len(ended))]])
            tokens = tokens[: 4 * num_pages - 17]
            if rng.random() < 0.5:  # else others may have just this prompt
                tokens += rng.integers(VOCAB, size=rng.integers(1, 6)).tolist()
            run.submit(tokens, random_params(rng, int(rng.integers(1, 5))))

    def cancel():
        if rng.random() < 0.15 and run.requests:
            recent = min(4, len(run.requests))
            request_id = len(run.requests) - 1 - int(rng.integers(recent))
            cancelled.add(request_id)
            run.note(run.scheduler.cancel(request_id))

    def cut_short():
        """As an engine does that has found a stop string in the last tokens."""
        for key, events in run.events.items():
            fresh = len(events[-1][0])
            if key in cut or not fresh or rng.random() > 0.02:
                continue
            if events[-1][2] == FinishReason.CANCELLED:
                continue
            sequence = run.sequences[key]
            drawn = sequence.length - sequence.prompt_length
            length = drawn - int(rng.integers(fresh + 1))
            run.scheduler.finish(sequence, FinishReason.STOP, length)
            cut[key] = length, FinishReason.STOP

    def meanwhile():
        arrive()
        cancel()
        if not drained and rng.random() < 0.3:
            run.prefill()

    for _ in range(2000):
        arrive()
        cancel()
        busy = drained or rng.random() < 0.6
        while busy and run.prefill() is not None:
            busy = drained or rng.random() < 0.6
        plan = run.decode(int(rng.integers(1, 10)), meanwhile)
        cut_short()
        if drained and plan is None and not left:
            assert not run.scheduler.has_work, "nothing happens and there is work"
        if not left and not run.scheduler.has_work:
            break
    run.check(cut, cancelled)


def test_the_workloads_meet_every_rule():
    """Otherwise the test above would prove little."""
    run = Run(num_slots=6, num_pages=12, prefill_rows=1)
    for seed in range(6):
        run.submit(prompt(13, seed), sampling(24, num_samples=3))
    run.run()
    run.check()
    assert run.num_shared > 2
    assert run.scheduler.metrics.preemptions > 5
    assert run.scheduler.metrics.cache_hit_tokens > 100


def test_samples_share_full_pages_and_copy_the_last_one():
    run = Run(num_slots=4)
    run.submit(prompt(11), sampling(num_samples=4))  # caches 10 tokens in 3 pages
    plan = run.round()
    np.testing.assert_array_equal(plan.page_table[:, :2], [[0, 1]] * 4)
    assert len(set(plan.page_table[:, 2])) == 4
    assert sorted(plan.copy_target[plan.copy_target >= 0]) == [3, 4, 5]
    np.testing.assert_array_equal(plan.copy_source, [2, 2, 2, -1])
    assert run.scheduler.metrics.prefill_tokens == 10
    assert run.scheduler.metrics.cache_hit_tokens == 30
    run.run()
    run.check()


@pytest.mark.parametrize(
    ("share", "length", "expected"),
    [(None, 33, True), (None, 9, False), (True, 9, True), (False, 33, False)],
)
def test_samples_read_shared_pages_once_where_it_pays(share, length, expected):
    run = Run(num_slots=4, share_prefixes=share)
    run.submit(prompt(length), sampling(24, num_samples=2))
    run.submit(prompt(3, 1), sampling(24, num_samples=2))
    plan = run.round()
    assert (plan.shared is not None) == expected
    if expected:
        assert plan.shared.groups.shape == (1, 16)
        assert plan.shared.groups[0, :3].tolist() == [0, 1, -1]
        assert plan.shared.num_pages.tolist() == [length // PAGE]
    run.run()
    run.check()


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (5, 1), (9, 2)])
def test_whole_pages_need_no_copy(length, pages):
    run = Run()
    run.submit(prompt(length), sampling(num_samples=2))
    plan = run.round()
    assert plan.copy_source.shape == plan.copy_target.shape == (0,)
    assert run.scheduler.metrics.prefill_tokens == pages * PAGE
    run.run()
    run.check()


def test_a_chunk_goes_no_further_than_its_sequence():
    run = Run(prefill_rows=2, prefill_length=3 * PAGE)
    run.submit(prompt(18))
    first, second = run.prefill(), run.prefill()
    assert run.prefill() is None
    np.testing.assert_array_equal(first.start, [0, -1])
    np.testing.assert_array_equal(second.start, [12, -1])
    np.testing.assert_array_equal(first.tokens[0], prompt(18)[:12])
    np.testing.assert_array_equal(second.tokens[0], prompt(18)[12:17] + [0] * 7)
    np.testing.assert_array_equal(first.page_table[0, :4], [0, 1, 2, -1])
    np.testing.assert_array_equal(second.page_table[0, :6], [0, 1, 2, 3, 4, -1])
    assert first.page_table.shape == (2, 32)


def test_the_next_turn_shares_all_that_came_before():
    run = Run()
    first = run.submit(prompt(6), sampling(12))
    run.run()
    before = run.scheduler.metrics
    run.submit([*run.known[first, 0], 1, 2, 3], sampling(4))  # 21 tokens
    run.run()
    run.check()
    after = run.scheduler.metrics
    # 17 of 18 tokens were cached: four pages, and one token in the fifth.
    assert after.cache_hit_tokens - before.cache_hit_tokens == 16
    assert after.prefill_tokens - before.prefill_tokens == 4


def test_a_preempted_sequence_finds_pages_that_are_left():
    run = Run(num_slots=2, num_pages=6)
    run.submit(prompt(6, 1), sampling(9))
    run.submit(prompt(6, 2), sampling(16))
    run.run()
    run.check()
    assert run.scheduler.metrics.preemptions == 1
    # It had filled three; its last one was taken for the older sequence.
    assert run.scheduler.metrics.cache_hit_tokens == 2 * PAGE


def test_nobody_overtakes_a_sequence_that_does_not_fit():
    run = Run(num_slots=3, num_pages=8)
    run.submit(prompt(15, 1), sampling(16))
    large = run.submit(prompt(21, 2), sampling(4))
    small = run.submit(prompt(2, 3), sampling(4))
    seen = []
    while run.scheduler.has_work:
        plan = run.round()
        seen.append({s.request_id for s in plan.sequences if s is not None})
    assert seen[0] == {0}
    first_small = next(i for i, ids in enumerate(seen) if small in ids)
    assert first_small == next(i for i, ids in enumerate(seen) if large in ids) > 0
    run.check()


def test_the_oldest_sequence_is_in_every_plan():
    run = Run(num_slots=4, num_pages=8)
    for seed in range(4):
        run.submit(prompt(5, seed), sampling(26))
    while run.scheduler.has_work:
        ended = {k for k, events in run.events.items() if events[-1][2] is not None}
        oldest = min(key for key in run.known if key not in ended)
        plan = run.round()
        keys = {(s.request_id, s.sample) for s in plan.sequences if s is not None}
        assert oldest in keys
    assert run.scheduler.metrics.preemptions
    run.check()


def test_a_sequence_may_need_the_whole_pool_and_a_copy():
    """The page that it would copy from must not keep it waiting for ever."""
    run = Run(num_slots=2, num_pages=4)
    run.submit(prompt(15), sampling(1, num_samples=3))
    run.run()
    run.check()
    # The others share three pages and compute the last two tokens again.
    assert run.scheduler.metrics.cache_hit_tokens == 2 * 12
    assert run.scheduler.metrics.prefill_tokens == 14 + 2 * 2


@pytest.mark.parametrize(("num_pages", "rows"), [(4, 1), (5, 2)])
def test_admission_leaves_a_page_for_each_running_sequence(num_pages, rows):
    run = Run(num_pages=num_pages)
    for seed in range(2):
        run.submit(prompt(5, seed), sampling(2))
    assert len(run.round().positions) == rows
    run.run()
    assert not run.scheduler.metrics.preemptions
    run.check()


def test_requests_that_can_never_fit_are_refused():
    run = Run(num_pages=4, max_length=64)
    with pytest.raises(
        ValueError, match=r"need 5 pages of 4 tokens, and a device has 4"
    ):
        run.submit(prompt(9), sampling(8))
    with pytest.raises(ValueError, match=r"exceed max_length=64.*raise max_length"):
        run.submit(prompt(60), sampling(8))
    assert not run.scheduler.has_work
    run.submit(prompt(8), sampling(8))
    run.run()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_slots": 0}, "num_slots must be >= 1, got 0"),
        ({"prefill_length": 6}, "prefill_length=6 must be a multiple of page_size=4"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        Run(**sizes)


def test_prompts_spread_over_shards_and_their_samples_stay_together():
    run = Run(num_shards=4, num_slots=8, prefill_rows=8)
    for seed in range(8):
        run.submit(prompt(9, seed), sampling(num_samples=4))
    plan = run.round()
    assert len(plan.positions) == 4 * 8 and (plan.positions >= 0).all()
    for ids in np.reshape([s.request_id for s in plan.sequences], (4, 8)):
        assert len(set(ids)) == 2
    assert run.scheduler.metrics.prefill_tokens == 8 * 8
    run.run()
    run.check()


def test_no_shard_idles_for_the_sake_of_sharing():
    run = Run(num_shards=4, num_slots=8)
    run.submit(prompt(9), sampling(num_samples=8))
    plan = run.round()
    assert len(plan.positions) == 4 * 2 and (plan.positions >= 0).all()


def test_a_sequence_goes_where_most_pages_are_available():
    run = Run(num_shards=2)
    for seed, length in enumerate([30, 5, 6]):
        run.submit(prompt(length, seed))
    plan = run.round()
    np.testing.assert_array_equal(plan.positions, [29, -1, 5, 4])


def test_rows_are_compact_and_sorted_by_length():
    run = Run(num_shards=2, num_slots=6, num_pages=64, min_rows=2, prefill_rows=6)
    lengths = [3, 20, 7, 15, 30, 2, 9]
    for seed, length in enumerate(lengths):
        run.submit(prompt(length, seed), sampling(4 + 4 * (seed % 2)))
    plan = run.round(num_steps=4)
    assert len(plan.positions) == 2 * 4
    for positions in plan.positions.reshape(2, 4):
        assert positions.tolist() == sorted(positions.tolist(), reverse=True)
    assert sorted(plan.positions[plan.positions >= 0] + 1) == sorted(lengths)
    for row, sequence in enumerate(plan.sequences):
        if sequence is None:
            assert plan.slots[row] == -1 and (plan.page_table[row] == -1).all()
    sizes = {len(plan.positions) for plan in run.run(num_steps=1)}
    assert sizes <= {2 * 2, 2 * 4, 2 * 6}
    run.check()


def test_arrays_say_how_each_row_is_sampled():
    run = Run()
    run.submit(prompt(5, 1), sampling(7, top_k=5), (71,))
    run.submit(
        prompt(3, 2), SamplingParams(0.5, 4, (51, 52, 53), top_p=0.9, min_p=0.1), (72,)
    )
    plan = run.round(num_steps=2)
    expected = {
        "positions": [4, 2],
        "tokens": [prompt(5, 1)[-1], prompt(3, 2)[-1]],
        "limits": [11, 6],
        "sample_ids": [71, 72],
        "temperature": np.float32([1.0, 0.5]),
        "top_k": [5, 0],
        "top_p": np.float32([1.0, 0.9]),
        "min_p": np.float32([0.0, 0.1]),
        "stop_ids": [[NEVER_DRAWN, -1, -1, -1], [51, 52, 53, -1]],
    }
    for name, values in expected.items():
        array = getattr(plan, name)
        np.testing.assert_array_equal(array, values)
        floats = name in ("temperature", "top_p", "min_p")
        assert array.dtype == (np.float32 if floats else np.int32), name
    assert plan.page_table.dtype == np.int32
    assert plan.page_table.shape == (2, 32)


def test_cancelling_ends_what_has_not_ended():
    run = Run(num_slots=2)
    request_id = run.submit(prompt(5), sampling(20, num_samples=3))
    other = run.submit(prompt(4, 1), sampling(6))
    run.round()

    def cancel():
        run.note(run.scheduler.cancel(request_id))

    run.decode(meanwhile=cancel)  # its tokens are dropped
    lengths = [len(run.sequences[request_id, i].completion().tokens) for i in range(3)]
    assert lengths == [4, 4, 0]
    assert run.scheduler.cancel(request_id) == run.scheduler.cancel(99) == []
    run.run()
    run.check(cancelled={request_id})
    assert len(run.sequences[other, 0].completion().tokens) == 6


@pytest.mark.parametrize("length", [17, 19])  # without and with a page to copy
def test_when_the_first_sample_goes_another_computes_the_prompt(length):
    run = Run(prefill_rows=3, prefill_length=PAGE)
    first = run.submit(prompt(length), sampling())
    second = run.submit(prompt(length), sampling(num_samples=2))
    assert (run.prefill().start >= 0).sum() == 1
    run.note(run.scheduler.cancel(first))
    run.run()
    run.check(cancelled={first})
    assert len(run.sequences[second, 0].completion().tokens) == 8


def test_new_weights_compute_everything_anew():
    run = Run(num_slots=3)
    request_id = run.submit(prompt(9), sampling(12, num_samples=4))
    run.round()
    run.scheduler.forget_prefixes()
    run.device.weights = 7
    run.run()
    for sample, sample_id in enumerate(run.requests[request_id].sample_ids):
        done = run.sequences[request_id, sample].completion().tokens.tolist()
        drawn = done[: 4 if sample < 3 else 0]
        assert drawn == complete(prompt(9), sample_id, sampling(12))[0][: len(drawn)]
        assert done == complete(prompt(9), sample_id, sampling(12), 7, drawn)[0]


def test_bursts_are_recorded_in_turn():
    run = Run()
    run.submit(prompt(5))
    run.prefill()
    plan = run.scheduler.next_decode(2)
    for act in (lambda: run.scheduler.next_decode(2), run.scheduler.forget_prefixes):
        with pytest.raises(RuntimeError, match="has not been recorded"):
            act()
    out = run.device.decode(plan, run.known)
    run.scheduler.record(plan, *out)
    with pytest.raises(RuntimeError, match=r"the plan that next_decode\(\) gave last"):
        run.scheduler.record(plan, *out)


def test_an_unfinished_sequence_has_no_completion():
    run = Run()
    run.submit(prompt(5))
    plan = run.round()
    with pytest.raises(RuntimeError, match="has not ended"):
        plan.sequences[0].completion()


def test_the_same_calls_give_the_same_plans():
    def plans():
        run = Run(num_shards=2, num_slots=3, num_pages=8)
        for seed in range(6):
            run.submit(prompt(9, seed % 3), sampling(16, num_samples=2))
        return run.run(num_steps=3)

    first, second = plans(), plans()
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for name in ("tokens", "page_table", "copy_source", "copy_target", "slots"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def serve(lengths, num_slots, num_steps):
    """Runs sequences that stop after ``lengths`` tokens, without a device.

    Returns:
      Slots used and computed rows used, as parts, the first while sequences waited.
    """
    scheduler = Scheduler(
        num_shards=1,
        num_slots=num_slots,
        num_pages=num_slots * 40,
        page_size=128,
        prefill_rows=8,
        prefill_length=512,
        max_length=4096,
    )
    params = SamplingParams(1.0, 2048, (0,))
    for i in range(len(lengths)):
        scheduler.submit(Request(prompt(100, i), params, (i,)))
    left = np.array(lengths)
    busy = None
    while scheduler.has_work:
        while scheduler.next_prefill() is not None:
            pass
        plan = scheduler.next_decode(num_steps)
        ids, shape = plan.sample_ids, (len(plan.slots), num_steps)
        counts = np.where(plan.slots >= 0, np.minimum(num_steps, left[ids]), 0)
        np.subtract.at(left, ids, counts)
        stopped = (plan.slots >= 0) & (left[ids] == 0)
        tokens, log_probs = np.ones(shape, np.int32), np.zeros(shape, np.float32)
        scheduler.record(plan, tokens, log_probs, counts, stopped)
        if busy is None and (left > 0).sum() <= num_slots:
            metrics = scheduler.metrics
            busy = metrics.generated_tokens / metrics.slot_steps
    metrics = scheduler.metrics
    assert metrics.generated_tokens == sum(lengths)
    return busy, metrics.generated_tokens / metrics.row_steps


def test_slots_are_used_while_sequences_wait():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.8, 512), 1, 2048).astype(int).tolist()
    slots, rows = serve(lengths, num_slots=256, num_steps=16)
    assert slots >= 0.9
    # In the end few run on; smaller programs make up for most of it.
    assert rows >= 0.85
