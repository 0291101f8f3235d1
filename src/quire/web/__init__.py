"""The base of every HTTP server of quire: keys, errors as OpenAI's object, limits on traffic.

keys      API keys, tenants and their scopes, the operator
errors    a refusal and its answer
bodies    request bodies of limited size, as structs that check themselves
rewrites  rewrites of request bodies of every API
mends     rules by which requests are changed on their way, and the requests that they change
clients   streams of events, and disconnects
places    in-flight limits, shared among API keys
origin    a client of one server, for relays
protocol  uvicorn's HTTP parser with limits
pages     HTML that a server has with it
"""
