"""A device in plain Python that runs the scheduler's plans on real pages.

A slot of a page holds (position, token, prefix); prefix is a hash of the weights and of
all tokens up to this one, computed from the slot before as read back through the page
table. Instead of a model, the next token is a function of that hash, the position, the
sample id and the sampling parameters: a wrong page changes everything drawn later.
"""

import numpy as np

VOCAB = 50


def chain(prefix, token):
    """The hash of a prefix with one more token."""
    return hash((prefix, int(token)))


def draw(prefix, position, sample_id, params):
    """Token and log-prob at ``position`` after ``prefix``."""
    noise = hash((prefix, position, sample_id, params))
    return noise % VOCAB, np.float32(-(noise // VOCAB % 1000) / 1000)


def complete(prompt, sample_id, sampling, weights=0, drawn=()):
    """Tokens, log-probs and whether it stopped, of a sequence on its own.

    The first tokens may have been ``drawn`` before; log-probs are of those after.
    """
    prefix = weights
    for token in [*prompt, *drawn]:
        prefix = chain(prefix, token)
    tokens, log_probs = list(drawn), []
    params = _params(sampling)
    while len(tokens) < sampling.max_new_tokens:
        position = len(prompt) + len(tokens)
        token, log_prob = draw(prefix, position, sample_id, params)
        tokens.append(token)
        log_probs.append(log_prob)
        if token in sampling.stop_ids:
            return tokens, log_probs, True
        prefix = chain(prefix, token)
    return tokens, log_probs, False


def _params(sampling):
    fields = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
    return tuple(float(np.float32(x)) for x in fields)


class FakeDevice:
    """Pages of every shard, and the two programs.

    ``weights``, any number, may be changed.
    """

    def __init__(self, num_shards, num_pages, page_size):
        self.weights = 0
        self._page_size = page_size
        self.num_shards = num_shards
        # What was there before the first write is as wrong as what is left over.
        self._pages = [
            [[None] * page_size for _ in range(num_pages)] for _ in range(num_shards)
        ]

    def _shard(self, row, rows):
        return self._pages[row // (rows // self.num_shards)]

    def _read(self, pages, table, position):
        """The prefix at ``position`` and all tokens up to there."""
        tokens, prefix = [], self.weights
        for at in range(position + 1):
            page = table[at // self._page_size]
            assert page >= 0, f"position {at} has no page"
            entry = pages[page][at % self._page_size]
            assert entry is not None, f"position {at} was never written"
            found, token, stored = entry
            assert found == at, f"position {at} holds that of position {found}"
            prefix = chain(prefix, token)
            assert stored == prefix, f"position {at} follows other tokens or weights"
            tokens.append(token)
        return prefix, tokens

    def prefill(self, plan):
        """Runs a chunk of every row; no row sees what another writes."""
        rows = len(plan.start)
        writes = {}
        for row in np.flatnonzero(plan.start >= 0).tolist():
            start, table = int(plan.start[row]), plan.page_table[row].tolist()
            assert start % self._page_size == 0
            pages = self._shard(row, rows)
            prefix, _ = self._read(pages, table, start - 1)
            for i, token in enumerate(plan.tokens[row].tolist()):
                prefix = chain(prefix, token)
                entry, slot = divmod(start + i, self._page_size)
                if entry >= len(table) or table[entry] < 0:
                    continue
                key = id(pages[table[entry]]), slot
                assert key not in writes, "two rows write one slot"
                writes[key] = (pages[table[entry]], (start + i, token, prefix))
        for (_, slot), (page, entry) in writes.items():
            page[slot] = entry

    def decode(self, plan, known):
        """Runs a burst.

        ``known`` gives all tokens that a row must have, by (request id, sample).
        """
        rows = len(plan.positions)
        self._copy(plan)
        tokens = np.full((rows, plan.num_steps), -7, np.int32)
        log_probs = np.full((rows, plan.num_steps), np.nan, np.float32)
        counts, stopped = np.zeros(rows, np.int32), np.zeros(rows, bool)
        own = {}
        for row in np.flatnonzero(plan.positions >= 0).tolist():
            sequence = plan.sequences[row]
            own[row] = list(known[sequence.request_id, sequence.sample])
            assert plan.positions[row] == len(own[row]) - 1
            assert plan.tokens[row] == own[row][-1]
        for step in range(plan.num_steps):
            written = set()
            for row, mine in own.items():
                position = len(mine) - 1
                if stopped[row] or position >= plan.limits[row]:
                    continue
                pages, table = self._shard(row, rows), plan.page_table[row].tolist()
                prefix, cached = self._read(pages, table, position - 1)
                assert cached == mine[:-1], "the table does not hold the row's tokens"
                prefix = chain(prefix, mine[-1])
                entry, slot = divmod(position, self._page_size)
                assert table[entry] >= 0, "there is no page to write to"
                page = pages[table[entry]]
                assert (id(page), slot) not in written, "two rows write one slot"
                written.add((id(page), slot))
                page[slot] = (position, mine[-1], prefix)
                params = tuple(
                    float(x[row])
                    for x in (plan.temperature, plan.top_p, plan.min_p, plan.top_k)
                )
                token, log_prob = draw(
                    prefix, position + 1, int(plan.sample_ids[row]), params
                )
                mine.append(token)
                tokens[row, step], log_probs[row, step] = token, log_prob
                counts[row] += 1
                stopped[row] = token in plan.stop_ids[row]
        return tokens, log_probs, counts, stopped

    def _copy(self, plan):
        shards = zip(
            self._pages,
            plan.copy_source.reshape(self.num_shards, -1).tolist(),
            plan.copy_target.reshape(self.num_shards, -1).tolist(),
            strict=True,
        )
        for pages, sources, targets in shards:
            assert len({t for t in targets if t >= 0}) == sum(t >= 0 for t in targets)
            found = [list(pages[source]) for source in sources]
            for target, page in zip(targets, found, strict=True):
                if target >= 0:
                    pages[target][:] = page
