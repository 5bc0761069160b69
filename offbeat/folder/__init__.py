"""Run folders on disk: files that are whole or not there, checked, and one writer at a time."""
