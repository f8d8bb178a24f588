"""Imports what ``preloaded`` names, in the process that forks the others: nobody collects garbage there."""

import gc
import importlib

from tests.fakes.preloaded import MODULES

gc.disable()
for module in MODULES:
    importlib.import_module(module)
gc.freeze()  # a child would look through all of it, and copy the pages that it looks at
gc.enable()
