"""Plain Python forms of the suffix structures, obvious rather than fast: the tests' oracles."""

import heapq
from collections import Counter


def earlier_suffix(text, room=0):
    """Longest suffix that occurred before, and where its first occurrence was followed.

    Where fewer than ``room`` tokens follow, the longest shorter suffix with enough is taken, or
    the one with most.
    """
    longest, best = 0, len(text)
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        ends = [e for e in range(length, len(text)) if text[e - length : e] == suffix]
        if not ends:
            continue
        longest = longest or length
        best = ends[0]
        if len(text) - best >= room:
            break
    return longest, best


class PlainCorpus:
    """Substrings of documents with their counts; none spans two."""

    def __init__(self, documents):
        self.documents = documents
        self.counts = Counter({(): 0})
        self.followers = {}
        for document in documents:
            self.counts[()] += len(document)
            for i in range(len(document)):
                for j in range(i + 1, len(document) + 1):
                    self.counts[tuple(document[i:j])] += 1
                for j in range(i, len(document)):
                    self.followers.setdefault(tuple(document[i:j]), set()).add(document[j])

    def longest_suffix(self, text):
        return next(tuple(text[i:]) for i in range(len(text) + 1) if tuple(text[i:]) in self.counts)

    def text_after(self, context, count):
        """Return the tokens after the first occurrence in the joined documents."""
        begin = 0
        for document in self.documents:
            for i in range(len(document) - len(context) + 1):
                if tuple(document[i : i + len(context)]) == context:
                    text = [token for text in self.documents for token in text]
                    return text[begin + i + len(context) :][:count]
            begin += len(document)
        raise AssertionError(f"{context} is in no document")

    def continuations(self, context, top):
        """Tokens after ``context``, the most frequent first, equal ones by token."""
        tokens = self.followers.get(context, ())
        return sorted(tokens, key=lambda token: (-self.counts[(*context, token)], token))[:top]

    def best_first(self, context, budget, per_depth, top=8):
        """Tokens and parents of the most probable continuations."""
        tokens, parents, at_depth = [], [], Counter()
        heap = [(-1.0, 0, context, None, -1, 0)]
        n_pushed = 0
        while heap and len(tokens) < budget:
            minus, _, here, token, parent, depth = heapq.heappop(heap)
            node = -1
            if token is not None:
                if at_depth[depth] >= per_depth:
                    continue
                at_depth[depth] += 1
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
            if at_depth[depth + 1] >= per_depth:
                continue
            for following in self.continuations(here, top):
                n_pushed += 1
                below = (*here, following)
                probability = minus * self.counts[below] / self.counts[here]
                heapq.heappush(heap, (probability, n_pushed, below, following, node, depth + 1))
        return tokens, parents


class PlainSuffixTree:
    """One dictionary entry per substring; children kept in order by hand."""

    def __init__(self, depth, max_requests=None):
        self.depth = depth
        self.max_requests = max_requests
        self.requests = []
        self.counts = Counter()
        self.children = {}

    def start_request(self):
        if self.max_requests is not None and len(self.requests) >= self.max_requests:
            self.evict()
        self.requests.append([])

    def extend(self, tokens):
        for token in tokens:
            request = self.requests[-1]
            request.append(token)
            for length in range(min(self.depth, len(request)), 0, -1):
                self._move(tuple(request[-length:]), 1)

    def evict(self):
        request = self.requests.pop(0)
        for i in range(len(request)):
            longest = min(self.depth, len(request) - i)
            for length in range(longest, 0, -1):
                self._move(tuple(request[i : i + length]), -1)

    def _move(self, path, change):
        self.counts[path] += change
        siblings = self.children.setdefault(path[:-1], [])
        if path in siblings:
            at = siblings.index(path)
            siblings.pop(at)
        else:
            at = len(siblings)
        count = self.counts[path]
        if count == 0:
            del self.counts[path]
            return
        if change > 0:
            while at > 0 and self.counts[siblings[at - 1]] < count:
                at -= 1
        else:
            while at < len(siblings) and self.counts[siblings[at]] > count:
                at += 1
        siblings.insert(at, path)

    def speculate(self, text, factor, offset, longest, least, branching):
        best_score, best = 0.0, ([], [])
        for p in range(1, min(self.depth, len(text))):
            context = tuple(text[-p:])
            if context not in self.counts:
                break
            budget = min(longest, int(factor * p + offset))
            draw = self._tree if branching else self._path
            score, draft = draw(context, budget, least)
            if score >= best_score and budget > 0:
                best_score, best = score, draft
        return best_score, best

    def _path(self, context, budget, least):
        tokens, probability, score = [], 1.0, 0.0
        while len(tokens) < budget and self.children.get(context):
            child = self.children[context][0]
            probability *= self.counts[child] / self.counts[context]
            if probability < least:
                break
            tokens.append(child[-1])
            score += probability
            context = child
        return score, (tokens, list(range(-1, len(tokens) - 1)))

    def _tree(self, context, budget, least):
        tokens, parents, score, n_pushed = [], [], 0.0, 0
        heap = [(-1.0, 0, context, -1)]
        while heap and len(tokens) < budget:
            minus, order, here, above = heapq.heappop(heap)
            node = -1
            if order:
                node = len(tokens)
                tokens.append(here[-1])
                parents.append(above)
                score -= minus
            for child in self.children.get(here, []):
                share = self.counts[child] / self.counts[here]
                below = minus if share == 1 else minus * self.counts[child] / self.counts[here]
                if -below < least:
                    break
                n_pushed += 1
                heapq.heappush(heap, (below, n_pushed, child, node))
        return score, (tokens, parents)
