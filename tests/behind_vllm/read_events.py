"""Reads a publisher with vLLM's own classes: `python read_events.py ENDPOINT REPLAY`, in vLLM's environment.

Prints a line once it listens, and as JSON how many batches came live and by a replay, and the events of the replay.
"""

import json
import sys

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher


def main(endpoint, replay):
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    context = zmq.Context()
    live, asked = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.subscribe("")
    live.connect(endpoint)
    asked.connect(replay)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    numbers = []
    while not numbers or live.poll(500):
        _, number, payload = live.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        decode(payload)
    asked.send_multipart([b"", bytes(8)])
    batches = []
    while (frames := asked.recv_multipart())[2] != ZmqEventPublisher.END_SEQ:
        batches.append(decode(frames[3]))
    events = [
        {"type": type(event).__name__, **msgspec.to_builtins(event)}
        for batch in batches
        for event in batch.events
    ]
    told = {"live": len(numbers), "replayed": len(batches), "events": events}
    sys.stdout.write(json.dumps(told))
    context.destroy(linger=0)


main(*sys.argv[1:])
