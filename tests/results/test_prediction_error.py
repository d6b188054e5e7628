"""One error a surface: what intervals of predicted speedups hold."""

import pytest

from specbench.errors import ResultsError
from specbench.results.prediction_error import UNKNOWN, keep_error, stated_error


def surface(cpu="a cpu", **model):
    machine = {"hardware": {"cpu": cpu, "gpus": []}}
    return {"name": "m", "dtype": "float32", "threads": 2, **model}, machine


def test_an_error_holds_for_its_model_on_its_machine(tmp_path):
    path = tmp_path / "errors.json"
    error, text = stated_error(*surface(), 0.03, path)
    assert error == UNKNOWN
    assert "15.0%, a cautious guess" in text
    keep_error(*surface(), 0.05, path)
    keep_error(*surface("another cpu"), 0.2, path)
    assert stated_error(*surface(), 0.03, path)[0] == 0.05
    assert "5.0%, measured with this model" in stated_error(*surface(), 0.03, path)[1]
    assert stated_error(*surface(), 0.2, path)[0] == 0.2, "the surface claims less for itself"
    for other in (surface("a third"), surface(threads=1), surface(name="n"), surface(weights="x")):
        assert stated_error(*other, 0.03, path)[0] == UNKNOWN
    keep_error(*surface(), 0.07, path)
    assert stated_error(*surface(), 0.03, path)[0] == 0.07, "in place of the earlier one"
    path.write_text('{"errors": [{"of": {}}]}')
    with pytest.raises(ResultsError, match="damaged"):
        stated_error(*surface(), 0.03, path)
