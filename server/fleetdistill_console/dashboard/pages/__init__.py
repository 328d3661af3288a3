"""The pages: each module has a function `show` that draws one and keeps it up to date."""
