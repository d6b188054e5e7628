"""From records to the numbers of a table; numpy and scipy only, no torch.

The unit is the case (prompt): its turns and repeats are pooled before anything else, so they never
count as independent.

- :mod:`specbench.results.statistics.bootstrap`: ratios with intervals.
- :mod:`specbench.results.statistics.multiple`: several methods at once, and the best of them.
- :mod:`specbench.results.statistics.summary`: rows of ``summary.json``.
- :mod:`specbench.results.statistics.pairs`: its pairs, and the methods that may be the fastest.
- :mod:`specbench.results.run_summary`: the whole of ``summary.json``.
"""
