"""Other packages' surfaces over `msa_tiles.ops`: what a user of theirs calls, with ours beneath.

Nothing here is imported by the rest of the package. `msa_tiles.compat.plugins` is what servers find through their entry
points; it imports neither torch nor a server before one asks for a model that we serve.
"""
