"""The local engine, each figure measured beside its peers and limits in the same run."""
