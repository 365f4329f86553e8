"""Parts of `efficiency_fit.py`: the tables of measured operations, the search, the errors, the generated module."""
