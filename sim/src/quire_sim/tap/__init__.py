"""`quire tap`: a relay before a server, which shows what each request found in the cache.

relay      bytes from clients to the server and back, as they come
records    exchanges as lines of a file, without credentials
kinds      a prompt beside the nearest earlier one: its kind, and where the two part
watching   what the last requests found, for the terminal and the page
app        the relay and its page as one application
"""
