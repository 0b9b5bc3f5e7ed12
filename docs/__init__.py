"""The documentation's pages; `conf.py` and `extensions/` build the site from them."""
