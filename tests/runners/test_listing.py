"""``python run.py --list``: every choice, from its own file, within 80 columns."""

import io

import pytest
from rich.console import Console

from runners.launch import listing
from specbench.config.compose import option_names
from specbench.errors import ConfigurationError


@pytest.mark.parametrize("name", listing.LISTS)
def test_every_choice_is_there_within_80_columns(name):
    out = io.StringIO()
    listing.print_list_if_requested(["--list", name], Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    first = {line.split()[0] for line in lines if line.strip()}
    assert set(option_names(listing.LISTS[name])) <= first
    assert "python run.py" not in out.getvalue()


def test_methods_come_with_their_papers():
    out = io.StringIO()
    listing.print_list_if_requested(["--list=methods"], Console(file=out, width=80))
    papers = {line.split()[0]: line for line in out.getvalue().splitlines() if line.strip()}
    assert "2511.21699" in papers["cacheback"]
    for name in ("pld", "ssd"):
        assert "no paper" in papers[name]
    for name in option_names("method"):
        assert len(papers[name].split()) >= 3, "its class's first line says what it is"


def test_an_unknown_list_names_the_nearest():
    with pytest.raises(ConfigurationError, match="Did you mean 'methods'"):
        listing.print_list_if_requested(["--list", "method"])
    with pytest.raises(ConfigurationError, match="--list methods"):
        listing.print_list_if_requested(["--list"])
