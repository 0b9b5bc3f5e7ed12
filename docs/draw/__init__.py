"""The drawings of the documentation: `make drawings` measures short runs and draws them.

`measure.py` runs clcomm's own commands and keeps what is drawn, in docs/drawings/measured.json; `pictures.py` draws it.
"""
