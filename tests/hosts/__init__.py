"""Tests on two hosts, which are network namespaces of this machine."""
