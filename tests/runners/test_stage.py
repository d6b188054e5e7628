"""What the labels of a run share, where one of them runs on an engine of its own."""

from __future__ import annotations

import numpy as np
import torch

from runners import stage
from runners.contenders import build_contenders
from runners.dispatch import Invocation, execute
from specbench import config
from specbench.graph import GraphTarget


def test_the_eager_baselines_buffers_grow_and_empty_with_the_others(small, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "no_graphs", lambda model: None)  # its code runs on a CPU too
    seen = {}

    def prepare(_work, job):
        contenders = build_contenders(job)
        seen["stage"], seen["contenders"] = stage.Stage(job, contenders), contenders
        return 0

    compare = "compare=[{method: ar, eager: true, label: ar_eager}]"
    extra = ["engine=graph", "measure.exclusive=false", compare]
    execute(config.compose([*small, *extra, f"output_dir={tmp_path}/run"]), Invocation(), prepare)
    made = seen["stage"]
    plain = next(c.drafter for c in seen["contenders"] if c.drafter.needs.eager)
    assert isinstance(made._target, GraphTarget)
    prompt = np.arange(250) % 30 + 3
    assert made._eager_target.cache.max_len == 256
    result = made.decode(prompt, plain, seed=0, max_new_tokens=4)
    assert made._eager_target.cache.max_len == 512
    assert result.output_ids == made.plain(prompt, 4).tolist()

    for target in (made._target, made._eager_target):
        target.cache.storage[:] = torch.nan
    made.recover()
    for target in (made._target, made._eager_target):
        assert not target.cache.storage.any()
