"""Cacheback in plain Python, written from the method's description: the oracle of the tests."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


class PlainTable:
    """Leaders and followers as ordered dictionaries; the last key is the most recent."""

    def __init__(self, leader_len, follower_len, leader_capacity, follower_capacity):
        self.leader_len = leader_len
        self.follower_len = follower_len
        self.leader_capacity = leader_capacity
        self.follower_capacity = follower_capacity
        self.entries: OrderedDict[tuple, OrderedDict] = OrderedDict()

    def put(self, leader, follower):
        if leader in self.entries:
            self.entries.move_to_end(leader)
        else:
            if len(self.entries) == self.leader_capacity:
                self.entries.popitem(last=False)
            self.entries[leader] = OrderedDict()
        followers = self.entries[leader]
        if follower in followers:
            followers.move_to_end(follower)
        else:
            if len(followers) == self.follower_capacity:
                followers.popitem(last=False)
            followers[follower] = None

    def get(self, leader):
        if leader not in self.entries:
            return []
        self.entries.move_to_end(leader)
        return list(reversed(self.entries[leader]))

    def insert_windows(self, tokens, begin, end):
        for last in range(begin, end):
            start = last + 1 - self.leader_len - self.follower_len
            if start >= 0:
                middle = start + self.leader_len
                self.put(tuple(tokens[start:middle]), tuple(tokens[middle : last + 1]))

    def snapshot(self):
        return [(leader, list(followers)) for leader, followers in self.entries.items()]


class PlainFrozen:
    """A table that nothing changes: leader to followers, the most frequent first."""

    def __init__(self, leader_len, follower_len, entries):
        self.leader_len = leader_len
        self.follower_len = follower_len
        self.entries = entries

    def get(self, leader):
        return self.entries.get(leader, [])


@dataclass
class Node:
    token: int
    source: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    queued: bool = False

    def path(self):
        tokens, node = [], self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


def draft(tokens, tables, budget, reserve, merge):
    """Tokens, parents and sources of one tree, in depth-first pre-order."""
    root = Node(-1, -1, None)
    room, full = budget - reserve, False
    level = [root]
    first_level = True
    while level and not full:
        grown = []
        for leaf in level:
            text = list(tokens) + leaf.path()
            answers = []
            for source, table in enumerate(tables):
                followers = []
                if len(text) >= table.leader_len:
                    followers = table.get(tuple(text[-table.leader_len :]))
                answers += [(source, follower) for follower in followers]
            for source, follower in answers:
                room, full, end = _hang(leaf, follower, source, room, merge)
                if full:
                    break
                if not end.queued:
                    end.queued = True
                    grown.append(end)
            if full:
                break
        if first_level:
            first_level = False
            room += reserve
            if reserve > 0:
                full = False
        level = grown
    out = ([], [], [])
    _emit(root, -1, out)
    return out


def _hang(leaf, follower, source, room, merge):
    if not merge and room < len(follower):
        return room, True, leaf
    node = leaf
    for token in follower:
        same = [child for child in node.children if child.token == token] if merge else []
        if same:
            node = same[0]
            continue
        if room <= 0:
            return room, True, node
        child = Node(token, source, node)
        node.children.append(child)
        node = child
        room -= 1
    return room, False, node


def _emit(node, parent, out):
    for child in node.children:
        out[0].append(child.token)
        out[1].append(parent)
        out[2].append(child.source)
        _emit(child, len(out[0]) - 1, out)
