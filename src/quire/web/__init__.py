"""What every HTTP server of quire has: keys, errors as OpenAI's object, bodies and streams with bounds.

keys      who asks: tenants and their scopes, the operator
errors    a refusal and its answer
bodies    what is sent, in bounds, as structs that check themselves
clients   streams of events, and clients that go
protocol  what is read of HTTP
pages     HTML that a server has with it
"""
