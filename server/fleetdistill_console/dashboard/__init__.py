"""Pages in a browser that show the runs of a store or a server: a process of its own that only reads.

`server` starts it, `feed` reads the source once for all browsers, `site` has the addresses, `pages` what they show.
"""
