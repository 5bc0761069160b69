"""The one authority over a run: parameters, rule, version and admission."""
