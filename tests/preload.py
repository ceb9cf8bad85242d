"""Imports that processes of tests share: see tests/forked.py."""

import tests.faults.process  # noqa: F401
