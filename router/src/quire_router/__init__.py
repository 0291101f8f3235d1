"""Many replicas as one service.

index     which replica holds which prefix in which tier, from the events of their caches
keys      blocks by their tokens and all before them
numbers   64-bit names to small numbers, in arrays
gateway   what stands before servers: requests read as far as routing needs, answers passed on
proxy     a gateway to servers over HTTP
relay     a request on its way to one of them, and its answer back
replicas  a gateway to replicas on Ray Serve, and these
request_router  which of them Ray Serve sends a request to
sent      a request on its way there
sent_index  the prompts that servers were sent
prefixes  what it knows of prompts: from events, or from what it sent
upstreams servers behind it
listing   the list of them, which may change
fleet     those of the list, added and removed
breaker   whether one that fails is asked
candidates  the order in which a request asks them
rates     limits by key
spans     spans of OpenTelemetry
usage     tokens of an answer, as its server tells them
counts    its metrics
"""
