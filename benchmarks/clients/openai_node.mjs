/* OpenAI's SDK for JavaScript against `quire serve`, by `/v1/responses`: text, the stream helper, a tool, two turns.

    npm install openai zod
    quire serve --port 8000 &
    node benchmarks/clients/openai_node.mjs http://127.0.0.1:8000/v1
*/
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "quire-tiny", temperature: 0, max_output_tokens: 24 };

const said = await client.responses.create({ ...asked, input: "What is a list?" });
console.log("text:", said.output_text, said.status);
assert(said.output_text);

const stream = client.responses.stream({ ...asked, input: "What is a list?" });
let text = "";
for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
assert.equal(text, said.output_text);
console.log("stream:", text);

const more = await client.responses.create({ ...asked, input: "Go on", previous_response_id: said.id });
console.log("second turn, cached tokens:", more.usage.input_tokens_details.cached_tokens);
assert(more.usage.input_tokens_details.cached_tokens > 0);

const parameters = { type: "object", properties: { zone: { type: "integer", minimum: 0, maximum: 9 } }, required: ["zone"], additionalProperties: false };
const tools = [{ type: "function", name: "now", parameters, strict: true }];
const called = await client.responses.create({ ...asked, input: "Time?", tools, tool_choice: "required", max_output_tokens: 80 });
const [call] = called.output;
console.log("tool:", call.name, call.arguments);
const output = { type: "function_call_output", call_id: call.call_id, output: "noon" };
const told = await client.responses.create({ ...asked, input: [output], tools, previous_response_id: called.id });
assert(told.output_text);
await assert.rejects(client.responses.create({ ...asked, input: "a", background: true }), /background is not offered/);
console.log("tool's output read:", told.output_text);
