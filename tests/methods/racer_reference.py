"""RACER's automaton and logits tree in the plainest form: objects and dictionaries."""


class Node:
    def __init__(self, number):
        self.number = number
        self.empty()

    def empty(self):
        self.token = self.parent = self.fail = None
        self.children, self.count, self.depth = {}, 0, 0


class PlainRacer:
    def __init__(self, max_nodes, ngram, least_depth, capacity, k):
        self.ngram, self.least_depth, self.capacity, self.k = ngram, least_depth, capacity, k
        self.by_use = [Node(i) for i in range(max_nodes)]  # the newest first
        self.root = self.state = self.by_use[-1]
        self.root.fail = self.root
        self.touch(self.root)
        self.table = {}  # candidates by token

    def touch(self, node):
        self.by_use.remove(node)
        self.by_use.insert(0, node)

    def touch_up(self, node):
        while node is not None:
            node.fail = self.root
            self.touch(node)
            node = node.parent

    def insert(self, pattern):
        node = self.root
        node.count += 1
        for token in pattern:
            self.touch(node)
            if token not in node.children:
                new = self.by_use[-1]
                if new.parent and new.parent.children.get(new.token) is new:
                    del new.parent.children[new.token]
                new.empty()
                new.fail, new.parent, new.token, new.depth = self.root, node, token, node.depth + 1
                node.children[token] = new
                self.touch(new)
            node = node.children[token]
            node.count += 1
        self.touch(node)

    def read_prompt(self, text):
        for i in range(len(text) - self.ngram + 1):
            self.insert(text[i : i + self.ngram])
        queue = list(self.root.children.values())
        for node in queue:
            node.fail = self.root
        for node in queue:
            for token, child in node.children.items():
                fail = node.fail
                while fail is not self.root and token not in fail.children:
                    fail = fail.fail
                child.fail = fail.children.get(token, self.root)
                queue.append(child)

    def read_step(self, text, accepted):
        """``text`` ends with the accepted tokens; the former root lies before them."""
        for i in range(accepted + 1):
            if self.ngram + i <= len(text):
                end = len(text) - i
                self.insert(text[end - self.ngram : end])
        if accepted:
            node = self.state
            for token in text[-accepted:]:
                self.touch(node)
                if token not in node.children:
                    while node is not self.root and token not in node.children:
                        node = node.fail
                    self.touch_up(node)
                node = node.children.get(token, node)
            self.touch(node)
            self.state = node

    def draft(self, root):
        """Paths below the root, breadth first, siblings in the order of their first mention."""
        borders, node, moved = [], self.state, False
        while True:
            if child := node.children.get(root):
                borders += [child] * (child.depth >= self.least_depth)
                if not moved:
                    self.state, moved = child, True
            if node is self.root:
                break
            node = node.fail
        for border in borders:
            self.touch_up(border)

        def worth(pair):
            node, border = pair
            return node.count, -node.depth, -node.number, -border.number

        chosen, level = [], [(border, border) for border in borders]
        while level:
            before = list(chosen)
            for pair in level:
                if len(chosen) < self.capacity:
                    chosen.append(pair)
                elif pair[0].count > min(chosen, key=worth)[0].count:
                    chosen.remove(min(chosen, key=worth))
                    chosen.append(pair)
            if chosen == before:
                break
            level = [(child, b) for node, b in level for child in node.children.values()]
        chosen.sort(key=lambda pair: (pair[0].number, pair[1].number))
        paths = []
        for node, border in chosen:
            if not any((child, border) in chosen for child in node.children.values()):
                path = []
                while node is not border:
                    path.insert(0, node.token)
                    node = node.parent
                paths.append(path)
        paths += self.logits_paths(root, self.capacity - len(chosen) - 1)
        trie = {}
        for path in paths:
            at = trie
            for token in path:
                at = at.setdefault(token, {})
        drafted, queue = [], [((), trie)]
        for path, below in queue:
            for token, deeper in below.items():
                drafted.append((*path, token))
                queue.append((drafted[-1], deeper))
        return drafted

    def logits_paths(self, root, left):
        """Branches of the logits' tree, in the order in which their ends are come to."""
        branches, queue = [], [((root,), self.k)]
        for path, breadth in queue:
            below = breadth if len(path) == 2 else breadth // 2
            for i in range(min(breadth, left)):
                queue.append(((*path, self.table.get(path[-1], [0] * self.k)[i]), max(1, below)))
                below //= 2
            if left <= 0:
                branches.append(path[1:])
            left -= min(breadth, max(0, left))
        return branches
