"""Printed names: one for each thing, and of things that there are."""

from analysis.runs.claims import load_claims
from specbench.paths import PROJECT
from specbench.results.names import DATASETS, METHODS, MODELS, TASKS
from specbench.results.tasks import OVERALL
from specbench.results.tasks import TASKS as SPEC_BENCH_TASKS

# Twins that a run adds itself.
MADE_BY_RUNS = {"ar_eager"}


def yaml_names(group: str) -> set[str]:
    return {path.stem for path in (PROJECT / "conf" / group).glob("[!_]*.yaml")}


def test_every_listed_name_is_one_that_runs_or_papers_have():
    """A name that moved would else stay here and be printed no more."""
    claims = load_claims()
    papers = {name for c in claims for name in (c.model, c.dataset, c.method)}
    for listed, group in ((METHODS, "method"), (MODELS, "model"), (DATASETS, "dataset")):
        assert set(listed) <= yaml_names(group) | papers | MADE_BY_RUNS
    assert set(TASKS) == {*SPEC_BENCH_TASKS, OVERALL}


def test_no_two_things_have_one_printed_name():
    kinds = (METHODS, MODELS, DATASETS, TASKS)
    for listed in kinds:
        assert len(set(listed.values())) == len(listed)
    assert len({name for listed in kinds for name in listed}) == sum(map(len, kinds))
