"""Lookahead decoding with plain lists, the reference for Lookahead's and Ouroboros's tests."""


class PlainLookahead:
    """A window and a pool of n-grams for a text, with a function ``rule(text)`` as the model.

    ``pool`` maps a token to the tuples seen after it, the newest last; it may be shared.
    """

    def __init__(self, rule, first_level, n_gram, cap, pool=None, lost_bonus=True):
        self.rule, self.n_gram, self.cap, self.lost_bonus = rule, n_gram, cap, lost_bonus
        self.levels = [list(first_level)]
        self.pool = {} if pool is None else pool

    def insert(self, key, gram):
        entries = self.pool.setdefault(key, [])
        if gram in entries:
            entries.remove(gram)
        entries.append(gram)
        del entries[: -self.cap]

    @property
    def filled(self):
        return len(self.levels) == self.n_gram - 1

    def new_tokens(self, text):
        """Return the tokens that one pass commits after ``text``."""
        best = [self.rule(text)]
        for gram in self.pool.get(text[-1], []) if self.filled else []:
            choices = [self.rule(text + list(gram[:i])) for i in range(self.n_gram)]
            matched = 0
            while matched < self.n_gram - 1 and gram[matched] == choices[matched]:
                matched += 1
            new = choices[: matched + 1]
            if self.lost_bonus:
                new = new[: self.n_gram - 1]
            if len(new) > len(best):
                best = new
        return best

    def move(self, text):
        """Update window and pool after a pass; ``text`` is the text before it."""
        full = [text[-1], *self.levels[0]]  # level 0 with the root as column 0
        columns = range(len(full)) if len(self.levels) == 1 else range(len(self.levels[1]))
        diagonals = [[level[column] for level in self.levels[1:]] for column in columns]
        outputs = [self.rule(text + full[1 : c + 1] + diagonals[c]) for c in columns]
        if self.filled:
            for c in columns:
                self.insert(full[c], (*diagonals[c], outputs[c]))
            self.levels = [*self.levels[1:], outputs]
            self.levels[0] = self.levels[0][1:]
        else:
            self.levels = [level[1:] for level in self.levels]
            self.levels.append(outputs[1:])
