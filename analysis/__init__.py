"""Tables, figures and pages made from the records of runs."""

import sys

from specbench.config.removed import refuse_module

if sys.argv[:1] == ["-m"]:  # the module that ``python -m`` names is not looked for yet
    refuse_module(sys.orig_argv)
