"""On the path of a job's processes: training steps take their time while a file is there, so that a test can interfere.

The file is named by SLOW_WHILE; it holds the seconds of a step.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path


class _Pace(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "embedtrain.training.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            step = module.train_step

            def slowly(*arguments, **how):
                marker = Path(os.environ["SLOW_WHILE"])
                if marker.exists():
                    time.sleep(float(marker.read_text() or 0))
                return step(*arguments, **how)

            module.train_step = slowly

        spec.loader.exec_module = exec_module
        return spec


if "SLOW_WHILE" in os.environ:
    sys.meta_path.insert(0, _Pace())
