/* The cells of a JavaScript client's row: what cells.py is to Python clients. */
import assert from "node:assert";

export const FEATURES = [
  "chat", "stream", "tools", "forced_tool", "json_schema", "stop", "cancel", "n", "logprobs", "responses",
  "previous_response", "messages", "count_tokens", "embeddings", "reasoning", "errors", "usage", "scoring",
];
export const SYSTEM = "You answer questions about Python. ".repeat(4);
export const TALK = "What is a list?";
export const SCHEMA = {
  type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false,
};
export const PARAMETERS = {
  type: "object", properties: { zone: { type: "string", enum: ["UTC", "CET"] } }, required: ["zone"], additionalProperties: false,
};
export const CALL = String.raw`<tool_call>\{"name": "now", "arguments": \{"zone": "(UTC|CET)"\}\}</tool_call>`;

const KEY = "key-of-clients", OPERATOR_KEY = "key-of-operator", MAX_INFLIGHT = 4, CELL_MS = 120_000;

/* A server that was started for clients. */
export class Server {
  constructor(url, model, key = KEY) { Object.assign(this, { url, model, key, v1: `${url}/v1` }); }

  with(key) { return new Server(this.url, this.model, key); }

  /* The sum of the numbers in `/metrics` whose lines match. */
  async count(name) {
    const answer = await fetch(`${this.url}/metrics`, { headers: { authorization: `Bearer ${OPERATOR_KEY}` } });
    const lines = (await answer.text()).split("\n").filter((line) => name.test(line));
    return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
  }

  numRequests() { return this.count(/^quire_requests_(running|waiting)/); }

  /* Check that a request of a function ends since its client leaves, and not by itself. */
  async cancelled(ask) {
    const aborts = /^quire_finished_total\{reason="abort"/, before = await this.count(aborts);
    await ask();
    await this.waitIdle();
    assert(await this.count(aborts) > before, "the request ran to its end");
  }

  async waitIdle() {
    for (const until = Date.now() + 20_000; await this.numRequests(); await new Promise((go) => setTimeout(go, 50)))
      assert(Date.now() < until, "requests still run");
  }

  /* Hold all of the server's places while a function runs. */
  async whenFull(ask) {
    const asked = { prompt: TALK, max_tokens: 1500, min_tokens: 1500, ignore_eos: true, stream: true };
    const headers = { authorization: `Bearer ${KEY}`, "content-type": "application/json" };
    const gone = new AbortController();
    try {
      for (let each = 0; each < MAX_INFLIGHT; each++) {
        const options = { method: "POST", body: JSON.stringify(asked), headers, signal: gone.signal };
        await (await fetch(`${this.v1}/completions`, options)).body.getReader().read();
      }
      await ask();
    } finally {
      gone.abort();
    }
    await this.waitIdle();
  }
}

/* Assert that a promise is rejected with an error of exactly this kind, or status, whose message has these words. */
export async function raised(kind, promise, ...words) {
  const error = await promise.then(() => assert.fail("nothing was raised"), (error) => error);
  const is = typeof kind === "number" ? error.statusCode === kind : error.constructor === kind;
  assert(is, `${error.name} ${error.statusCode ?? ""}: ${error.message}`);
  for (const word of words) assert(`${error.message} ${error.responseBody ?? ""}`.includes(word), `${error.message} lacks ${word}`);
}

/* Run the cells of the command line against its server, and print a line of JSON for each. */
export async function main(cells) {
  const server = new Server(...process.argv.slice(2, 4)), asked = process.argv[5].split(",");
  for (const feature of FEATURES.filter((each) => each in cells && asked.includes(each))) {
    let said = "yes", timer;
    const late = new Promise((_, give) => { timer = setTimeout(() => give(new Error(`took more than ${CELL_MS} ms`)), CELL_MS); });
    try {
      await Promise.race([cells[feature](server), late]);
      await server.waitIdle();
    } catch (error) {
      const place = /client_[a-z_]+\.mjs:\d+/.exec(error.stack ?? "") ?? "";
      said = `${error.name} ${place}: ${String(error.message).replaceAll(/\s+/g, " ")}`.slice(0, 300);
    } finally {
      clearTimeout(timer);
    }
    console.log(JSON.stringify({ feature, said }));
  }
  process.exit();
}
