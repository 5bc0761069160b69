"""Processes on this machine that share memory: launcher, server, workers and tester."""
