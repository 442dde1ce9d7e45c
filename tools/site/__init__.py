"""The documentation site, built from the packages: `nox -s site`, or `python -m tools.site` in its environment.

`pages` maps files to pages and rewrites their links, `api` writes the reference of public names, `methods` the tables
that follow from ledger and placements, `loop` the diagram of events; `notebooks` runs the tutorials. MkDocs renders the
pages, and `links` checks the result. `guides/` and `tutorials/` are written by hand.
"""
