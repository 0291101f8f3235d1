"""What every HTTP server of quire has: keys, errors as OpenAI's object, bodies and streams with bounds.

keys     who asks: tenants and their scopes, the operator
errors   a refusal and its answer
clients  bodies, streams of events, clients that go
"""
