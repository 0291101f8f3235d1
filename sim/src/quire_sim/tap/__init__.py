"""`quire tap`: a relay before a server, which shows what each request found in the cache.

relay      bytes from clients to the server and back, as they come
records    exchanges as lines of a file, without credentials
kinds      a prompt beside the nearest earlier one: its kind, and where the two part
observing  exchanges of an application, told at their end
watching   what the last requests found, for the terminal and the page
page       the page of an application's requests: of the relay, and of a server's own
app        the relay and its page as one application
"""
